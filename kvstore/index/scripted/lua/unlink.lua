-- unlink: KEYS[1] meta, ARGV packed entries: digest (16 bytes), segment (8), slot (2).
-- Answers how many of them were dropped.
--
-- Race closed: an entry that a commit has meanwhile pointed elsewhere stays. The first write is one that a
-- full Redis accepts (HDEL).
local bits = redis.call('HGET', meta, 'bucket_bits')
if not bits then return 0 end

local locate, dropped = locator(tonumber(bits)), 0
for _, entry in ipairs(items(ARGV[1], 26)) do
  local bucket, field = locate(entry, 0)
  if redis.call('HGET', bucket, field) == string.sub(entry, 17) then
    dropped = dropped + redis.call('HDEL', bucket, field)
  end
end
return dropped
