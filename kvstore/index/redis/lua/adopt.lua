-- adopt: KEYS[1] meta, ARGV of each segment its id, its value, its score in the order of eviction, 1 if it is pinned, or '',
-- and its heat, or ''; then the run, by whom.
-- Answers how many became visible; nil if another run fills the shard, or none.
--
-- Makes segments visible as they are in another shard. One that is visible here already takes the place that it has
-- there by now.
--
-- Race closed: see filling.lua. The first write is one that Redis refuses when it is full (HSET, ZADD): then nothing has
-- been written.

-- placed(segment, nbytes, score, pinned): put it where it is there; answers by how much what is pinned changes.
local function placed(segment, nbytes, score, pinned)
  redis.call('ZADD', pinned and pins or lru, score, segment)
  local moved = redis.call('ZREM', pinned and lru or pins, segment) == 1
  return moved and (pinned and nbytes or -nbytes) or 0
end

local adopted = 0
for i = 1, #ARGV - 2, 5 do
  local segment, value, score, pinned, heat = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3] ~= '', ARGV[i + 4]
  local nbytes, slots, rest = account(value)
  if redis.call('HEXISTS', segs, segment) == 1 then
    local change = placed(segment, nbytes, score, pinned)
    if change ~= 0 then usage_changed(0, 0, 0, 0, change) end
  else
    local salt = salt_of(value, rest)
    redis.call('HSET', segs, segment, value)
    -- From an earlier comparison, after which it was evicted there, and stored again.
    redis.call('ZREM', trash, segment)
    placed(segment, nbytes, score, pinned)
    if salt ~= '' then
      redis.call('ZADD', salts, 0, salt .. segment)
      redis.call('ZINCRBY', held, nbytes, salt)
    end
    if heat ~= '' then redis.call('ZADD', hot, heat, segment) end
    usage_changed(nbytes, 1, slots, cost_of(value, rest), pinned and nbytes or 0)
    adopted = adopted + 1
  end
end
return adopted
