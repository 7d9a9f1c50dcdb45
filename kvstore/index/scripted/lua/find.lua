-- find: KEYS[1] meta, ARGV[1] packed digests, each by itself.
-- Answers {an entry or nil per digest, the entries' distinct segments, a value or nil for each}.
--
-- Race closed: entries and records are read in one step, so no entry is paired with a record that
-- an eviction removed in between. Reads only, so it also works on a full Redis.
if not bits then return {{}, {}, {}} end

local digests, locate = ARGV[1], locator(tonumber(bits))
local entries, segments, seen = {}, {}, {}
for i = 1, #digests / 16 do
  local entry = redis.pcall('HGET', locate(digests, i - 1))
  -- A bucket of another type has no entries.
  entry = type(entry) == 'string' and entry
  entries[i] = entry
  local segment = entry and string.sub(entry, 1, 8)
  if segment and not seen[segment] then
    seen[segment] = true
    segments[#segments + 1] = segment
  end
end

local values = {}
for first = 1, #segments, PIECE do
  local upto = math.min(first + PIECE - 1, #segments)
  for i, value in ipairs(redis.call('HMGET', segs, unpack(segments, first, upto))) do
    values[first + i - 1] = young(value)
  end
end
return {entries, segments, values}
