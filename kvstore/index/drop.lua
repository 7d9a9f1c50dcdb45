-- Shared by evict.lua and cull.lua: take segments out of sight and into the trash.
--
-- Race closed: the record, the last use, the trash entry and the usage change in one step. A reader
-- sees a segment or doesn't, its payload's deletion is always on record, and of two evictions of one
-- segment only one counts.
--
-- The first write is one that Redis also accepts when it is full (HDEL, DEL): evicting is how room
-- is made. After a first write a script always runs to its end.

-- trash_score(delete_after, ranks): a score of the trash; whole seconds plus ranks / 256.
local function trash_score(delete_after, ranks)
  return string.format('%.17g', delete_after + ranks / 256)
end

local freed, dropped, blocks = 0, 0, 0

-- drop(segment, delete_after): true if the segment was visible.
local function drop(segment, delete_after)
  local value = redis.call('HGET', segs, segment)
  if not value then return false end
  local nbytes, slots, rest = account(value)
  redis.call('HDEL', segs, segment)
  redis.call('ZREM', lru, segment)
  -- An agreement is 8 bytes of checksum and the record's head, whose fifth byte is the ranks.
  redis.call('ZADD', trash, trash_score(delete_after, string.byte(value, rest + 12)), segment)
  freed, dropped, blocks = freed + nbytes, dropped + 1, blocks + slots
  return true
end

-- account_drops(): take everything dropped off the usage.
local function account_drops()
  if dropped == 0 then return end
  redis.call('HINCRBY', meta, 'bytes', string.format('%.0f', -freed))
  redis.call('HINCRBY', meta, 'segments', -dropped)
  redis.call('HINCRBY', meta, 'blocks', -blocks)
end
