-- commit: KEYS[1] meta, ARGV segment, packed digests, agreement (what all ranks must share: the first
-- digest, a checksum of the digests and the head of the packed record), this rank's packed part, its
-- bytes, rank, ranks, time to live in s of an incomplete commit, its worth to a namespace of items, how many
-- events are kept, the session whose request saves it or '', bytes that may be retained in all, under one salt,
-- and of a session's own, what it replaces (each: segment, number of its blocks in two bytes, their digests),
-- what grace.lua says of those payloads' deletion, by whom.
-- Answers 0 waiting for other ranks, 1 visible, 2 refused; nil if the namespace is unknown.
--
-- Races closed: the last of several ranks makes the record, all entries and the usage visible in one
-- step, so no reader meets half a segment and no two ranks both think that they were last; and a
-- segment that was evicted, invalidated or erased while its last rank was writing stays so, because the look
-- at the trash, the epoch and what is forbidden and the writes are one step. What it replaces goes in the same step, and
-- not before each of its blocks is served by another segment, so that no reader meets a hole.
--
-- When it was created is the latest of what its ranks say, and not later than now by this clock. All else of the
-- agreement is the same for all of them. What replaces others may be as old as they are, and has just been used.
--
-- The first write of every path is one that Redis refuses when it is full (HSET): then nothing has
-- been written. After a first write a script always runs to its end.
local known = redis.call('HMGET', meta, 'bucket_bits', 'kind', 'epoch')
local bits, epoch = known[1], known[3] or '0'
if not bits then return false end

local segment, digests, agreement, part = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local nbytes, rank, ranks, ttl = ARGV[5], tonumber(ARGV[6]), tonumber(ARGV[7]), ARGV[8]
local worth, most_events = known[2] == 'ec' and tonumber(ARGV[9]) or 0, tonumber(ARGV[10])
local now, said = tonumber(redis.call('TIME')[1]), created_of(agreement, 1)
local created = math.min(said, now)
local slots = #digests / 16
local first, depth = first_of(agreement, 1), depth_of(agreement, 1)
local incomplete = prefix .. 'part:' .. hex(segment)
local WAITING, VISIBLE, REFUSED = 0, 1, 2

-- The claim is on the first block, or, of what replaces others, on the first that was not stored.
local function release()
  for i = 0, ARGV[15] ~= '' and slots - 1 or 0 do
    local claim = prefix .. 'claim:' .. hex(first_of(digests, 16 * i + 1))
    if redis.pcall('GET', claim) == segment then redis.call('DEL', claim) end
  end
end

-- Segments that this one was to replace and that stay: their blocks stay theirs, too. A commit that is repeated can't
-- tell those any more, so to it each other visible segment is one.
local stay, repeated = {}, false

local function stays(bucket, field)
  local present = (repeated or next(stay)) and redis.pcall('HGET', bucket, field)
  local of = type(present) == 'string' and string.sub(present, 1, 8)
  return of and (stay[of] or repeated and of ~= segment and redis.call('HEXISTS', segs, of) == 1)
end

local function put(bucket, field, entry)
  local reply = redis.pcall('HSET', bucket, field, entry)
  local failed = type(reply) == 'table' and reply.err
  if not failed then return end
  if not string.find(failed, 'WRONGTYPE') then error(failed, 0) end
  redis.call('DEL', bucket)
  redis.call('HSET', bucket, field, entry)
end

local function enter()
  local locate = locator(tonumber(bits))
  for i = 0, slots - 1 do
    local bucket, field = locate(digests, i)
    if not stays(bucket, field) then put(bucket, field, segment .. string.char(math.floor(i / 256), i % 256)) end
  end
end

local salt = salt_of(agreement, 1)
-- A verdict that is too old to hold may refuse the writer all the same: it is a start of long ago.
local verdict = redis.pcall('HGET', prefix .. 'writers', writer_of(agreement, 1))
local has_failed = type(verdict) == 'string' and #verdict >= 13 and string.byte(verdict) == 2
if is_forbidden(salt, said, now) or has_failed then
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
  local same = dated(string.sub(value, rest, begin - 1), 0) == dated(agreement, 0)
    and string.sub(value, begin + rank * size, begin + (rank + 1) * size - 1) == part
  repeated = true
  if same then enter() end
  release()
  return same and VISIBLE or REFUSED
end
local agreed = redis.call('HMGET', incomplete, 'agreement', 'epoch')
if redis.call('ZSCORE', trash, segment) or generation_of(segment)
  or agreed[1] and (dated(agreed[1], 0) ~= dated(agreement, 0) or agreed[2] ~= epoch) then
  -- Parts of another epoch stay until they expire, so that the ranks that are still to come don't begin
  -- anew what this one no longer takes part in.
  release()
  return REFUSED
end
if agreed[1] then created = math.max(created, created_of(agreed[1], 1)) end
agreement = dated(agreement, created)
if ranks > 1 then
  redis.call('HSET', incomplete, 'agreement', agreement, 'epoch', epoch, rank, nbytes .. ':' .. part)
  redis.call('EXPIRE', incomplete, ttl)
  if redis.call('HLEN', incomplete) < ranks + 2 then
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

-- What is pinned, retained by others or another session's own stays, and so does what was saved under another salt.
local function goes(old, value)
  local _, _, rest = account(value)
  local of = redis.call('HGET', owner, old) or ''
  if of ~= '' and of ~= ARGV[11] or salt_of(value, rest) ~= salt then return false end
  return of ~= '' or not redis.call('ZSCORE', kept, old)
end

-- served_elsewhere(old, its): each of its blocks has an entry in this segment or in another visible one.
local function served_elsewhere(old, its)
  local locate = locator(tonumber(bits))
  for i = 0, #its / 16 - 1 do
    local entry = redis.pcall('HGET', locate(its, i))
    local of = type(entry) == 'string' and string.sub(entry, 1, 8)
    if not of or of == old or of ~= segment and redis.call('HEXISTS', segs, of) == 0 then return false end
  end
  return true
end

local olds, at = {}, 1
while at < #ARGV[15] do
  local old, high, low = string.sub(ARGV[15], at, at + 7), string.byte(ARGV[15], at + 8, at + 9)
  local count = high * 256 + low
  local its = string.sub(ARGV[15], at + 10, at + 9 + 16 * count)
  at = at + 10 + 16 * count
  local old_value = redis.call('HGET', segs, old)
  local place = old_value and tonumber(redis.call('ZSCORE', lru, old) or nil)
  if place and old ~= segment and goes(old, old_value) then
    olds[#olds + 1] = {segment = old, digests = its, place = place}
  elseif old_value then
    stay[old] = true
  end
end

enter()
-- Until it is used it counts as used half a minute before it was created (kvstore.index.contract.saved_minute).
local minute = math.max(0, math.floor(((ARGV[15] ~= '' and now or created) - 30) / 15) / 4)
-- What replaces blocks that nobody owns is nobody's own: it serves others too.
local replaced, heat, own = {}, 0, ARGV[11] ~= ''
for _, old in ipairs(olds) do
  if served_elsewhere(old.segment, old.digests) then
    local ends = redis.call('ZSCORE', kept, old.segment)
    minute = math.max(minute, ends and select(2, ends_of(tonumber(ends))) or use_of(old.place))
    heat = heat + (tonumber(redis.call('ZSCORE', hot, old.segment) or nil) or 0)
    own = own and redis.call('HEXISTS', owner, old.segment) == 1
    replaced[#replaced + 1] = old.segment
  end
end
redis.call('HSET', segs, segment, nbytes .. ':' .. slots .. ':' .. agreement .. part)
redis.call('ZADD', lru, score_of(minute, depth, worth), segment)
if heat > 0 then redis.call('ZADD', hot, heat, segment) end
if salt ~= '' then
  redis.call('ZADD', salts, 0, salt .. segment)
  redis.call('ZINCRBY', held, nbytes, salt)
end
usage_changed(tonumber(nbytes), 1, slots, cost_of(agreement, 1), 0)
event(most_events, 'commit', segment, first, string.sub(digests, -16), depth, slots, tonumber(nbytes), '')
redis.call('ZREM', ghosts, first)
if #replaced > 0 then
  dropping(ARGV[16], 'joined', most_events, -1)
  for _, old in ipairs(replaced) do drop(old) end
  account_drops()
end
-- After what it replaces is gone: what that retained is free for it.
if own then adopt(ARGV[11], segment, minute, tonumber(ARGV[12]), tonumber(ARGV[13]), tonumber(ARGV[14])) end
if ranks > 1 then
  redis.call('DEL', incomplete)
  redis.call('ZREM', parts, segment)
end
release()
return VISIBLE
