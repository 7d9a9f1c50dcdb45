-- touch: KEYS[1] meta, ARGV packed segments, unix minute.
--
-- Race closed: an eviction between looking and writing would be undone by a blind ZADD, which would
-- leave a last use without a segment; and a late touch must not set a newer one back. A last use is
-- its minute minus a fraction that holds the segment's depth, and the fraction is kept.
local minute = tonumber(ARGV[2])
local segments = items(ARGV[1], 8)
for first = 1, #segments, PIECE do
  local upto = math.min(first + PIECE - 1, #segments)
  local changes = {}
  for i, text in ipairs(redis.call('ZMSCORE', lru, unpack(segments, first, upto))) do
    local score = tonumber(text or nil)
    local used = score and math.ceil(score)
    if used and used < minute then
      changes[#changes + 1] = string.format('%.17g', minute - (used - score))
      changes[#changes + 1] = segments[first + i - 1]
    end
  end
  if #changes > 0 then redis.call('ZADD', lru, unpack(changes)) end
end
return 0
