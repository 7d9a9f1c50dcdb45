-- unpin: KEYS[1] meta, ARGV packed segments.
-- Answers how many were pinned.
--
-- Race closed: as in pin.lua. The first write is one that a full Redis accepts (ZREM).
local segments = items(ARGV[1], 8)
if #segments == 0 then return 0 end

local values, scores = redis.call('HMGET', segs, unpack(segments)), redis.call('ZMSCORE', pins, unpack(segments))
local chosen, moved, nbytes, known = {}, {}, 0, {}
for i, segment in ipairs(segments) do
  if values[i] and scores[i] and not known[segment] then
    known[segment] = true
    nbytes = nbytes + account(values[i])
    chosen[#chosen + 1] = segment
    moved[#moved + 1] = scores[i]
    moved[#moved + 1] = segment
  end
end
if #chosen == 0 then return 0 end
redis.call('ZREM', pins, unpack(chosen))
redis.call('ZADD', lru, unpack(moved))
usage_changed(0, 0, 0, 0, -nbytes)
return #chosen
