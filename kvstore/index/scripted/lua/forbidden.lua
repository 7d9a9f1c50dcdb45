-- Shared by what asks for, and makes, the times in `erased`: salt id, or '' for the whole namespace -> unix second.
-- What was computed until then must not become visible any more.

-- forbidden_until(salt): the later of the two times that hold for it; -1, which is before all times, for none.
local function forbidden_until(salt)
  local times = redis.call('HMGET', prefix .. 'erased', '', salt)
  return math.max(tonumber(times[1] or -1) or -1, tonumber(times[2] or -1) or -1)
end

-- is_forbidden(salt, created, now): kvstore.index.contract.is_forbidden, which says why.
local function is_forbidden(salt, created, now)
  local last = forbidden_until(salt)
  return math.min(created, now) <= last or last >= 0 and created > now + 60
end

-- give_up(segment): what other ranks have written of it is to be deleted at once.
local function give_up(segment)
  local incomplete = prefix .. 'part:' .. hex(segment)
  local agreement = redis.call('HGET', incomplete, 'agreement')
  if agreement then
    redis.call('DEL', incomplete)
    redis.call('ZREM', parts, segment)
    redis.call('ZADD', trash, string.format('%.17g', ranks_of(agreement, 1) / 256), segment)
  end
end
