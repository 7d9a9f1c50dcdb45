-- cull: KEYS[1] meta, ARGV bytes to keep, then the arguments of drop.lua's `dropping`, then how many segments to drop at most, at
-- how many to look, how many of the first to pass over, from which unix second of last use on to spare one, by whom.
-- Answers {the segments dropped, how many were spared, 1 if there is more to look at}.
--
-- Race closed: many engines cull at once. Usage and choice are one step, so together they drop what
-- is too much once and not once each, and a segment that was touched a moment ago is not the oldest.
dropping(ARGV[2], ARGV[3], ARGV[4], ARGV[5])
local keep, most, looks = tonumber(ARGV[1]), tonumber(ARGV[6]), tonumber(ARGV[7])
local skip, spare = tonumber(ARGV[8]), tonumber(ARGV[9])
expire_retained()
local used = tonumber(redis.call('HGET', meta, 'bytes') or 0)
if used <= keep then return {{}, 0, 0} end

local gone, spared = {}, 0
local flat = redis.call('ZRANGE', lru, skip, skip + looks - 1, 'WITHSCORES')
for i = 1, #flat, 2 do
  if used - freed <= keep or #gone == most then break end
  if spare and use_of(tonumber(flat[i + 1])) * 60 >= spare then
    spared = spared + 1
  elseif drop(flat[i]) then
    gone[#gone + 1] = flat[i]
  else
    redis.call('ZREM', lru, flat[i])
  end
end
account_drops()
return {gone, spared, #flat == 2 * looks and 1 or 0}
