-- taken: KEYS[1] meta, ARGV packed segments.
-- Answers of each five in turn: its value, or '' if it isn't visible; its score in the order of eviction; 1 if it is
-- pinned, or ''; its heat, or ''; and until when it is retained, as `kept` has it, or ''.
--
-- Race closed: a segment is in one of two orders, and between two calls it may be moved. Reads only.
local found = {}
for _, segment in ipairs(items(ARGV[1], 8)) do
  local score, pinned = redis.call('ZSCORE', lru, segment), ''
  if not score then score, pinned = redis.call('ZSCORE', pins, segment), '1' end
  -- Without a place in the order it is damaged.
  found[#found + 1] = score and redis.call('HGET', segs, segment) or ''
  found[#found + 1] = score or ''
  found[#found + 1] = pinned
  found[#found + 1] = redis.call('ZSCORE', hot, segment) or ''
  found[#found + 1] = redis.call('ZSCORE', kept, segment) or ''
end
return found
