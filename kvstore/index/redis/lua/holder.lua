-- Who has a key that ends by itself.

-- holder_of(key, asker, ttl): the holder, and the asker if nobody has it. What no asker can have written is
-- nobody's, or it would be kept for good: a key of another type, one that never ends, and one that lasts much
-- longer than the `ttl` ms that are asked for now.
local function holder_of(key, asker, ttl)
  local holder = redis.pcall('GET', key)
  if type(holder) ~= 'string' then return asker end
  local left = redis.call('PTTL', key)
  return left >= 0 and left <= 10 * tonumber(ttl) and holder or asker
end
