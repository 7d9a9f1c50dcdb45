-- pin: KEYS[1] meta, ARGV packed segments, most bytes that may be pinned.
-- Answers {how many were pinned, their bytes, they}; a negative number of segments if it would be too many
-- bytes.
--
-- Races closed: what several callers pin at once is counted together; and an eviction that comes between
-- the look and the move would leave a last use without a segment.
--
-- The first write is one that Redis refuses when it is full (HINCRBY): then nothing has been written.
local most = tonumber(ARGV[2])
local segments = items(ARGV[1], 8)
if #segments == 0 then return {0, 0, ''} end

local values, scores = redis.call('HMGET', segs, unpack(segments)), redis.call('ZMSCORE', lru, unpack(segments))
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
if #chosen == 0 then return {0, 0, ''} end
if tonumber(redis.call('HGET', meta, 'pinned') or 0) + nbytes > most then return {-#chosen, nbytes, ''} end
usage_changed(0, 0, 0, 0, nbytes)
redis.call('ZADD', pins, unpack(moved))
redis.call('ZREM', lru, unpack(chosen))
return {#chosen, nbytes, table.concat(chosen)}
