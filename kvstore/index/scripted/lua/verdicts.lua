-- verdicts: KEYS[1] meta, ARGV packed ids of writers, 8 bytes each, without any, of all that were judged; seconds
-- that verdicts hold.
-- Answers a list of writer, value, writer, value ... of those that were. No race: it reads only.
local writers, asked = prefix .. 'writers', items(ARGV[1], 8)
local since = tonumber(redis.call('TIME')[1]) - tonumber(ARGV[2])
local found = {}

local function add(writer, value)
  if #value >= 13 and struct.unpack('>I4', value, 2) <= since then return end
  found[#found + 1], found[#found + 2] = writer, value
end

if #asked == 0 then
  local flat = redis.call('HGETALL', writers)
  for i = 1, #flat, 2 do add(flat[i], flat[i + 1]) end
  return found
end
for first = 1, #asked, PIECE do
  local upto = math.min(first + PIECE - 1, #asked)
  for i, value in ipairs(redis.call('HMGET', writers, unpack(asked, first, upto))) do
    if value then add(asked[first + i - 1], value) end
  end
end
return found
