-- invalidate: KEYS[1] meta, ARGV how many events are kept, by whom.
-- Answers how many segments became invisible.
--
-- Race closed: visibility, the accounts and the epoch change in one step, so that a commit either is
-- invalidated or comes after the invalidation. O(1): the hash of records is renamed, and drain empties it.
--
-- The first write is one that a full Redis accepts (RENAME, HDEL).
if redis.call('HEXISTS', meta, 'bucket_bits') == 0 then return 0 end

local first, last = generations()
local gone, used = redis.call('HLEN', segs), redis.call('HMGET', meta, 'bytes', 'blocks')
if gone > 0 then redis.call('RENAME', segs, prefix .. 'old:' .. last + 1) end
redis.call('HDEL', meta, 'pinned', 'cost')
redis.call('UNLINK', lru, pins, hot, ghosts, salts, held, owner, kept, retained, unpack(sessions))
redis.call('HSET', meta, 'bytes', 0, 'segments', 0, 'blocks', 0)
counted('changes', 1)
redis.call('HINCRBY', meta, 'epoch', 1)
if gone == 0 and first > last then redis.call('HSET', meta, 'drained', last + 2) end
if gone > 0 then
  counted('bygone', gone)
  event(tonumber(ARGV[1]), 'invalidate', '', '', '', 0, used[2] or 0,
    tonumber(used[1] or 0) or 0, 'invalidated')
end
return gone
