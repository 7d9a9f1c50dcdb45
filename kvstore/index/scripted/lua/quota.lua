-- quota: KEYS[1] all quotas, ARGV scope, bytes or nothing.
--
-- No race. A script because a full Redis refuses an HSET that is not preceded by a removal, and a smaller
-- quota is how room is made.
redis.call('HDEL', KEYS[1], ARGV[1])
if ARGV[2] then redis.call('HSET', KEYS[1], ARGV[1], ARGV[2]) end
return 0
