-- discard: KEYS[1] meta, ARGV scores in the trash and segments in turn, the run, by whom.
-- Answers how many are in the trash now that were not; nil if another run fills the shard, or none.
--
-- Takes over what was evicted in another shard, to be deleted when it was to be there.
--
-- Race closed: see filling.lua.
if #ARGV < 4 then return 0 end
return redis.call('ZADD', trash, unpack(ARGV, 1, #ARGV - 2))
