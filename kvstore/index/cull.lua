-- cull: KEYS[1] meta, ARGV bytes to keep, then what drop.lua says, then how many segments to look at at
-- most, how many of the first to pass over, from which unix second of last use on to spare one.
-- Answers {the segments dropped, how many were spared, 1 if there is more to do}.
--
-- Race closed: many engines cull at once. Usage and choice are one step, so together they drop what
-- is too much once and not once each, and a segment that was touched a moment ago is not the oldest.
local keep, most, skip, spare = tonumber(ARGV[1]), tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local used = tonumber(redis.call('HGET', meta, 'bytes') or 0)
local gone, spared, more = {}, 0, 0
if most > 0 and used > keep then
  local flat = redis.call('ZRANGE', lru, skip, skip + most - 1, 'WITHSCORES')
  if #flat == 2 * most then more = 1 end
  for i = 1, #flat, 2 do
    if used - freed <= keep then break end
    if spare and use_of(tonumber(flat[i + 1])) * 60 >= spare then
      spared = spared + 1
    elseif drop(flat[i]) then
      gone[#gone + 1] = flat[i]
    else
      redis.call('ZREM', lru, flat[i])
    end
  end
  if used - freed <= keep then more = 0 end
end
account_drops()
return {gone, spared, more}
