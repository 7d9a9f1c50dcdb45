-- evict: KEYS[1] meta, ARGV packed segments, then the arguments of drop.lua's `dropping`, by whom.
-- Answers how many were visible.
--
-- Race closed: see drop.lua. A segment whose commit is incomplete goes into the trash too, where the
-- commit of its last rank finds it and is refused.
dropping(ARGV[2], ARGV[3], ARGV[4], ARGV[5])
for _, segment in ipairs(items(ARGV[1], 8)) do
  if not drop(segment) then
    local incomplete = prefix .. 'part:' .. hex(segment)
    local agreement = redis.call('HGET', incomplete, 'agreement')
    if agreement then
      redis.call('DEL', incomplete)
      redis.call('ZREM', parts, segment)
      redis.call('ZADD', trash, trash_score(ranks_of(agreement, 1)), segment)
    end
  end
end
account_drops()
return dropped
