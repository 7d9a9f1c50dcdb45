-- claim: KEYS[1] meta, ARGV packed digests of a chain, segment, time to live in ms.
-- Answers {leading blocks that are stored, 1 if `segment` may be written with the rest, unix seconds}; nil if
-- the namespace is unknown.
--
-- Race closed: two engines that finish the same prompt at the same moment both find block n missing.
-- Looking and claiming are one step here, so only one of them is told to write it. All ranks of one
-- segment name the same segment and so share its claim.

-- holder_of(key, asker, ttl): the holder, and the asker if nobody has it. What no asker can have written is
-- nobody's, or it would be kept for good: a key of another type, one that never ends, and one that lasts much
-- longer than the `ttl` ms that are asked for now.
local function holder_of(key, asker, ttl)
  local holder = redis.pcall('GET', key)
  if type(holder) ~= 'string' then return asker end
  local left = redis.call('PTTL', key)
  return left >= 0 and left <= 10 * tonumber(ttl) and holder or asker
end

if not bits then return false end
local time = redis.call('TIME')
local now = string.format('%d.%06d', time[1], time[2])

local digests, segment, ttl = ARGV[1], ARGV[2], ARGV[3]
local values, present = servable(digests, tonumber(bits))
-- A record that nobody can read (here: one without a whole agreement) serves nobody, so what it hides is
-- written anew.
local readable = 0
for i, value in ipairs(values) do
  local _, slots, rest = account(value)
  if slots == 0 or #value < rest + 55 then
    present = readable
    break
  end
  readable = readable + run_count[i]
end
if present * 16 >= #digests then return {present, 0, now} end

local key = prefix .. 'claim:' .. hex(string.sub(digests, present * 16 + 1, present * 16 + 16))
if holder_of(key, segment, ttl) ~= segment then return {present, 0, now} end
redis.call('SET', key, segment, 'PX', ttl)
return {present, 1, now}
