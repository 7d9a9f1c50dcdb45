-- lease: KEYS[1] the lease, ARGV holder, time to live in ms.
-- Answers 1 if the holder has it now.
--
-- Race closed: only one of two that find it free gets it, and a renewal never takes it from a later holder.
-- A full Redis refuses a SET that no removal precedes, and it is the holder of the lease who makes room.
if holder_of(KEYS[1], ARGV[1], ARGV[2]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
