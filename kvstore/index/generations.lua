-- Shared by the scripts that must know of invalidated segments: `old:<n>` for n from `drained` up to, not
-- including, `epoch`; some of them may not exist.
local function generations()
  local fields = redis.call('HMGET', meta, 'drained', 'epoch')
  return tonumber(fields[1] or 0), tonumber(fields[2] or 0) - 1
end

-- generation_of(segment): the key of the generation that holds it, or nil.
local function generation_of(segment)
  local first, last = generations()
  for n = first, last do
    local old = prefix .. 'old:' .. n
    if redis.call('HEXISTS', old, segment) == 1 then return old end
  end
end
