-- Shared by every script: where things are. KEYS[1] is always the namespace's meta key; the other
-- keys of the namespace carry the same hash tag, so a Cluster keeps all of them on one node.
local meta = KEYS[1]
local prefix = string.sub(meta, 1, -5)
local segs, lru, pins, trash = prefix .. 'segs', prefix .. 'lru', prefix .. 'pins', prefix .. 'trash'
local hot, parts, ghosts = prefix .. 'hot', prefix .. 'parts', prefix .. 'ghosts'
local salts, held = prefix .. 'salts', prefix .. 'held'
local owner, kept, retained = prefix .. 'owner', prefix .. 'kept', prefix .. 'retained'
local sessions = {prefix .. 'sessions:0', prefix .. 'sessions:1'}

-- Redis allows some 8000 values on Lua's stack: longer lists are passed on in pieces of this size.
local PIECE = 1000

-- A bucket's number has so many bits at most.
local MOST_BITS = 24

local function hex(bytes)
  return (string.gsub(bytes, '.', function(c) return string.format('%02x', string.byte(c)) end))
end

-- items(packed, width): a packed argument as a list.
local function items(packed, width)
  local list = {}
  for i = 1, #packed / width do list[i] = string.sub(packed, (i - 1) * width + 1, i * width) end
  return list
end

-- locator(bits): a function from (digests, position) to the bucket and the field of one entry. The
-- bucket's number is the digest's first `bits` bits; the field keeps all but their whole bytes.
local function locator(bits)
  local byte, sub, format, floor = string.byte, string.sub, string.format, math.floor
  local skip, unit, bucket = math.floor(bits / 8) + 1, 2 ^ (24 - bits), prefix .. 'b:%x'
  return function(digests, position)
    local at = position * 16
    local a, b, c = byte(digests, at + 1, at + 3)
    return format(bucket, floor((a * 65536 + b * 256 + c) / unit)), sub(digests, at + skip, at + 16)
  end
end

-- account(value): bytes and slots of a segment, and where the rest of its value, the agreement, begins. A
-- value that is damaged says nothing, here and below: it must be possible to count past it and to evict it.
local function account(value)
  local nbytes, slots, rest = string.match(value, '^(%d+):(%d+):()')
  if not rest or #nbytes > 15 or #slots > 5 then return 0, 0, #value + 1 end
  return tonumber(nbytes), tonumber(slots), rest
end

-- counted(field, amount, key): add to a number of meta, or of another key. One that is none stays so, for
-- `replace` to find, and cuts no change off in its middle.
local function counted(field, amount, key)
  local reply = redis.pcall('HINCRBY', key or meta, field, string.format('%.0f', amount))
  local failed = type(reply) == 'table' and reply.err
  if failed and not string.find(failed, 'integer') and not string.find(failed, 'overflow') then
    error(failed, 0)
  end
end

-- An agreement that begins at `at`: the first digest (16 bytes), a checksum (8), the record's head (32), and the
-- id of the salt (16) if it has one.
local function first_of(text, at) return string.sub(text, at, at + 15) end

local function ranks_of(text, at) return math.max(1, string.byte(text, at + 28) or 1) end

local function cost_of(text, at)
  local low, high = string.byte(text, at + 30, at + 31)
  if not high then return 0 end
  local packed = low + high * 256
  return packed % 2048 * 2 ^ math.floor(packed / 2048)
end

local function word_of(text, at)
  local a, b, c, d = string.byte(text, at, at + 3)
  if not d then return 0 end
  return a + b * 256 + c * 65536 + d * 16777216
end

local function created_of(text, at) return word_of(text, at + 32) end

-- dated(agreement, created): the same, but for when it was created.
local function dated(agreement, created)
  local word, left = {}, created
  for i = 1, 4 do word[i], left = left % 256, math.floor(left / 256) end
  return string.sub(agreement, 1, 32) .. string.char(unpack(word)) .. string.sub(agreement, 37)
end

local function depth_of(text, at) return word_of(text, at + 36) end

local function salt_of(text, at)
  local flags = string.byte(text, at + 25)
  return flags and flags % 4 >= 2 and string.sub(text, at + 56, at + 71) or ''
end

local function writer_of(text, at) return string.sub(text, at + 48, at + 55) end

-- unsalted(segment, salt, nbytes): take a segment that is gone off what its salt holds.
local function unsalted(segment, salt, nbytes)
  if salt == '' or redis.call('ZREM', salts, salt .. segment) == 0 then return end
  if tonumber(redis.call('ZINCRBY', held, -nbytes, salt)) <= 0 then redis.call('ZREM', held, salt) end
end

-- released(segment, salt, nbytes): a segment is retained no more. True if it was.
local function released(segment, salt, nbytes)
  if redis.call('ZREM', kept, segment) == 0 then return false end
  if redis.call('EXISTS', kept) == 0 then
    redis.call('DEL', retained)
    return true
  end
  counted('', -nbytes, retained)
  if salt ~= '' then
    counted(salt, -nbytes, retained)
    if redis.call('HGET', retained, salt) == '0' then redis.call('HDEL', retained, salt) end
  end
  return true
end

-- disowned(segment, salt, nbytes): no session has to do with a segment that is gone.
local function disowned(segment, salt, nbytes)
  redis.call('HDEL', owner, segment)
  released(segment, salt, nbytes)
end
