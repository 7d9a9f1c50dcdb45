-- erase: KEYS[1] meta, ARGV about how many entries to drop, about how many entries and buckets to look at, 1 to drop
-- what a reshard has put aside instead, whatever is stored in it, or ''.
-- Answers {0 all is gone, 1 call again, 2 something is stored; entries dropped, looked at}.
--
-- Race closed: that nothing is stored and what is removed are one step. Where it stopped counts only while
-- `changes` is what it was: buckets that were passed may have been filled since.
--
-- What `erased` forbids outlives the namespace: archives and folders of other machines may still have it.
--
-- The first write is one that a full Redis accepts (UNLINK).
local known = redis.call('HMGET', meta, 'bucket_bits', 'changes', 'erased', 'shards', 'erasing', 'aside_bits', 'sealed', 'to')
local bits, aside = known[1], ARGV[3] ~= ''
if aside then
  -- Else somebody has begun to use it again, or goes by a turn that was lost.
  bits = not bits and known[7] and (known[4] or not known[8]) and known[6]
  if not bits then return {0, 0, 0} end
elseif not bits then
  -- Not before the reshard has come to its end.
  if known[6] then return {2, 0, 0} end
  -- Its shards, which are asked first, held nothing. Who has registered it since then may have filled them.
  if known[4] and not known[5] then return {2, 0, 0} end
  if known[4] then redis.call('UNLINK', meta, prefix .. 'writers') end
  return {0, 0, 0}
end

local now = redis.call('TIME')[1]
local first, last = generations()
local stored = redis.call('EXISTS', segs, trash) + redis.call('ZCOUNT', parts, '(' .. now, '+inf')
for n = first, last do stored = stored + redis.call('EXISTS', prefix .. 'old:' .. n) end
if stored > 0 and not aside then return {2, 0, 0} end

local most, patience, buckets = tonumber(ARGV[1]), tonumber(ARGV[2]), 2 ^ math.min(tonumber(bits) or MOST_BITS, MOST_BITS)
local changes, dropped, looked = known[2] or '0', 0, 0
local at, of_changes = string.match(known[3] or '', '^(%d+):(%d+)$')
at = of_changes == changes and tonumber(at) or 0
while at < buckets and dropped < most and looked < patience do
  local bucket = prefix .. 'b:' .. string.format('%x', at)
  local length = redis.pcall('HLEN', bucket)
  -- A key of another type counts as one entry.
  if type(length) == 'table' then length = 1 end
  if length > 0 then redis.call('UNLINK', bucket) end
  dropped, looked, at = dropped + length, looked + 1 + length / 16, at + 1
end
if at < buckets then
  redis.call('HDEL', meta, 'erased')
  redis.call('HSET', meta, 'erased', string.format('%d:%s', at, changes))
  return {1, dropped, math.ceil(looked)}
end
redis.call('UNLINK', lru, pins, hot, parts, ghosts, salts, held, prefix .. 'ghost', prefix .. 'seen', prefix .. 'events',
  prefix .. 'outcomes', prefix .. 'faults', owner, kept, retained, sessions[1], sessions[2])
if aside then
  redis.call('UNLINK', segs, trash)
  for n = first, last do redis.call('UNLINK', prefix .. 'old:' .. n) end
end
if aside and known[4] then
  -- Under the namespace's own id, where meta tells how the rest of it lies.
  redis.call('HDEL', meta, 'aside_bits', 'bytes', 'segments', 'blocks', 'pinned', 'cost', 'changes', 'evicted', 'epoch',
    'drained', 'bygone', 'window', 'ttl', 'cursor', 'erased', 'sealed', 'role')
else
  redis.call('UNLINK', meta, prefix .. 'writers')
  -- Under the namespace's own id it says the same.
  if aside then redis.call('UNLINK', prefix .. 'erased') end
end
return {0, dropped, math.ceil(looked)}
