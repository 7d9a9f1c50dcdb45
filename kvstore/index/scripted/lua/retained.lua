-- retained: KEYS[1] meta, ARGV how many of those whose time is over to pass over, how many to look at.
-- Answers salt ids and bytes of all that `retained` counts in turn, and likewise of those whose time is over, which it
-- counts until somebody takes them out.
--
-- Race closed: between the two looks somebody might do so, and they would be taken off twice. Reads only.
local now, over = redis.call('TIME')[1], {}
local some = redis.call('ZRANGE', kept, '-inf', '(' .. now + 1, 'BYSCORE', 'LIMIT', ARGV[1], ARGV[2])
for _, value in ipairs(#some > 0 and redis.call('HMGET', segs, unpack(some)) or {}) do
  local size, _, rest = account(value or '')
  over[#over + 1], over[#over + 2] = salt_of(value or '', rest), string.format('%.0f', size)
end
return {redis.call('HGETALL', retained), over}
