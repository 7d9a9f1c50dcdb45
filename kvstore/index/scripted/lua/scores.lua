-- scores: KEYS[1] meta, ARGV packed segments.
-- Answers two lists in step with them: scores in the order of eviction, scores of the pinned ones.
--
-- Race closed: a segment is in one of the two, and between two calls it may be moved from the one that
-- is looked at second to the other. Reads only.
local segments = items(ARGV[1], 8)
local listed, pinned = {}, {}
for first = 1, #segments, PIECE do
  local upto = math.min(first + PIECE - 1, #segments)
  local one = redis.call('ZMSCORE', lru, unpack(segments, first, upto))
  local two = redis.call('ZMSCORE', pins, unpack(segments, first, upto))
  for i = first, upto do listed[i], pinned[i] = one[i - first + 1], two[i - first + 1] end
end
return {listed, pinned}
