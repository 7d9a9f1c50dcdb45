-- erase: KEYS[1] meta, ARGV about how many entries to drop, about how many entries and buckets to look at, 'shard' to
-- drop a shard whatever is stored in it, 'left' to drop what a reshard has left under the namespace's id, or ''.
-- Answers {0 all is gone, 1 call again, 2 something is stored; entries dropped, looked at}.
--
-- Race closed: that nothing is stored and what is removed are one step. Where it stopped counts only while
-- `changes` is what it was: buckets that were passed may have been filled since. The segments of what is nobody's go
-- first: evictions reach that too, and would raise `changes` between any two calls.
--
-- What `erased` forbids outlives the namespace: archives and folders of other machines may still have it.
--
-- The first write is one that a full Redis accepts (UNLINK).
local known = redis.call('HMGET', meta, 'bucket_bits', 'changes', 'erased', 'shards', 'erasing')
local bits, aside = known[1], ARGV[3] ~= ''
if aside then
  -- What lies under an id is nobody's only if the namespace lies in shards: a failover may have lost that.
  if not bits or ARGV[3] == 'left' and not known[4] then
    -- A shard that was never registered may have been told what is forbidden, and who has failed.
    if ARGV[3] == 'shard' then redis.call('UNLINK', prefix .. 'erased', prefix .. 'writers') end
    return {0, 0, 0}
  end
elseif known[4] then
  -- Its shards, which are asked first, held nothing. Who has registered it since then may have filled them. And what a
  -- reshard has left under the id itself is dropped first.
  if bits or not known[5] then return {2, 0, 0} end
  redis.call('UNLINK', meta, prefix .. 'writers')
  return {0, 0, 0}
elseif not bits then
  return {0, 0, 0}
end

local now = redis.call('TIME')[1]
local first, last = generations()
local stored = redis.call('EXISTS', segs, trash) + redis.call('ZCOUNT', parts, '(' .. now, '+inf')
for n = first, last do stored = stored + redis.call('EXISTS', prefix .. 'old:' .. n) end
if stored > 0 and not aside then return {2, 0, 0} end

if aside then redis.call('UNLINK', segs, lru, pins, hot, salts, held, owner, kept, retained) end
local most, patience, buckets = tonumber(ARGV[1]), tonumber(ARGV[2]), 2 ^ math.min(tonumber(bits) or MOST_BITS, MOST_BITS)
local changes, dropped, looked = known[2] or '0', 0, 0
local reached, of_changes = string.match(known[3] or '', '^(%d+:?%d*):(%d+)$')
local at, cursor = place_of(of_changes == changes and reached or '0')
while at < buckets and dropped < most and looked < patience do
  local bucket, flat, other
  local first = cursor
  bucket, flat, at, cursor, other = page(at, cursor)
  -- A key of another type counts as one entry.
  local length = other and 1 or #flat / 2
  if first == '0' and cursor == '0' then
    if length > 0 then redis.call('UNLINK', bucket) end
    looked = looked + 1 + length / 16
  else
    local fields = {}
    for i = 1, #flat, 2 do fields[#fields + 1] = flat[i] end
    if #fields > 0 then redis.call('HDEL', bucket, unpack(fields)) end
    looked = looked + 1 + length
  end
  dropped = dropped + length
end
if at < buckets then
  redis.call('HDEL', meta, 'erased')
  redis.call('HSET', meta, 'erased', place(at, cursor) .. ':' .. changes)
  return {1, dropped, math.ceil(looked)}
end
redis.call('UNLINK', lru, pins, hot, parts, ghosts, salts, held, prefix .. 'ghost', prefix .. 'seen', prefix .. 'events',
  prefix .. 'outcomes', prefix .. 'faults', owner, kept, retained, sessions[1], sessions[2])
if aside then
  redis.call('UNLINK', trash)
  for n = first, last do redis.call('UNLINK', prefix .. 'old:' .. n) end
end
if ARGV[3] == 'left' then
  -- The rest of meta tells how the namespace lies.
  redis.call('HDEL', meta, 'bucket_bits', 'bytes', 'segments', 'blocks', 'pinned', 'cost', 'changes', 'evicted', 'epoch',
    'drained', 'bygone', 'window', 'ttl', 'cursor', 'erased')
else
  redis.call('UNLINK', meta, prefix .. 'writers')
  -- Under the namespace's own id it says the same.
  if aside then redis.call('UNLINK', prefix .. 'erased') end
end
return {0, dropped, math.ceil(looked)}
