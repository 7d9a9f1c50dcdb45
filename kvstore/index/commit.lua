-- commit: KEYS[1] meta, ARGV segment, packed digests, agreement (what all ranks must share: a
-- checksum of the digests and the head of the packed record), this rank's packed part, its bytes,
-- rank, ranks, time to live in s of an incomplete commit, the first last use.
-- Answers 0 waiting for other ranks, 1 visible, 2 refused; nil if the namespace is unknown.
--
-- Races closed: the last of several ranks makes the record, all entries and the usage visible in one
-- step, so no reader meets half a segment and no two ranks both think that they were last; and a
-- segment that was evicted while its last rank was writing stays evicted, because the look into the
-- trash and the writes are one step.
--
-- The first write of every path is one that Redis refuses when it is full (HSET): then nothing has
-- been written. After a first write a script always runs to its end.
local bits = redis.call('HGET', meta, 'bits')
if not bits then return false end

local segment, digests, agreement, part = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local nbytes, rank, ranks, ttl, first_use = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8], ARGV[9]
local slots = #digests / 16
local incomplete = prefix .. 'part:' .. hex(segment)
local WAITING, VISIBLE, REFUSED = 0, 1, 2

local function release()
  local claim = prefix .. 'claim:' .. hex(string.sub(digests, 1, 16))
  if redis.call('GET', claim) == segment then redis.call('DEL', claim) end
end

local function enter()
  local locate = locator(tonumber(bits))
  for i = 0, slots - 1 do
    local bucket, field = locate(digests, i)
    redis.call('HSET', bucket, field, segment .. string.char(math.floor(i / 256), i % 256))
  end
end

local value = redis.call('HGET', segs, segment)
if value then
  -- Committed before: an answer got lost, or the index is being rebuilt. The entries are written
  -- once more, which repairs those that were lost, and nothing is counted twice.
  local _, _, rest = account(value)
  local parts = rest + #agreement
  local size = (#value - parts + 1) / ranks
  local same = string.sub(value, rest, parts - 1) == agreement
    and string.sub(value, parts + rank * size, parts + (rank + 1) * size - 1) == part
  if same then enter() end
  release()
  return same and VISIBLE or REFUSED
end
local agreed = redis.call('HGET', incomplete, 'agreement')
if redis.call('ZSCORE', trash, segment) or agreed and agreed ~= agreement then
  release()
  return REFUSED
end
if ranks > 1 then
  redis.call('HSET', incomplete, 'agreement', agreement, rank, nbytes .. ':' .. part)
  redis.call('EXPIRE', incomplete, ttl)
  if redis.call('HLEN', incomplete) <= ranks then return WAITING end
  local total, all = 0, {}
  for i = 0, ranks - 1 do
    local one = redis.call('HGET', incomplete, i)
    local colon = string.find(one, ':', 1, true)
    total = total + tonumber(string.sub(one, 1, colon - 1))
    all[i + 1] = string.sub(one, colon + 1)
  end
  nbytes, part = string.format('%.0f', total), table.concat(all)
end

enter()
redis.call('HSET', segs, segment, nbytes .. ':' .. slots .. ':' .. agreement .. part)
redis.call('ZADD', lru, first_use, segment)
redis.call('HINCRBY', meta, 'bytes', nbytes)
redis.call('HINCRBY', meta, 'segments', 1)
redis.call('HINCRBY', meta, 'blocks', slots)
if ranks > 1 then redis.call('DEL', incomplete) end
release()
return VISIBLE
