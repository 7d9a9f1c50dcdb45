-- drain: KEYS[1] meta, ARGV number of a generation, packed segments of it, what grace.lua says of the
-- payloads' deletion.
-- Answers how many were moved into the trash.
--
-- Race closed: a segment's removal from its generation and its entry in the trash are one step, so its
-- payload's deletion is on record at any moment, and of two that drain only one counts.
--
-- The first write is one that a full Redis accepts (HDEL).
local old, delete_after = prefix .. 'old:' .. ARGV[1], deletion(ARGV[3])
local segments, chosen, scored = items(ARGV[2], 8), {}, {}
if #segments > 0 then
  for i, value in ipairs(redis.call('HMGET', old, unpack(segments))) do
    if value then
      local _, _, rest = account(value)
      chosen[#chosen + 1] = segments[i]
      scored[#scored + 1] = string.format('%.17g', delete_after + ranks_of(value, rest) / 256)
      scored[#scored + 1] = segments[i]
    end
  end
end
local moved = 0
if #chosen > 0 then
  moved = redis.call('HDEL', old, unpack(chosen))
  redis.call('ZADD', trash, unpack(scored))
  counted('bygone', -moved)
end
local first, last = generations()
if tonumber(ARGV[1]) == first and first <= last and redis.call('EXISTS', old) == 0 then
  redis.call('HDEL', meta, 'drained')
  redis.call('HSET', meta, 'drained', first + 1)
end
return moved
