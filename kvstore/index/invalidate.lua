-- invalidate: KEYS[1] meta, ARGV how many events are kept.
-- Answers how many segments became invisible.
--
-- Race closed: what is invisible, the accounts and the epoch change in one step, so that a commit belongs
-- either to what was invalidated or to what comes after it. O(1): the records are renamed, and drain takes
-- them apart.
--
-- The first write is one that a full Redis accepts (RENAME, HDEL).
if redis.call('HEXISTS', meta, 'bucket_bits') == 0 then return 0 end

local first, last = generations()
local gone, used = redis.call('HLEN', segs), redis.call('HMGET', meta, 'bytes', 'blocks')
if gone > 0 then redis.call('RENAME', segs, prefix .. 'old:' .. last + 1) end
redis.call('HDEL', meta, 'pinned', 'cost')
redis.call('UNLINK', lru, pins, hot, ghosts)
redis.call('HSET', meta, 'bytes', 0, 'segments', 0, 'blocks', 0)
redis.call('HINCRBY', meta, 'changes', 1)
redis.call('HINCRBY', meta, 'epoch', 1)
if gone == 0 and first > last then redis.call('HSET', meta, 'drained', last + 2) end
if gone > 0 then
  redis.call('HINCRBY', meta, 'bygone', gone)
  event(tonumber(ARGV[1]), 'invalidate', '', '', '', 0, used[2], tonumber(used[1]), 'invalidated')
end
return gone
