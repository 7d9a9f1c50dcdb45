-- replace: KEYS[1] meta.
-- Answers the names of what made no sense and was replaced: keys of another type than the schema's, and
-- numbers that are none. What is lost with them is misses: `count` and `correct` come next, and without a
-- meta that can be read engines register the namespace anew.
--
-- Race closed: what is looked at and what is replaced is one step, so that nothing goes that a script has just
-- written. The first write is one that a full Redis accepts (UNLINK, HDEL).
local replaced = {}

local function is(part, kind)
  local key = prefix .. part
  local found = redis.call('TYPE', key)
  found = type(found) == 'table' and found.ok or found
  if found == 'none' or found == kind then return found == kind end
  redis.call('UNLINK', key)
  replaced[#replaced + 1] = part
  return false
end

local function whole(text, most)
  return string.find(text, '^%d+$') and tonumber(text) <= (most or 2 ^ 53)
end

-- numbers(part): drop the fields of a hash of counters that are no numbers.
local function numbers(part)
  if not is(part, 'hash') then return end
  local flat = redis.call('HGETALL', prefix .. part)
  for i = 1, #flat, 2 do
    if not string.find(flat[i + 1], '^%-?%d+$') or math.abs(tonumber(flat[i + 1])) > 2 ^ 53 then
      redis.call('HDEL', prefix .. part, flat[i])
      replaced[#replaced + 1] = part .. ' ' .. flat[i]
    end
  end
end

for _, part in ipairs({'lru', 'pins', 'trash', 'hot', 'parts', 'ghosts', 'salts', 'held', 'kept'}) do
  is(part, 'zset')
end
for _, part in ipairs({'events', 'outcomes'}) do is(part, 'stream') end
for _, part in ipairs({'segs', 'owner', 'writers', 'sessions:0', 'sessions:1'}) do is(part, 'hash') end
-- Nobody can have said that.
redis.call('ZREMRANGEBYSCORE', kept, redis.call('TIME')[1] + 2 * 86400, '+inf')
-- A time that is none becomes now: what was erased stays so, and what is saved from now on is not forbidden.
if is('erased', 'hash') then
  local erased = prefix .. 'erased'
  local flat = redis.call('HGETALL', erased)
  for i = 1, #flat, 2 do
    local salt = flat[i]
    if (salt ~= '' and #salt ~= 16) or not whole(flat[i + 1]) then
      redis.call('HDEL', erased, salt)
      if salt == '' or #salt == 16 then redis.call('HSET', erased, salt, redis.call('TIME')[1]) end
      replaced[#replaced + 1] = 'erased'
    end
  end
end
numbers('seen')
numbers('ghost')
numbers('retained')
if not is('meta', 'hash') then return replaced end

local function field(name) return redis.call('HGET', meta, name) or '0' end

if not whole(field('schema')) or not whole(field('bucket_bits'), MOST_BITS) then
  redis.call('UNLINK', meta)
  replaced[#replaced + 1] = 'meta'
  return replaced
end
for _, name in ipairs({'bytes', 'segments', 'blocks', 'pinned', 'cost', 'changes', 'evicted', 'bygone', 'epoch',
  'drained', 'created', 'seen', 'window', 'ttl'}) do
  if not whole((string.gsub(field(name), '%.%d+$', ''))) then
    redis.call('HDEL', meta, name)
    replaced[#replaced + 1] = name
  end
end
for _, name in ipairs({'to', 'from'}) do
  local layout = redis.call('HGET', meta, name)
  local shards = layout and (string.match(layout, '^(%d+)$') or string.match(layout, '^(%d+)%.%d+$'))
  if layout and (not shards or #layout > 13 or tonumber(shards) < 1 or tonumber(shards) > 256) then
    redis.call('HDEL', meta, name)
    replaced[#replaced + 1] = name
  end
end
if redis.call('HEXISTS', meta, 'seen') == 0 then
  redis.call('HDEL', meta, 'seen')
  redis.call('HSET', meta, 'seen', redis.call('TIME')[1])
end
local drained, epoch = tonumber(field('drained')), tonumber(field('epoch'))
if drained > epoch or epoch - drained > MOST_GENERATIONS then
  -- What the generations in between hold is found by `fsck`.
  redis.call('HDEL', meta, 'drained')
  redis.call('HSET', meta, 'drained', epoch)
  replaced[#replaced + 1] = 'drained'
end
local first, last = generations()
for n = first, last do is('old:' .. n, 'hash') end
return replaced
