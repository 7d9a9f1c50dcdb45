-- time: KEYS[1] any key of the namespace, so that it is the clock of the server that keeps it.
-- Answers unix seconds.
--
-- No race: a script only because TIME has no key, and a Cluster would ask any node.
return redis.call('TIME')[1]
