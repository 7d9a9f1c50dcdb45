-- pin: KEYS[1] meta, ARGV packed segments, most bytes that may be pinned.
-- Answers {how many were pinned, their bytes, they, packed}; a negative number if that is too many bytes.
--
-- Race closed: see pinnable.lua. The first write is one that Redis refuses when it is full (HINCRBY): then
-- nothing has been written.
local chosen, moved, nbytes = placed(lru)
if #chosen == 0 then return {0, 0, ''} end
local pinned = tonumber(redis.call('HGET', meta, 'pinned') or 0)
if pinned + nbytes > tonumber(ARGV[2]) then return {-#chosen, nbytes, ''} end
usage_changed(0, 0, 0, 0, nbytes)
redis.call('ZADD', pins, unpack(moved))
redis.call('ZREM', lru, unpack(chosen))
return {#chosen, nbytes, table.concat(chosen)}
