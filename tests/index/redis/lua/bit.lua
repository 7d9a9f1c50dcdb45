-- The part of Redis' bit library that the scripts use, for fakeredis, which has none.
local function each(a, b, joined)
  local result, value = 0, 1
  a, b = a % 2 ^ 32, b % 2 ^ 32
  for _ = 1, 32 do
    if joined(a % 2, b % 2) then result = result + value end
    a, b, value = math.floor(a / 2), math.floor(b / 2), value * 2
  end
  return result >= 2 ^ 31 and result - 2 ^ 32 or result
end

return {
  band = function(a, b) return each(a, b, function(x, y) return x + y == 2 end) end,
  bor = function(a, b) return each(a, b, function(x, y) return x + y > 0 end) end,
  tobit = function(a) return each(a, 0, function(x) return x == 1 end) end,
}
