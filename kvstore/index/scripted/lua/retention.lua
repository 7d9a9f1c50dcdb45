-- Shared by the scripts that must know of retained segments: `kept` holds until when one is, and its true last
-- use; its score in `lru` is that of a use at that time. (Needs score.lua.)
--
-- A score of `kept` is the unix second of the end + minutes from the last use to that / 2^21, at most 2^21 - 1.
local AGES, EXPIRED_AT_ONCE = 2 ^ 21, 200

local function retention(ends, minute)
  local age = math.max(0, math.min(math.floor(ends / 60) - math.floor(minute), AGES - 1))
  return string.format('%.17g', ends + age / AGES)
end

-- ends_of(score): when the retention ends, unix second, and the unix minute of the last use.
local function ends_of(score)
  local ends = math.floor(score)
  return ends, math.floor(ends / 60) - (score - ends) * AGES
end

-- used_while_retained(segments, minute): note a use of those that are retained.
local function used_while_retained(segments, minute)
  if redis.call('EXISTS', kept) == 0 then return end
  for first = 1, #segments, PIECE do
    local some = {unpack(segments, first, math.min(first + PIECE - 1, #segments))}
    for i, score in ipairs(redis.call('ZMSCORE', kept, unpack(some))) do
      if score then
        local ends, used = ends_of(tonumber(score))
        if used < math.floor(minute) then redis.call('ZADD', kept, retention(ends, minute), some[i]) end
      end
    end
  end
end

-- held_back(amounts): add to the sums of what is retained: by salt, and in all under ''.
local function held_back(amounts)
  for salt, nbytes in pairs(amounts) do
    if nbytes ~= 0 then counted(salt, nbytes, retained) end
    if salt ~= '' and redis.call('HGET', retained, salt) == '0' then redis.call('HDEL', retained, salt) end
  end
  if redis.call('EXISTS', kept) == 0 then redis.call('DEL', retained) end
  counted('changes', 1)
end

-- restore(some, scores): retained segments are so no more, and count as used when they were, unless they were used
-- since their time was over.
local function restore(some, scores)
  if #some == 0 then return end
  local values, sums = redis.call('HMGET', segs, unpack(some)), {[''] = 0}
  redis.call('ZREM', kept, unpack(some))
  for i, value in ipairs(values) do
    if value then
      local size, _, rest = account(value)
      local salt = salt_of(value, rest)
      sums[''] = sums[''] - size
      if salt ~= '' then sums[salt] = (sums[salt] or 0) - size end
    end
  end
  for _, where in ipairs({lru, pins}) do
    local changes = {}
    for i, text in ipairs(redis.call('ZMSCORE', where, unpack(some))) do
      local placed = tonumber(text or nil)
      if placed then
        local used, less = use_of(placed)
        local ends, minute = ends_of(scores[i])
        if used <= math.floor(ends / 60) then
          changes[#changes + 1] = string.format('%.17g', minute - less)
          changes[#changes + 1] = some[i]
        end
      end
    end
    if #changes > 0 then redis.call('ZADD', where, unpack(changes)) end
  end
  held_back(sums)
end

-- restore_kept(some): those of them that are retained are so no more.
local function restore_kept(some)
  if #some == 0 then return end
  local chosen, scores = {}, {}
  for i, score in ipairs(redis.call('ZMSCORE', kept, unpack(some))) do
    if score then
      chosen[#chosen + 1], scores[#scores + 1] = some[i], tonumber(score)
    end
  end
  restore(chosen, scores)
end

-- expire_retained(): restore those whose time is over, some at a time. Returns the unix second that it is, and how
-- many.
local function expire_retained()
  local now, some, scores = tonumber(redis.call('TIME')[1]), {}, {}
  local over = redis.call('ZRANGE', kept, '-inf', '(' .. now + 1, 'BYSCORE', 'LIMIT', 0, EXPIRED_AT_ONCE,
    'WITHSCORES')
  for i = 1, #over, 2 do
    some[#some + 1], scores[#scores + 1] = over[i], tonumber(over[i + 1])
  end
  restore(some, scores)
  return now, #some
end
