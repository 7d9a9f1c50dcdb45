-- release: KEYS[1] the lease, ARGV holder.
--
-- Race closed: a lease that ended and was taken by another is not taken from that one.
if redis.pcall('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
return 0
