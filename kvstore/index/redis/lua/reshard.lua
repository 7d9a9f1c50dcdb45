-- reshard: KEYS[1] meta, ARGV step, the run, shards before, shards after, and what the step is told.
-- Answers 1 if the step was taken or had been, 0 if the namespace or the shard is otherwise than it says.
--
-- Steps of a namespace's own id; a run is named by a token that nobody else has:
--     begin    the shards after are going to be filled by this run, and by no earlier one; they are nobody's until it turns.
--              Told bits of buckets' numbers
--     turn     the namespace lies in the shards after
--     end      the shards before are gone
--     undo     the namespace stays in the shards before; those after are gone
--     disarm   this run can't turn any more
-- and of a shard:
--     fill     this run fills it. Told its role before: nothing if somebody else has begun with it since that was read
--     ttl      told its time to live
--     seal     it stays as it is, but for what is deleted of its trash: matches and listings go on
--     unseal   undoes that, if it was this run's
--     turned   notes in a shard of this run that it has turned
--     aside    it is going to be dropped. Told its role before, as for fill
-- With one shard before, its meta is the id's, and so with one after, which has aside_bits until the turn.
--
-- Race closed: of two runs only the later one turns, and only if all that it has sealed is sealed still. The first write
-- is one that a full Redis accepts (HDEL), but for those that begin something: what makes room must not need any.
local SCHEMA, SHARDED, SEALED = '2', '3', '4'
local step, run, before, after, told = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local known = redis.call('HMGET', meta, 'schema', 'shards', 'to', 'from', 'run', 'bucket_bits', 'aside_bits', 'sealed', 'role')
local schema, to, from, runs, bits, aside, sealed = known[1], known[3], known[4], known[5], known[6], known[7], known[8]
local role = known[9] or ''
if not schema then return 0 end
local shards = schema == SHARDED and known[2] or '1'
local lies_before = not from and shards == before and (not to or to == after)

-- What is sealed has a schema that releases before this one leave alone: of what has lost its bucket_bits they take
-- schema 2 for the remains of schema 1, and empty it.
local function seal(by)
  redis.call('HDEL', meta, 'bucket_bits')
  redis.call('HSET', meta, 'sealed', by, 'aside_bits', bits or aside, 'schema', schema == SHARDED and SHARDED or SEALED)
end

if step == 'fill' then
  if role ~= told then return 0 end
  redis.call('HSET', meta, 'role', 'fills ' .. run)
elseif step == 'ttl' then
  redis.call('HDEL', meta, 'ttl')
  if told ~= '0' then redis.call('HSET', meta, 'ttl', told) end
elseif step == 'seal' then
  if not bits and not sealed then return 0 end
  seal(run)
elseif step == 'unseal' then
  if sealed ~= run or not aside then return 0 end
  redis.call('HDEL', meta, 'sealed', 'aside_bits')
  redis.call('HSET', meta, 'bucket_bits', aside, 'schema', SCHEMA)
elseif step == 'turned' then
  if sealed ~= run and role ~= 'fills ' .. run and role ~= 'turned ' .. run then return 0 end
  redis.call('HDEL', meta, 'role')
  redis.call('HSET', meta, 'role', 'turned ' .. run)
elseif step == 'aside' then
  -- Of an id that lies in one shard and is being brought elsewhere this is what there is: the turn was lost.
  if role ~= told or not bits and not aside or to and schema ~= SHARDED then return 0 end
  seal('gone')
elseif step == 'begin' then
  if not lies_before then return 0 end
  -- Of what has begun it may be the end that is asked for.
  if to then redis.call('HDEL', meta, 'run') end
  redis.call('HSET', meta, 'to', after, 'run', run)
  if after == '1' then
    redis.call('HSET', meta, 'role', 'fills ' .. run)
    if not aside then
      redis.call('HSET', meta, 'aside_bits', told, 'bytes', 0, 'segments', 0, 'blocks', 0, 'cursor', 0)
      -- Of a time in which it lay there, and lost its meta.
      redis.call('UNLINK', segs, lru, pins, trash, hot, parts, ghosts, salts, held, owner, kept, retained)
    end
  end
elseif step == 'turn' then
  if from == before and shards == after and runs == run then return 1 end
  if not lies_before or not to or runs ~= run then return 0 end
  if before == '1' and sealed ~= run or after == '1' and not aside then return 0 end
  redis.call('HDEL', meta, 'to', 'shards', 'erasing')
  redis.call('HSET', meta, 'from', before)
  if after == '1' then
    redis.call('HSET', meta, 'schema', SCHEMA, 'bucket_bits', aside, 'role', 'turned ' .. run)
    redis.call('HDEL', meta, 'aside_bits')
  else
    redis.call('HSET', meta, 'schema', SHARDED, 'shards', after)
  end
elseif step == 'end' then
  if shards ~= after or from and from ~= before then return 0 end
  if from then redis.call('HDEL', meta, 'from', 'run') end
elseif step == 'undo' then
  if not to and not from and shards == before then return 1 end
  if not lies_before or runs ~= run then return 0 end
  redis.call('HDEL', meta, 'to', 'run')
elseif from then
  return 0
elseif runs == run then
  redis.call('HDEL', meta, 'run')
end
return 1
