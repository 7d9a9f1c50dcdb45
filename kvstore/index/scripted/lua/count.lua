-- count: KEYS[1] meta, ARGV packed segments.
-- Answers bytes, segments, blocks, pinned bytes, cost of those that are visible, how many of them were in no order
-- and are now, of each that is salted its salt id and its bytes, one after the other, and likewise of each that is
-- retained.
--
-- Race closed: an eviction between the look and the repair would leave a last use without a segment. The
-- first write is one that a full Redis accepts (ZREM).
local UNUSED_S = 30
local segments = items(ARGV[1], 8)
if #segments == 0 then return {'0', '0', '0', '0', '0', 0} end

local values = redis.call('HMGET', segs, unpack(segments))
local listed, pinning = redis.call('ZMSCORE', lru, unpack(segments)), redis.call('ZMSCORE', pins, unpack(segments))
local retaining = redis.call('ZMSCORE', kept, unpack(segments))
local nbytes, count, blocks, pinned, cost, mended, of_salts, of_kept = 0, 0, 0, 0, 0, 0, {}, {}
for i, value in ipairs(values) do
  if value then
    local size, slots, rest = account(value)
    nbytes, count, blocks, cost = nbytes + size, count + 1, blocks + slots, cost + cost_of(value, rest)
    local salt = salt_of(value, rest)
    if salt ~= '' then
      redis.call('ZREM', salts, salt .. segments[i])
      redis.call('ZADD', salts, 0, salt .. segments[i])
      of_salts[#of_salts + 1], of_salts[#of_salts + 2] = salt, size
    end
    if retaining[i] then of_kept[#of_kept + 1], of_kept[#of_kept + 2] = salt, size end
    if pinning[i] then
      pinned = pinned + size
      if listed[i] then redis.call('ZREM', lru, segments[i]) end
    elseif not listed[i] then
      redis.call('ZREM', lru, segments[i])
      local minute = math.max(0, math.floor((created_of(value, rest) - UNUSED_S) / 15) / 4)
      redis.call('ZADD', lru, score_of(minute, depth_of(value, rest), 0), segments[i])
      mended = mended + 1
    end
  end
end
local function whole(number) return string.format('%.0f', number) end
return {whole(nbytes), whole(count), whole(blocks), whole(pinned), whole(cost), mended, of_salts, of_kept}
