-- The part of Redis' struct library that the scripts use, for fakeredis: big-endian words, `>I4I4...`.
local function count(format)
  local _, words = string.gsub(format, 'I4', '')
  assert(format == '>' .. string.rep('I4', words), 'not in this stand-in: ' .. format)
  return words
end

return {
  unpack = function(format, bytes, position)
    local values, at = {}, position or 1
    for i = 1, count(format) do
      local a, b, c, d = string.byte(bytes, at, at + 3)
      values[i], at = ((a * 256 + b) * 256 + c) * 256 + d, at + 4
    end
    return unpack(values)
  end,
  pack = function(format, ...)
    local words = {}
    for i = 1, count(format) do
      local value, bytes = select(i, ...) % 2 ^ 32, {}
      for k = 4, 1, -1 do
        bytes[k], value = string.char(value % 256), math.floor(value / 256)
      end
      words[i] = table.concat(bytes)
    end
    return table.concat(words)
  end,
}
