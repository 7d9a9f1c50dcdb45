-- layout: KEYS[1] meta of a namespace's id, ARGV its layout, the one that a reshard fills and the one that it has left, or
-- '', as they were; then as they are from now on.
-- Answers 1 if that is so now, 0 if they were otherwise.
--
-- Race closed: of two that say how a namespace lies from now on, the second finds it otherwise than it was told. Layouts
-- don't come back, so what was compared is what was looked at.
--
-- The first write is one that a full Redis accepts (HDEL): what makes room must not need any.
local SHARDED = '3'
local known = redis.call('HMGET', meta, 'schema', 'shards', 'to', 'from')
if not known[1] then return 0 end
local layout = known[1] == SHARDED and known[2] or '1'
if layout ~= ARGV[1] or (known[3] or '') ~= ARGV[2] or (known[4] or '') ~= ARGV[3] then return 0 end
redis.call('HDEL', meta, 'to', 'from', 'erasing')
if ARGV[4] ~= '1' then redis.call('HSET', meta, 'schema', SHARDED, 'shards', ARGV[4]) end
if ARGV[5] ~= '' then redis.call('HSET', meta, 'to', ARGV[5]) end
if ARGV[6] ~= '' then redis.call('HSET', meta, 'from', ARGV[6]) end
return 1
