-- enter: KEYS[1] meta, ARGV packed entries (digest, segment, slot).
-- Answers how many were entered.
--
-- Enters those of visible segments, but over no entry that leads to one.
--
-- Race closed: an entry that was looked at leads to nothing visible when it is overwritten. The first write is one that Redis refuses when it is full (HSET): then nothing has been
-- written.
local bits = redis.call('HGET', meta, 'bucket_bits')
if not bits then return 0 end
local locate, known, entered = locator(tonumber(bits)), {}, 0
local function visible(segment)
  if known[segment] == nil then known[segment] = redis.call('HEXISTS', segs, segment) == 1 end
  return known[segment]
end

for _, item in ipairs(items(ARGV[1], 26)) do
  local entry = string.sub(item, 17)
  if visible(string.sub(entry, 1, 8)) then
    local bucket, field = locate(item, 0)
    local present = redis.pcall('HGET', bucket, field)
    if type(present) ~= 'table' and present ~= entry and not (present and visible(string.sub(present, 1, 8))) then
      redis.call('HSET', bucket, field, entry)
      entered = entered + 1
    end
  end
end
return entered
