-- ping: KEYS[1] a key of its own. Needs what the other scripts need: scripting, reading and writing.
--
-- No race: a script only so that a missing right to run scripts shows.
redis.call('SET', KEYS[1], '1', 'PX', '1000')
return redis.call('GET', KEYS[1])
