-- judge: KEYS[1] meta, ARGV writer, 1 if what it wrote is what the engine computes, else 0, the engine, 1 if some
-- writer agrees with the engine, else 0, the writer's name, verdicts kept, seconds that they are kept.
-- Answers what holds of the writer from now on: 0 proven, 1 disputed, 2 failed.
--
-- Race closed: two engines that dispute one writer at the same moment must not each take itself for the first.
local writer, alike, by, stands, name = ARGV[1], ARGV[2] == '1', ARGV[3], ARGV[4] == '1', ARGV[5]
local now, writers = tonumber(redis.call('TIME')[1]), prefix .. 'writers'
local before = redis.call('HGET', writers, writer)
local state = before and #before >= 13 and string.byte(before) or 1
if state > 2 then state, before = 1, false end
if before and #before >= 13 and struct.unpack('>I4', before, 2) <= now - tonumber(ARGV[7]) then state, before = 1, false end
if before and state == 1 and #before < 13 then before = false end
if before and state ~= 1 then return state end
if alike then
  state = 0
elseif stands or (before and string.sub(before, 6, 13) ~= by) then
  state = 2
elseif before then
  return 1
end
redis.call('HSET', writers, writer, string.char(state) .. struct.pack('>I4', now) .. by .. name)
redis.call('EXPIRE', writers, tonumber(ARGV[7]))
if redis.call('HLEN', writers) > tonumber(ARGV[6]) then
  local flat, oldest, last = redis.call('HGETALL', writers), nil, nil
  for i = 1, #flat, 2 do
    local at = #flat[i + 1] >= 13 and struct.unpack('>I4', flat[i + 1], 2) or 0
    if flat[i] ~= writer and (not last or at < last) then oldest, last = flat[i], at end
  end
  redis.call('HDEL', writers, oldest)
end
return state
