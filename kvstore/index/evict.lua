-- evict: KEYS[1] meta, ARGV packed segments, unix seconds of the payloads' deletion.
-- Answers how many were visible.
--
-- Race closed: see drop.lua. A segment whose commit is incomplete goes into the trash too, where the
-- commit of its last rank finds it and is refused.
local delete_after = tonumber(ARGV[2])
for _, segment in ipairs(items(ARGV[1], 8)) do
  if not drop(segment, delete_after) then
    local incomplete = prefix .. 'part:' .. hex(segment)
    local agreement = redis.call('HGET', incomplete, 'agreement')
    if agreement then
      redis.call('DEL', incomplete)
      redis.call('ZADD', trash, trash_score(delete_after, string.byte(agreement, 13)), segment)
    end
  end
end
account_drops()
return dropped
