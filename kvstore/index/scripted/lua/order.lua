-- order: KEYS[1] meta, ARGV first rank, last rank.
-- Answers segments and scores in turn, and a list of values or nil in step with the segments.
--
-- Race closed: an eviction between the two looks would leave a segment without a size. Reads only.
local flat, segments = redis.call('ZRANGE', lru, ARGV[1], ARGV[2], 'WITHSCORES'), {}
for i = 1, #flat, 2 do segments[#segments + 1] = flat[i] end
return {flat, #segments > 0 and redis.call('HMGET', segs, unpack(segments)) or {}}
