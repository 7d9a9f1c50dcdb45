-- taken: KEYS[1] meta, ARGV packed segments.
-- Answers of each three in turn: its score in the order of eviction, or '' if it has none; 1 if it is pinned, or ''; its
-- heat, or ''. The score of one that is retained is that of its last use: its retention is not told elsewhere.
--
-- Race closed: a segment is in one of two orders, and between two calls it may be moved. Reads only.
local found = {}
for _, segment in ipairs(items(ARGV[1], 8)) do
  local score, pinned = redis.call('ZSCORE', lru, segment), ''
  if not score then score, pinned = redis.call('ZSCORE', pins, segment), '1' end
  local retained_until = score and redis.call('ZSCORE', kept, segment)
  if retained_until then
    local used, less = use_of(tonumber(score))
    local ends, minute = ends_of(tonumber(retained_until))
    if used <= math.floor(ends / 60) then score = string.format('%.17g', minute - less) end
  end
  found[#found + 1] = score or ''
  found[#found + 1] = pinned
  found[#found + 1] = redis.call('ZSCORE', hot, segment) or ''
end
return found
