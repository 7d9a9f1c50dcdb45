-- Shared by entries.lua and sweep.lua: a way through all buckets in short steps.
--
-- A place is "<bucket>" or "<bucket>:<cursor of HSCAN>": a bucket that has outgrown its encoding, as those
-- of a namespace that was made for less, is not gone through at once.
local function place_of(text)
  local bucket, cursor = string.match(text, '^(%d+):?(%d*)$')
  return tonumber(bucket or 0), cursor and cursor ~= '' and cursor or '0'
end

-- page(bucket, cursor, patience): fields and values in turn, and the place after them.
local function page(bucket, cursor, patience)
  local key = prefix .. 'b:' .. string.format('%x', bucket)
  local reply = redis.call('HSCAN', key, cursor, 'COUNT', patience)
  if reply[1] == '0' then return key, reply[2], bucket + 1, '0' end
  return key, reply[2], bucket, reply[1]
end

local function place(bucket, cursor)
  return string.format('%d', bucket) .. (cursor == '0' and '' or ':' .. cursor)
end
