-- verdicts: KEYS[1] meta, ARGV packed ids of writers, 8 bytes each; without any, of all that were judged.
-- Answers a list of writer, value, writer, value ... of those that were. No race: it reads only.
local writers, asked = prefix .. 'writers', items(ARGV[1], 8)
if #asked == 0 then return redis.call('HGETALL', writers) end
local found = {}
for first = 1, #asked, PIECE do
  local upto = math.min(first + PIECE - 1, #asked)
  for i, value in ipairs(redis.call('HMGET', writers, unpack(asked, first, upto))) do
    if value then
      found[#found + 1] = asked[first + i - 1]
      found[#found + 1] = value
    end
  end
end
return found
