-- sweep: KEYS[1] meta, ARGV about how many entries to drop, about how many entries and buckets to look at.
-- Answers {entries dropped, entries and buckets looked at, 1 if the last bucket was among them}.
--
-- Race closed: whether an entry's segment is visible and the entry's removal are one step, so an entry
-- that a commit has just pointed at a new segment is never taken for a dangling one. The place where
-- the next call continues is kept in the namespace, so several sweepers share the work.
local bits = bits_of()
if not bits then return {0, 0, 1} end

local most, patience, buckets = tonumber(ARGV[1]), tonumber(ARGV[2]), 2 ^ bits
local bucket, cursor = place_of(redis.call('HGET', meta, 'cursor') or '0')
local dropped, looked = 0, 0

local function sweep(key, flat)
  for first = 1, #flat, 2 * PIECE do
    local ids, fields, dead = {}, {}, {}
    for i = first, math.min(first + 2 * PIECE, #flat + 1) - 1, 2 do
      fields[#fields + 1] = flat[i]
      ids[#ids + 1] = string.sub(flat[i + 1], 1, 8)
    end
    for i, value in ipairs(redis.call('HMGET', segs, unpack(ids))) do
      if not value then dead[#dead + 1] = fields[i] end
    end
    if #dead > 0 then dropped = dropped + redis.call('HDEL', key, unpack(dead)) end
  end
end

while bucket < buckets and dropped < most and looked < patience do
  local key, flat, other
  key, flat, bucket, cursor, other = page(bucket, cursor)
  if other then redis.call('UNLINK', key) end
  looked = looked + 1 + #flat / 2
  sweep(key, flat)
end
local done = bucket >= buckets
-- A full Redis refuses a script whose first write is an HSET, and accepts one that begins with HDEL.
redis.call('HDEL', meta, 'cursor')
redis.call('HSET', meta, 'cursor', done and 0 or place(bucket, cursor))
return {dropped, looked, done and 1 or 0}
