-- owned: KEYS[1] meta, ARGV session.
-- Answers segment, value, segment, value ...: what its record lists of the visible segments that are its own.
--
-- Race closed: a record moves from one hash to the other when a window begins, and a segment that was another's, or
-- gone, between two looks would be listed with a record. Reads only.
local found = {}
local record = redis.call('HGET', sessions[1], ARGV[1]) or redis.call('HGET', sessions[2], ARGV[1])
-- After two words come the segments: sessions.lua.
if not record or #record <= 8 or #record % 8 ~= 0 then return found end

local own = items(string.sub(record, 9), 8)
for first = 1, #own, PIECE do
  local upto = math.min(first + PIECE - 1, #own)
  local owners = redis.call('HMGET', owner, unpack(own, first, upto))
  for i, value in ipairs(redis.call('HMGET', segs, unpack(own, first, upto))) do
    if value and owners[i] == ARGV[1] then
      found[#found + 1] = own[first + i - 1]
      found[#found + 1] = value
    end
  end
end
return found
