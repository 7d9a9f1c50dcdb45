-- cool: KEYS[1] meta.
--
-- Race closed: a use that is counted between reading and writing would be lost. The first write is one that
-- a full Redis accepts (ZREMRANGEBYSCORE). At most some 2,048 members.
redis.call('ZREMRANGEBYSCORE', hot, '-inf', '(0.2')
redis.call('ZUNIONSTORE', hot, 1, hot, 'WEIGHTS', 0.5)
return 0
