-- correct: KEYS[1] meta, ARGV the number of changes when counting began, and what was counted: bytes,
-- segments, blocks, pinned bytes, cost, and packed salt ids with bytes in 15 digits,
-- twice: of what they hold, and of what is retained, where 16 zeros stand for all salts.
-- Answers 1 if the accounts say that now, 0 if something changed meanwhile.
--
-- Race closed: a change between the count and the correction would be lost. The first write is one that a
-- full Redis accepts (HDEL).
if (redis.call('HGET', meta, 'changes') or '0') ~= ARGV[1] then return 0 end
if redis.call('HEXISTS', meta, 'bucket_bits') == 0 then return 1 end

local first, last = generations()
local bygone = 0
for n = first, last do bygone = bygone + redis.call('HLEN', prefix .. 'old:' .. n) end
redis.call('HDEL', meta, 'pinned', 'cost', 'bygone')
redis.call('HSET', meta, 'bytes', ARGV[2], 'segments', ARGV[3], 'blocks', ARGV[4], 'pinned', ARGV[5],
  'cost', ARGV[6], 'bygone', bygone)
redis.call('UNLINK', held)
for _, one in ipairs(items(ARGV[7], 31)) do
  redis.call('ZADD', held, tonumber(string.sub(one, 17)), string.sub(one, 1, 16))
end
redis.call('UNLINK', retained)
for _, one in ipairs(items(ARGV[8], 31)) do
  local salt = string.sub(one, 1, 16)
  redis.call('HSET', retained, salt == string.rep('\0', 16) and '' or salt,
    string.format('%.0f', tonumber(string.sub(one, 17))))
end
return 1
