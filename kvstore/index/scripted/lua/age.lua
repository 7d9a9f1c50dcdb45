-- Shared by match.lua, claim.lua and find.lua: what is older than the time to live that holds for the namespace (`ttl`
-- of meta, in seconds) serves nobody, whether or not it is evicted yet. (It stands before walk.lua.)
local known_of = redis.call('HMGET', meta, 'bucket_bits', 'ttl')
local bits, oldest = known_of[1], tonumber(known_of[2] or nil)
oldest = oldest and redis.call('TIME')[1] - oldest

-- young(value): a segment's value, or false if there is none or it is too old.
local function young(value)
  if not value or not oldest then return value end
  local _, _, rest = account(value)
  return created_of(value, rest) > oldest and value
end
