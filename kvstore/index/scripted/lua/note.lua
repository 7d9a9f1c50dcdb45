-- note: KEYS[1] meta, ARGV the marks of a chain's blocks (8 bytes each), the masks of its groups (64 bytes
-- each), what follows the prefix in the keys of this window's sketch and of the one before, lines of a
-- sketch, seconds to keep this window's. Answers how many leading blocks were noted before; nil if the
-- namespace is unknown.
--
-- This is kvstore/index/sketch.py in Lua; the argument stands there.
--
-- Race closed: looking and marking are one step. Of two engines that get a new prompt at the same moment
-- exactly one is told that nobody had it before, and no mark is lost between a line's reading and writing.
--
-- The first write is one that Redis refuses when it is full (SETRANGE, BITFIELD): then nothing has been
-- written. After a first write a script always runs to its end.
local call, byte, floor, unpacked = redis.call, string.byte, math.floor, struct.unpack
if call('HEXISTS', meta, 'bucket_bits') == 0 then return false end

local marks, masks, lines, keep = ARGV[1], ARGV[2], tonumber(ARGV[5]), ARGV[6]
local now, before = prefix .. ARGV[3], prefix .. ARGV[4]
local exists = {[now] = call('EXISTS', now) == 1, [before] = call('EXISTS', before) == 1}
local EMPTY, WORDS, WITNESSES = string.rep('\0', 64), '>' .. string.rep('I4', 16), 4

local function read(sketch, line)
  return exists[sketch] and call('GETRANGE', sketch, line * 64, line * 64 + 63) or EMPTY
end

-- covers(line, mask): whether the line has every bit of the mask.
local function covers(line, mask)
  if line == mask then return true end
  if line == EMPTY then return false end
  local have, want = {unpacked(WORDS, line)}, {unpacked(WORDS, mask)}
  for i = 1, 16 do
    if bit.band(have[i], want[i]) ~= bit.tobit(want[i]) then return false end
  end
  return true
end

local function union(line, mask)
  if line == EMPTY then return mask end
  local have, more = {unpacked(WORDS, line)}, {unpacked(WORDS, mask)}
  for i = 1, 16 do have[i] = bit.bor(have[i], more[i]) end
  return struct.pack(WORDS, unpack(have, 1, 16))
end

-- marked(line, block): whether the line has the three bits of the block's mark.
local function marked(line, block)
  local bits = unpacked('>I4', marks, block * 8 + 5)
  for _ = 1, 3 do
    local at = bits % 512
    if floor(byte(line, floor(at / 8) + 1) / 2 ^ (7 - at % 8)) % 2 == 0 then return false end
    bits = floor(bits / 512)
  end
  return true
end

-- in_own_lines(sketch, first, upto, verb, value): BITFIELD's answers, three per block, about the marks of
-- blocks first to upto - 1 in the lines that are theirs alone.
local function in_own_lines(sketch, first, upto, verb, value)
  local words, n = {}, 0
  for block = first, upto - 1 do
    local line, bits = unpacked('>I4I4', marks, block * 8 + 1)
    for _ = 1, 3 do
      words[n + 1], words[n + 2], words[n + 3] = verb, 'u1', line % lines * 512 + bits % 512
      words[n + 4] = value
      n = n + (value and 4 or 3)
      bits = floor(bits / 512)
    end
  end
  return call('BITFIELD', sketch, unpack(words, 1, n))
end

-- first_lacking(sketch, line, first, upto): the first of these blocks that has its mark neither in `line`
-- nor in its own; upto if there is none.
local function first_lacking(sketch, line, first, upto)
  local set = in_own_lines(sketch, first, upto, 'GET')
  for block = first, upto - 1 do
    local at = 3 * (block - first)
    if set[at + 1] + set[at + 2] + set[at + 3] < 3 and not marked(line, block) then return block end
  end
  return upto
end

-- reach(sketch, line, mask, first, upto): up to which block the sketch has the group first..upto - 1.
local function reach(sketch, line, mask, first, upto)
  if covers(line, mask) then return upto end
  if line == EMPTY or not marked(line, first) then return first end
  if first_lacking(sketch, line, math.max(first, upto - WITNESSES), upto) == upto then return upto end
  return first_lacking(sketch, line, first, upto)
end

local blocks, noted, leading = #marks / 8, 0, true
for first = 0, blocks - 1, 32 do
  local upto = math.min(first + 32, blocks)
  local home = unpacked('>I4', marks, first * 8 + 1) % lines
  local mask = string.sub(masks, first * 2 + 1, first * 2 + 64)
  local line = read(now, home)
  local have = reach(now, line, mask, first, upto)
  if leading then
    noted = have
    if noted < upto then noted = math.max(noted, reach(before, read(before, home), mask, first, upto)) end
    leading = noted == upto
  end
  if have < upto and not exists[now] then
    -- Whole at once: a string that grows takes up to twice its size.
    call('SETRANGE', now, lines * 64 - 1, '\0')
    call('EXPIRE', now, keep)
    exists[now] = true
  end
  if have == first then
    call('SETRANGE', now, home * 64, union(line, mask))
  elseif have < upto then
    in_own_lines(now, have, upto, 'SET', 1)
  end
end
return noted
