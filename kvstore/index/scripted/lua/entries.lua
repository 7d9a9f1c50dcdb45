-- entries: KEYS[1] meta, ARGV a place to begin at, about how many entries and buckets to look at.
-- Answers {bucket bits, the place to go on from or nil, numbers of buckets, their fields and values}.
--
-- No race: a listing is weakly consistent. A script because thousands of buckets are as many calls.
-- Reads only.
local bits = bits_of()
if not bits then return {'0', false, {}, {}} end

local bucket, cursor = place_of(ARGV[1])
local patience, buckets = tonumber(ARGV[2]), 2 ^ bits
local numbers, pages, looked = {}, {}, 0
while bucket < buckets and looked < patience do
  local number, _, flat = bucket, nil, nil
  _, flat, bucket, cursor = page(bucket, cursor)
  looked = looked + 1 + #flat / 2
  if #flat > 0 then
    numbers[#numbers + 1] = number
    pages[#pages + 1] = flat
  end
end
return {bits, bucket < buckets and place(bucket, cursor), numbers, pages}
