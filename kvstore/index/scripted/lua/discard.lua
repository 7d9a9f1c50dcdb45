-- discard: KEYS[1] meta, ARGV of each segment its score in the trash and its id.
-- Answers how many went into the trash.
--
-- Race closed: the look at what is visible and the write are one step. What is visible was stored again, and its
-- payload stays. The first write is one that Redis refuses when it is full (ZADD): then nothing has been written.
local discarded = 0
for i = 1, #ARGV, 2 do
  if redis.call('HEXISTS', segs, ARGV[i + 1]) == 0 then
    discarded = discarded + redis.call('ZADD', trash, 'NX', ARGV[i], ARGV[i + 1])
  end
end
return discarded
