-- erasing: KEYS[1] meta. Marks a namespace of several shards as one of which all shards are going to be erased.
--
-- Race closed: who registers it takes the mark away, and without it erase.lua lets `meta` stand.
--
-- The first write is one that a full Redis accepts (HDEL).
if redis.call('HGET', meta, 'shards') then
  redis.call('HDEL', meta, 'erasing')
  redis.call('HSET', meta, 'erasing', 1)
end
return 0
