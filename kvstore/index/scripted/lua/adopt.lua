-- adopt: KEYS[1] meta, ARGV of each segment its id and what taken.lua answers of it; then by whom.
-- Answers how many became visible. (Needs retention.lua.)
--
-- Makes segments visible as they are in another shard. One that is visible here already takes the place that it has
-- there by now.
--
-- Race closed: record, place, sums and usage change in one step. The first write is one that Redis refuses when it is
-- full (HSET, ZADD): then nothing has been written.
if redis.call('HEXISTS', meta, 'bucket_bits') == 0 then return 0 end

-- placed(segment, nbytes, score, pinned): put it where it is there; answers by how much what is pinned changes.
local function placed(segment, nbytes, score, pinned)
  redis.call('ZADD', pinned and pins or lru, score, segment)
  local moved = redis.call('ZREM', pinned and lru or pins, segment) == 1
  return moved and (pinned and nbytes or -nbytes) or 0
end

local sums = {[''] = 0}
local function retains(segment, salt, nbytes, ends)
  local was = redis.call('ZSCORE', kept, segment)
  if ends ~= '' then redis.call('ZADD', kept, ends, segment) elseif was then redis.call('ZREM', kept, segment) end
  local change = (ends ~= '' and nbytes or 0) - (was and nbytes or 0)
  sums[''] = sums[''] + change
  if salt ~= '' then sums[salt] = (sums[salt] or 0) + change end
end

local adopted = 0
for i = 1, #ARGV - 1, 6 do
  local segment, value, score, pinned, heat, ends = unpack(ARGV, i, i + 5)
  pinned = pinned ~= ''
  local nbytes, slots, rest = account(value)
  local salt = salt_of(value, rest)
  if redis.call('HEXISTS', segs, segment) == 1 then
    local change = placed(segment, nbytes, score, pinned)
    if change ~= 0 then usage_changed(0, 0, 0, 0, change) end
  else
    redis.call('HSET', segs, segment, value)
    -- It was evicted there, and stored again.
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
  retains(segment, salt, nbytes, ends)
end
held_back(sums)
return adopted
