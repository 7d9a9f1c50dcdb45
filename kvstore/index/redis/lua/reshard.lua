-- reshard: KEYS[1] meta, ARGV step, shards before, shards after, bits of buckets' numbers or ttl.
-- Answers 1 if the step was taken or had been, 0 if the namespace does not lie so.
--
-- Steps, in their order; the first four are of a namespace's own id, seal and ttl of any name:
--     begin    the shards after are going to be filled; they are nobody's until then
--     turn     the namespace lies in the shards after
--     end      the shards before are gone
--     undo     the namespace stays in the shards before; those after are gone
--     seal     a shard of those before takes nothing new, so that what it holds can be brought over to the last bit
--     ttl      the time to live of a shard after
-- With one shard before, `turn` seals it: meta is one key. With one after, it lies aside until then.
--
-- Race closed: two that reshard to different numbers at a time; and a commit is either before the seal, and brought
-- over, or told that the namespace is unknown there, and repeated where it lies now.
--
-- The first write is one that Redis refuses when it is full (HSET): then nothing has been written.
local SCHEMA, SHARDED = '2', '3'
local step, before, after = ARGV[1], ARGV[2], ARGV[3]
local known = redis.call('HMGET', meta, 'schema', 'shards', 'to', 'from', 'bucket_bits', 'aside_bits')
local schema, to, from, bits = known[1], known[3], known[4], known[5]
if not schema then return 0 end
local shards = schema == SHARDED and known[2] or '1'

if step == 'seal' then
  if bits then
    redis.call('HSET', meta, 'aside_bits', bits)
    redis.call('HDEL', meta, 'bucket_bits')
  end
elseif step == 'ttl' then
  redis.call('HDEL', meta, 'ttl')
  if ARGV[4] ~= '0' then redis.call('HSET', meta, 'ttl', ARGV[4]) end
elseif step == 'end' then
  if shards ~= after or from and from ~= before then return 0 end
  redis.call('HDEL', meta, 'from')
elseif from or shards ~= before or to and to ~= after then
  return 0
elseif step == 'begin' then
  redis.call('HSET', meta, 'to', after)
  if after == '1' and not known[6] then
    redis.call('HSET', meta, 'aside_bits', ARGV[4], 'bytes', 0, 'segments', 0, 'blocks', 0, 'cursor', 0)
  end
elseif not to then
  return step == 'undo' and 1 or 0
elseif step == 'undo' then
  redis.call('HDEL', meta, 'to')
else
  redis.call('HSET', meta, 'from', before)
  redis.call('HDEL', meta, 'to', 'shards', 'erasing')
  if before == '1' then
    redis.call('HSET', meta, 'aside_bits', bits)
    redis.call('HDEL', meta, 'bucket_bits')
  end
  if after == '1' then
    redis.call('HSET', meta, 'schema', SCHEMA, 'bucket_bits', known[6])
    redis.call('HDEL', meta, 'aside_bits')
  else
    redis.call('HSET', meta, 'schema', SHARDED, 'shards', after)
  end
end
return 1
