-- lease: KEYS[1] the lease, ARGV holder, time to live in ms.
-- Answers 1 if the holder has it now.
--
-- Race closed: of two that find it free one gets it, and a renewal never takes it from whom it has passed
-- to. A full Redis refuses a SET that is not preceded by a removal, and who holds the lease makes room.
local holder = redis.call('GET', KEYS[1])
if holder and holder ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
