-- tell: KEYS[1] meta, ARGV how many outcomes and how many faults are kept, the lengths of three lists, and the
-- lists: totals (name, amount), outcomes to keep (whether it is a fault, 8 fields), chains that were absent (how
-- many blocks from the first missing one on, packed digests of these).
--
-- Race closed: an outcome is counted and kept in one step; and a ghost's credit is computed from the bytes
-- evicted at that moment.
--
-- The first write is one that Redis refuses when it is full (HINCRBY): then nothing has been written.
if redis.call('HEXISTS', meta, 'bucket_bits') == 0 then return 0 end

local most, totals, kept, absent = tonumber(ARGV[1]), tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local at = 6
for _ = 1, totals do
  counted(ARGV[at], ARGV[at + 1], prefix .. 'seen')
  at = at + 2
end
for _ = 1, kept do
  if most > 0 then
    local fields = {'at', ARGV[at + 1], 'request', ARGV[at + 2], 'op', ARGV[at + 3], 'asked', ARGV[at + 4],
      'served', ARGV[at + 5], 'reason', ARGV[at + 6], 'position', ARGV[at + 7], 'first', ARGV[at + 8]}
    local id = redis.pcall('XADD', prefix .. 'outcomes', 'MAXLEN', '~', most, '*', unpack(fields))
    -- The id is no text if the ring is no stream; and of a ring that was made anew it may be too small.
    if ARGV[at] == '1' and type(id) == 'string' then
      redis.pcall('XADD', prefix .. 'faults', 'MAXLEN', '~', ARGV[2], id, unpack(fields))
    end
  end
  at = at + 9
end

if absent == 0 or redis.call('EXISTS', ghosts) == 0 then return 1 end

local LEAST, QUARTERS = 2 ^ 26, {1, 2 ^ 0.25, 2 ^ 0.5, 2 ^ 0.75}
local evicted = tonumber(redis.call('HGET', meta, 'evicted') or 0) or 0

-- step_of(nbytes): kvstore.index.eviction.ghost_step, without a logarithm's rounding at the powers of two.
local function step_of(nbytes)
  local ratio, step = nbytes / LEAST, 0
  while ratio > 2 and step < 400 do ratio, step = ratio / 2, step + 4 end
  for _, quarter in ipairs(QUARTERS) do
    if ratio > quarter then step = step + 1 end
  end
  return step
end

local credit = {}
for _ = 1, absent do
  local blocks, upto = tonumber(ARGV[at]), tonumber(ARGV[at])
  local scores = redis.call('ZMSCORE', ghosts, unpack(items(ARGV[at + 1], 16)))
  -- From the last one back, so that the next hit is known.
  for i = math.min(#scores, blocks), 1, -1 do
    local score = tonumber(scores[i] or nil)
    if score and score >= 0 and score < 2 ^ 53 then
      local slots = score % 1 * 4096
      local step = step_of(evicted - (score - score % 1) * 4096)
      credit[step] = (credit[step] or 0) + math.min(slots, upto - i + 1)
      upto = i - 1
    end
  end
  at = at + 2
end
for step, blocks in pairs(credit) do
  counted(string.format('%d', step), blocks, prefix .. 'ghost')
end
return 1
