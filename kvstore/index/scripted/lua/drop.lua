-- Shared by what takes segments out of sight and into the trash. (Needs grace.lua, and fate.lua where a quota evicts.)
-- `dropping` comes first.
--
-- Race closed: the record, the last use, the trash entry and the usage change in one step. A reader
-- sees a segment or doesn't, its payload's deletion is always on record, and of two evictions of one
-- segment only one counts.
--
-- The first write is one that Redis also accepts when it is full (HDEL, DEL): evicting is how room
-- is made. After a first write a script always runs to its end.
local delete_after, rule, most_events, most_ghosts, of_quota, evicted

-- dropping(when, why, events, ghosts): what holds for all that is dropped: what grace.lua says of the payloads' deletion,
-- the rule, how many events are kept, how many ghosts, or -1 if the rule is no quota's.
local function dropping(when, why, events, ghosts)
  delete_after, rule, most_events, most_ghosts = deletion(when), why, tonumber(events), tonumber(ghosts)
  of_quota = most_ghosts >= 0
  evicted = of_quota and (tonumber(redis.call('HGET', meta, 'evicted') or 0) or 0)
end

-- trash_score(ranks): a score of the trash; whole seconds plus ranks / 256.
local function trash_score(ranks)
  return string.format('%.17g', delete_after + ranks / 256)
end

local freed, dropped, blocks, cost, unpinned = 0, 0, 0, 0, 0

-- remember(first, slots): as a ghost, by how many bytes were evicted before it. More capacity than were
-- evicted since, its own included, would have kept it.
local function remember(first, slots)
  local stamp = math.floor((evicted + freed) / 4096) + math.min(slots, 4095) / 4096
  redis.call('ZADD', ghosts, string.format('%.17g', stamp), first)
end

-- drop(segment): true if the segment was visible.
local function drop(segment)
  local value = redis.call('HGET', segs, segment)
  if not value then return false end
  local nbytes, slots, rest = account(value)
  local fate, session = '', ''
  if of_quota then fate, session = fate_of(segment) end
  redis.call('HDEL', segs, segment)
  if redis.call('ZREM', lru, segment) == 0 and redis.call('ZREM', pins, segment) == 1 then
    unpinned = unpinned + nbytes
  end
  redis.call('ZREM', hot, segment)
  local salt = salt_of(value, rest)
  unsalted(segment, salt, nbytes)
  disowned(segment, salt, nbytes)
  redis.call('ZADD', trash, trash_score(ranks_of(value, rest)), segment)
  local first = first_of(value, rest)
  if of_quota and most_ghosts > 0 then remember(first, slots) end
  event(most_events, 'evict', segment, first, '', depth_of(value, rest), slots, nbytes, rule,
    fate, session)
  freed, dropped, blocks = freed + nbytes, dropped + 1, blocks + slots
  cost = cost + cost_of(value, rest)
  return true
end

-- account_drops(): take everything dropped off the usage.
local function account_drops()
  if dropped == 0 then return end
  usage_changed(-freed, -dropped, -blocks, -cost, -unpinned)
  if not of_quota then return end
  counted('evicted', freed)
  redis.call('ZREMRANGEBYRANK', ghosts, 0, -1 - most_ghosts)
end
