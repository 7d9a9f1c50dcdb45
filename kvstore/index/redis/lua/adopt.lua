-- adopt: KEYS[1] meta, ARGV 1 if nobody uses this shard yet, or '', how many events are kept, then of each segment its id,
-- its value, its score in the order of eviction, 1 if it is pinned, or '', and its heat, or '', by whom.
-- Answers how many became visible; nil if the namespace is unknown.
--
-- Takes segments over as another shard has them. What is known here in any state, or forbidden, stays as it is; but
-- as long as nobody uses the shard, a segment takes the place that it has there by now.
--
-- Race closed: that it is neither in the trash nor invalidated nor forbidden here, and that it becomes visible, are
-- one step. The first write is one that Redis refuses when it is full (HSET, ZADD): then nothing has been written.
local building, most_events = ARGV[1] ~= '', tonumber(ARGV[2])
local fields = redis.call('HMGET', meta, 'bucket_bits', 'aside_bits')
if not fields[1] and not fields[2] then return false end

-- placed(segment, nbytes, score, pinned): put it where it is there; answers by how much what is pinned changes.
local function placed(segment, nbytes, score, pinned)
  redis.call('ZADD', pinned and pins or lru, score, segment)
  local moved = redis.call('ZREM', pinned and lru or pins, segment) == 1
  return moved and (pinned and nbytes or -nbytes) or 0
end

local adopted = 0
for i = 3, #ARGV - 1, 5 do
  local segment, value, score, pinned, heat = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3] ~= '', ARGV[i + 4]
  local nbytes, slots, rest = account(value)
  local salt = salt_of(value, rest)
  if redis.call('HEXISTS', segs, segment) == 1 then
    if building then
      local change = placed(segment, nbytes, score, pinned)
      if change ~= 0 then usage_changed(0, 0, 0, 0, change) end
    end
  elseif not redis.call('ZSCORE', trash, segment) and not generation_of(segment)
    and created_of(value, rest) > forbidden_until(salt) then
    redis.call('HSET', segs, segment, value)
    placed(segment, nbytes, score, pinned)
    if salt ~= '' then
      redis.call('ZADD', salts, 0, salt .. segment)
      redis.call('ZINCRBY', held, nbytes, salt)
    end
    if heat ~= '' then redis.call('ZADD', hot, heat, segment) end
    usage_changed(nbytes, 1, slots, cost_of(value, rest), pinned and nbytes or 0)
    event(most_events, 'commit', segment, first_of(value, rest), '', depth_of(value, rest), slots, nbytes, '')
    adopted = adopted + 1
  end
end
return adopted
