-- Shared by the scripts that must know of invalidated segments: `old:<n>` for n from `drained` up to, not
-- including, `epoch`; some of them may not exist.
--
-- An epoch that nobody has counted must not keep Redis busy with generations that never were.
local MOST_GENERATIONS = 10000

local function generations()
  local fields = redis.call('HMGET', meta, 'drained', 'epoch')
  local first, last = tonumber(fields[1] or 0), tonumber(fields[2] or 0)
  if not first or not last or last - first > MOST_GENERATIONS then error('DAMAGED drained or epoch', 0) end
  return first, last - 1
end

-- generation_of(segment): the key of the generation that holds it, or nil.
local function generation_of(segment)
  local first, last = generations()
  for n = first, last do
    local old = prefix .. 'old:' .. n
    if redis.call('HEXISTS', old, segment) == 1 then return old end
  end
end
