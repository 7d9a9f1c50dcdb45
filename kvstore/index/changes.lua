-- Shared by the scripts that change what is visible: the accounts and the stream of events.
--
-- Neither is ever a script's first write: what that is decides whether a full Redis lets it run.

-- usage_changed(nbytes, segments, blocks, cost, pinned): add to the accounts. `changes` counts that they
-- changed at all, so that whoever counts sees it also where sums come out even.
local function usage_changed(nbytes, segments, blocks, cost, pinned)
  local function add(field, amount)
    if amount ~= 0 then redis.call('HINCRBY', meta, field, string.format('%.0f', amount)) end
  end
  add('bytes', nbytes)
  add('segments', segments)
  add('blocks', blocks)
  add('cost', cost)
  add('pinned', pinned)
  add('changes', 1)
end

-- event(most, op, segment, first, last, depth, slots, nbytes, rule): the ring keeps about `most`. Every
-- entry has the same fields in the same order: Redis then stores their names once per node.
local function event(most, op, segment, first, last, depth, slots, nbytes, rule)
  if most == 0 then return end
  -- A stream that can't be written (a key of another type, a right that is missing) must not cut a change off
  -- in its middle: nothing depends on the journal being complete.
  redis.pcall('XADD', prefix .. 'events', 'MAXLEN', '~', most, '*', 'op', op, 'segment', segment,
    'first', first, 'last', last, 'depth', depth, 'slots', slots,
    'bytes', string.format('%.0f', nbytes), 'rule', rule)
end
