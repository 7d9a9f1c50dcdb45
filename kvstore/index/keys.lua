-- Shared by every script: where things are. KEYS[1] is always the namespace's meta key; the other
-- keys of the namespace carry the same hash tag, so a Cluster keeps all of them on one node.
local meta = KEYS[1]
local prefix = string.sub(meta, 1, -5)
local segs, lru, pins, trash = prefix .. 'segs', prefix .. 'lru', prefix .. 'pins', prefix .. 'trash'
local hot, parts, ghosts = prefix .. 'hot', prefix .. 'parts', prefix .. 'ghosts'

-- Redis allows some 8000 values on Lua's stack: longer lists are passed on in pieces of this size.
local PIECE = 1000

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
  if not rest then return 0, 0, #value + 1 end
  return tonumber(nbytes), tonumber(slots), rest
end

-- An agreement that begins at `at`: the first digest (16 bytes), a checksum (8), the record's head (24).
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

local function depth_of(text, at) return word_of(text, at + 36) end
