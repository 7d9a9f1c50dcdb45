-- withdraw: KEYS[1] meta, ARGV packed segments, the run, by whom.
-- Answers how many were visible; nil if another run fills the shard, or none.
--
-- Makes segments unknown that are visible no more in the shards that this one is filled from.
--
-- Race closed: see filling.lua. The first write is one that a full Redis accepts (HDEL).
local visible = 0
for _, segment in ipairs(items(ARGV[1], 8)) do
  local value = redis.call('HGET', segs, segment)
  if value then
    local nbytes, slots, rest = account(value)
    redis.call('HDEL', segs, segment)
    local pinned = redis.call('ZREM', pins, segment)
    redis.call('ZREM', lru, segment)
    redis.call('ZREM', hot, segment)
    unsalted(segment, salt_of(value, rest), nbytes)
    usage_changed(-nbytes, -1, -slots, -cost_of(value, rest), -nbytes * pinned)
    visible = visible + 1
  end
end
return visible
