-- Shared by entries.lua, sweep.lua and erase.lua: a way through all buckets in short steps.
--
-- A place is "<bucket>" or "<bucket>:<cursor of HSCAN>". A large bucket is not gone through at once: a namespace may
-- have been made for less than it holds, and in SQLite it has one bucket.
local PAGE = 256

local function place_of(text)
  local bucket, cursor = string.match(text, '^(%d+):?(%d*)$')
  return tonumber(bucket or 0), cursor and cursor ~= '' and #cursor < 20 and cursor or '0'
end

-- bits_of(): of a bucket's number; nil if the namespace is unknown.
local function bits_of()
  local text = redis.call('HGET', meta, 'bucket_bits')
  if not text then return end
  local bits = tonumber(text)
  if not bits or bits < 0 or bits > MOST_BITS or bits % 1 > 0 then error('DAMAGED bucket_bits', 0) end
  return bits
end

-- page(bucket, cursor): about PAGE fields and values in turn, and the place after them; and true if the key is
-- of another type, and so has none.
local function page(bucket, cursor)
  local key = prefix .. 'b:' .. string.format('%x', bucket)
  local reply = redis.pcall('HSCAN', key, cursor, 'COUNT', PAGE)
  if reply.err then return key, {}, bucket + 1, '0', true end
  if reply[1] == '0' then return key, reply[2], bucket + 1, '0' end
  return key, reply[2], bucket, reply[1]
end

local function place(bucket, cursor)
  return string.format('%d', bucket) .. (cursor == '0' and '' or ':' .. cursor)
end
