-- cool: KEYS[1] meta, ARGV what is forgotten if less of it is left.
--
-- Race closed: a use that is counted between reading and writing would be lost. The first write is one that
-- a full Redis accepts (ZREMRANGEBYSCORE). There are never more than some 2,048 members.
redis.call('ZREMRANGEBYSCORE', hot, '-inf', '(' .. 2 * tonumber(ARGV[1]))
redis.call('ZUNIONSTORE', hot, 1, hot, 'WEIGHTS', 0.5)
return 0
