-- discard: KEYS[1] meta, ARGV packed segments, then what drop.lua says, their scores in the trash, by commas, by whom.
-- Answers how many were visible.
--
-- Takes over what was evicted in another shard: what is visible here is evicted, and has its grace time from now on;
-- what is not is deleted when it was to be there.
--
-- Race closed: see drop.lua. The first write is one that a full Redis accepts (HDEL), or one that it refuses (ZADD):
-- what is left is taken over by the next attempt.
local scores = {}
for score in string.gmatch(ARGV[6], '[^,]+') do scores[#scores + 1] = score end
for i, segment in ipairs(items(ARGV[1], 8)) do
  if not drop(segment) and not generation_of(segment) then redis.call('ZADD', trash, 'NX', scores[i], segment) end
end
account_drops()
return dropped
