-- Shared by the scripts that read or write scores of `lru` and `pins`; the schema says what they hold.
local DEEPEST, UNIT, WORTH_MINUTES = 2 ^ 20 - 1, 2 ^ 26, 10

-- score_of(minute, depth, worth): of a segment that was used last in that minute, a multiple of a quarter. The fraction
-- of depth and worth is less than a quarter.
local function score_of(minute, depth, worth)
  local fraction = (math.min(depth, DEEPEST) * 16 + worth) / UNIT
  return string.format('%.17g', minute + worth * WORTH_MINUTES - fraction)
end

-- use_of(score): the minute of the last use, and what must be taken from a minute to make a score of it.
local function use_of(score)
  local keep = math.ceil(score * 4) / 4
  local fraction = keep - score
  local moved = fraction * UNIT % 16 * WORTH_MINUTES
  return keep - moved, fraction - moved
end

-- minute_of(asked, now): the minute of a use: that of this clock's second `now`, to the quarter, or an earlier one.
local function minute_of(asked, now)
  local present = math.floor(now / 15) / 4
  return asked == '' and present or math.min(tonumber(asked), present)
end
