-- unpin: KEYS[1] meta, ARGV packed segments.
-- Answers how many were pinned.
--
-- Race closed: see pinnable.lua. The first write is one that a full Redis accepts (ZREM).
local chosen, moved, nbytes = placed(pins)
if #chosen == 0 then return 0 end
redis.call('ZREM', pins, unpack(chosen))
redis.call('ZADD', lru, unpack(moved))
usage_changed(0, 0, 0, 0, -nbytes)
return #chosen
