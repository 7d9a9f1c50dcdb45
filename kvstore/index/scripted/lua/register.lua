-- register: KEYS[1] meta, ARGV namespace JSON, kind, tenant, bucket bits, unix seconds, layout.
-- Answers 1 if the namespace or the shard begins now, 0 if it was known, 2 if a newer schema has it: then nothing
-- is changed. The layout if the namespace lies in shards: then this is all that there is of it under its own id, but for
-- what a reshard has left there.
--
-- Race closed: replicas that start together may expect different numbers of blocks, or ask for different numbers
-- of shards. The first one fixes both for as long as the namespace exists; two values would split it in parts
-- that don't see each other.
local SCHEMA = '2'
local SHARDED = '3'
local known = redis.call('HMGET', meta, 'schema', 'bucket_bits', 'bits', 'shards')
local schema, bits, layout, asked = known[1], tonumber(known[2] or nil), known[4] or '', ARGV[6] or '1'
if schema == SHARDED then
  -- A layout that can't be is damage: what asks for another is taken for the first registration.
  local shards = tonumber(string.match(layout, '^(%d+)$') or string.match(layout, '^(%d+)%.%d+$') or 0)
  if layout == '1' or shards < 1 or shards > 256 then layout = asked end
  if layout ~= '1' then
    redis.call('HDEL', meta, 'erasing')
    redis.call('HSET', meta, 'json', ARGV[1], 'kind', ARGV[2], 'tenant', ARGV[3], 'seen', ARGV[5], 'shards', layout)
    return layout
  end
end
if schema == SCHEMA and bits and bits >= 0 and bits <= MOST_BITS and bits % 1 == 0 then
  -- The id is the digest of these: whatever else stands there is damaged.
  redis.call('HSET', meta, 'json', ARGV[1], 'kind', ARGV[2], 'tenant', ARGV[3], 'seen', ARGV[5])
  return 0
end
-- In a fleet that is being upgraded the older engines would empty what the newer ones have just filled.
if (tonumber(schema or 0) or 0) > tonumber(SCHEMA) then return 2 end
if not schema and asked ~= '1' then
  redis.call('HSET', meta, 'schema', SHARDED, 'json', ARGV[1], 'kind', ARGV[2], 'tenant', ARGV[3],
    'created', ARGV[5], 'seen', ARGV[5], 'shards', asked)
  return asked
end
-- What schema 1 left begins anew: its records lack what this one's have. Its entries dangle, in buckets
-- of as many bits, and are swept; `rebuild` brings its payloads back.
bits = known[3] or ARGV[4]
redis.call('HSET', meta, 'schema', SCHEMA, 'json', ARGV[1], 'kind', ARGV[2], 'tenant', ARGV[3],
  'bucket_bits', bits, 'created', ARGV[5], 'seen', ARGV[5], 'bytes', 0, 'segments', 0, 'blocks', 0,
  'cursor', 0)
redis.call('HDEL', meta, 'bits')
-- Without a meta key there are no segments: should Redis have lost it alone (it must not, but a
-- maxmemory-policy other than noeviction does such things), then the counters begin at zero and so
-- must the segments. Their entries dangle and are swept; their payloads are found by fsck.
redis.call('UNLINK', segs, lru, pins, hot, parts, ghosts, salts, held, prefix .. 'ghost', prefix .. 'seen', owner, kept,
  retained, unpack(sessions))
return 1
