-- unlist: KEYS[1] meta, ARGV packed segments, how many events are kept, by whom.
-- Answers how many were visible.
--
-- Race closed: the record, the last use and the usage change in one step, and no state is left in which a
-- commit would be refused. The first write is one that a full Redis accepts (HDEL, DEL, ZREM).
local visible, most_events = 0, tonumber(ARGV[2])
for _, segment in ipairs(items(ARGV[1], 8)) do
  local value = redis.call('HGET', segs, segment)
  if value then
    local nbytes, slots, rest = account(value)
    redis.call('HDEL', segs, segment)
    local pinned = redis.call('ZREM', pins, segment)
    redis.call('ZREM', lru, segment)
    redis.call('ZREM', hot, segment)
    unsalted(segment, salt_of(value, rest), nbytes)
    disowned(segment, salt_of(value, rest), nbytes)
    usage_changed(-nbytes, -1, -slots, -cost_of(value, rest), -nbytes * pinned)
    event(most_events, 'evict', segment, first_of(value, rest), '', depth_of(value, rest), slots, nbytes,
      'repair')
    visible = visible + 1
  end
  redis.call('DEL', prefix .. 'part:' .. hex(segment))
  redis.call('ZREM', parts, segment)
  redis.call('ZREM', trash, segment)
  local old = generation_of(segment)
  if old then
    redis.call('HDEL', old, segment)
    counted('bygone', -1)
  end
end
return visible
