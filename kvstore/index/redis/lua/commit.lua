-- commit: KEYS[1] meta, ARGV segment, packed digests, agreement (what all ranks must share: the first
-- digest, a checksum of the digests and the head of the packed record), this rank's packed part, its
-- bytes, rank, ranks, time to live in s of an incomplete commit, the minute of the first use, its worth to
-- a namespace of items, how many events are kept, the session whose request saves it or '', bytes that may be
-- retained in all, under one salt, and of a session's own, by whom.
-- Answers 0 waiting for other ranks, 1 visible, 2 refused; nil if the namespace is unknown.
--
-- Races closed: the last of several ranks makes the record, all entries and the usage visible in one
-- step, so no reader meets half a segment and no two ranks both think that they were last; and a
-- segment that was evicted, invalidated or erased while its last rank was writing stays so, because the look
-- at the trash, the epoch and what is forbidden and the writes are one step.
--
-- The first write of every path is one that Redis refuses when it is full (HSET): then nothing has
-- been written. After a first write a script always runs to its end.
local known = redis.call('HMGET', meta, 'bucket_bits', 'kind', 'epoch')
local bits, epoch = known[1], known[3] or '0'
if not bits then return false end

local segment, digests, agreement, part = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local nbytes, rank, ranks, ttl = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8]
local minute, most_events = tonumber(ARGV[9]), tonumber(ARGV[11])
local worth = known[2] == 'ec' and tonumber(ARGV[10]) or 0
local slots = #digests / 16
local first, depth = first_of(agreement, 1), depth_of(agreement, 1)
local incomplete = prefix .. 'part:' .. hex(segment)
local WAITING, VISIBLE, REFUSED = 0, 1, 2

local function release()
  local claim = prefix .. 'claim:' .. hex(first)
  if redis.pcall('GET', claim) == segment then redis.call('DEL', claim) end
end

local function enter()
  local locate = locator(tonumber(bits))
  for i = 0, slots - 1 do
    local bucket, field = locate(digests, i)
    local entry = segment .. string.char(math.floor(i / 256), i % 256)
    local reply = redis.pcall('HSET', bucket, field, entry)
    local failed = type(reply) == 'table' and reply.err
    if failed then
      if not string.find(failed, 'WRONGTYPE') then error(failed, 0) end
      redis.call('DEL', bucket)
      redis.call('HSET', bucket, field, entry)
    end
  end
end

local salt = salt_of(agreement, 1)
if created_of(agreement, 1) <= forbidden_until(salt) then
  give_up(segment)
  release()
  return REFUSED
end
local value = redis.call('HGET', segs, segment)
if value then
  -- Committed before: an answer got lost, or the index is being rebuilt. The entries are written
  -- once more, which repairs those that were lost, and nothing is counted twice.
  local _, _, rest = account(value)
  local begin = rest + #agreement
  local size = (#value - begin + 1) / ranks
  local same = string.sub(value, rest, begin - 1) == agreement
    and string.sub(value, begin + rank * size, begin + (rank + 1) * size - 1) == part
  if same then enter() end
  release()
  return same and VISIBLE or REFUSED
end
local agreed = redis.call('HMGET', incomplete, 'agreement', 'epoch')
if redis.call('ZSCORE', trash, segment) or generation_of(segment)
  or agreed[1] and (agreed[1] ~= agreement or agreed[2] ~= epoch) then
  -- Parts of another epoch stay until they expire, so that the ranks that are still to come don't begin
  -- anew what this one no longer takes part in.
  release()
  return REFUSED
end
if ranks > 1 then
  redis.call('HSET', incomplete, 'agreement', agreement, 'epoch', epoch, rank, nbytes .. ':' .. part)
  redis.call('EXPIRE', incomplete, ttl)
  if redis.call('HLEN', incomplete) < ranks + 2 then
    local now = redis.call('TIME')[1]
    redis.call('ZREMRANGEBYSCORE', parts, '-inf', now)
    redis.call('ZADD', parts, now + ttl, segment)
    return WAITING
  end
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
redis.call('ZADD', lru, score_of(minute, depth, worth), segment)
if salt ~= '' then
  redis.call('ZADD', salts, 0, salt .. segment)
  redis.call('ZINCRBY', held, nbytes, salt)
end
if ARGV[12] ~= '' then adopt(ARGV[12], segment, minute, tonumber(ARGV[13]), tonumber(ARGV[14]), tonumber(ARGV[15])) end
usage_changed(tonumber(nbytes), 1, slots, cost_of(agreement, 1), 0)
event(most_events, 'commit', segment, first, string.sub(digests, -16), depth, slots, tonumber(nbytes), '')
redis.call('ZREM', ghosts, first)
if ranks > 1 then
  redis.call('DEL', incomplete)
  redis.call('ZREM', parts, segment)
end
release()
return VISIBLE
