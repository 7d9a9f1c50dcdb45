-- Shared by the scripts that change what is visible: the accounts and the stream of events.
--
-- Neither is ever a script's first write, which decides whether a full Redis lets the script run.

-- usage_changed(nbytes, segments, blocks, cost, pinned): add to the accounts. `changes` counts every change,
-- so that `reconcile` notices one also if the sums come out even.
local function usage_changed(nbytes, segments, blocks, cost, pinned)
  local function add(field, amount)
    if amount ~= 0 then counted(field, amount) end
  end
  add('bytes', nbytes)
  add('segments', segments)
  add('blocks', blocks)
  add('cost', cost)
  add('pinned', pinned)
  add('changes', 1)
end

-- event(most, op, segment, first, last, depth, slots, nbytes, rule, fate, session): the ring keeps about `most`. Every
-- entry has the same fields in the same order: Redis then stores their names once per node. Only what somebody
-- did by name, as the last argument of the script says, has `by` besides, and only what has a fate (fate.lua) has
-- that, and whose own it was.
local by = ARGV[#ARGV]
local function event(most, op, segment, first, last, depth, slots, nbytes, rule, fate, session)
  if most == 0 then return end
  -- A stream that can't be written (a key of another type, a right that is missing) must not cut a change off
  -- in its middle: nothing depends on the journal being complete.
  local fields = {'op', op, 'segment', segment, 'first', first, 'last', last, 'depth', depth, 'slots', slots,
    'bytes', string.format('%.0f', nbytes), 'rule', rule}
  local function also(name, value)
    fields[#fields + 1], fields[#fields + 2] = name, value
  end
  if by ~= '' then also('by', by) end
  if fate and fate ~= '' then
    also('fate', fate)
    also('session', session)
  end
  redis.pcall('XADD', prefix .. 'events', 'MAXLEN', '~', most, '*', unpack(fields))
end
