-- forbid: KEYS[1] meta, ARGV salt id or '' for the whole namespace, seconds by which clocks may differ, unix second
-- instead of now and these, or ''.
-- Answers the unix second until which what was created is forbidden.
--
-- Race closed: a commit looks at `erased` in the step in which it shows a segment, so none that it forbids comes
-- after this. What waits for its other ranks goes into the trash here.
--
-- The first write is one that a full Redis accepts (HDEL).
local salt, now = ARGV[1], tonumber(redis.call('TIME')[1])
local asked = tonumber(ARGV[3]) or now + tonumber(ARGV[2])
local last = math.max(asked, tonumber(redis.call('HGET', prefix .. 'erased', salt) or 0) or 0)
redis.call('HDEL', prefix .. 'erased', salt)
redis.call('HSET', prefix .. 'erased', salt, string.format('%.0f', last))

for _, segment in ipairs(redis.call('ZRANGE', parts, 0, -1)) do
  local agreement = redis.call('HGET', prefix .. 'part:' .. hex(segment), 'agreement')
  if agreement and (salt == '' or salt_of(agreement, 1) == salt) and created_of(agreement, 1) <= last then
    give_up(segment)
  end
end
return last
