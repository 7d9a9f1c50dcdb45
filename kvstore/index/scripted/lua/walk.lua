-- Shared by match.lua and claim.lua: which leading blocks of a hash chain are stored, in one look-up per segment.
-- (Needs age.lua.)
--
-- The digests form a hash chain, so equal digests mean equal prefixes. An entry (segment S, slot s) found for block j
-- therefore proves that slots 0..s of S are blocks j-s..j of this very chain, whatever the entries of those blocks say
-- by now. So the walk looks at the block where it expects a segment to end, takes everything that this one entry
-- proves, and continues backwards over what is left in between:
--
--     served ....|begin                        goal|        end (first block known to be missing)
--                         <-------- S, slot s -----|   proves j-s..j
--                <--- T, slot t ---|                   next look-up, at j-s-1
--
-- Only when it meets a missing block does it look more closely: first at `begin`, which settles the common case (nothing
-- more is stored) at once, then by bisection. No block is looked up twice, so a call costs at most one look-up per
-- block, and about one per segment where the chain is stored in runs.
--
-- A block is present here if its own entry exists and names a visible segment. The walk promises
-- (tests/index/test_walk.py):
--
--     - every block it returns is in the visible segment and slot that it names;
--     - it returns at least the longest prefix of present blocks;
--     - it may return more: blocks whose own entries were overwritten by a copy that was evicted since, or are
--       missing, but that another entry proves to be in a visible segment.
--
-- Race closed: the look-ups and the records they lead to are one atomic step, so no eviction or
-- commit falls between them, and a match is exact at one moment.
--
-- The walk first takes every entry's segment to be alive and fetches the records at the end, all in
-- one HMGET: one call per segment, and one more. Where a record is missing (its segment was evicted
-- and the entries aren't swept yet) what precedes it stands, and the walk goes on from there with
-- every segment checked.

-- Most runs of one answer (kvstore.index.port.MOST_RUNS): each costs 4 to 10 us of the server's only thread.
local MOST_RUNS = 4096

-- Runs as three lists in step, since a table per run would cost as much as a look-up.
local run_segment, run_slot, run_count = {}, {}, {}

local function append_run(segment, slot, count)
  local n = #run_segment
  if run_segment[n] == segment and run_slot[n] + run_count[n] == slot then
    run_count[n] = run_count[n] + count
  else
    n = n + 1
    run_segment[n], run_slot[n], run_count[n] = segment, slot, count
  end
  return run_slot[n] + run_count[n]
end

-- cut_runs(first): forget the runs from number `first` on.
local function cut_runs(first)
  for i = #run_segment, first, -1 do run_segment[i], run_slot[i], run_count[i] = nil, nil, nil end
end

local function served_blocks()
  local blocks = 0
  for _, count in ipairs(run_count) do blocks = blocks + count end
  return blocks
end

-- walk(digests, begin, locate, alive): append a run for every stretch of servable blocks from `begin`
-- on. `alive` is a function of a segment, or nil to believe every entry.
local function walk(digests, begin, locate, alive)
  -- A bucket of another type has no entries: its error is a table of length 0.
  local call, byte, sub, min = redis.pcall, string.byte, string.sub, math.min
  local finish = #digests / 16
  -- Of the segments whose end is known, the last one has `last` slots.
  local ended, expected, last = 0, 64, 64
  local segments, slots, counts = {}, {}, {}

  local function serve(goal)
    local position, n = goal, 0
    while position >= begin do
      local entry = call('HGET', locate(digests, position))
      local segment = entry and #entry == 10 and sub(entry, 1, 8)
      if not segment or alive and not alive(segment) then
        finish = position
        return false
      end
      local high, low = byte(entry, 9, 10)
      local slot = high * 256 + low
      local count = min(slot, position - begin) + 1
      n = n + 1
      segments[n], slots[n], counts[n] = segment, slot - count + 1, count
      position = position - count
    end
    for i = n, 1, -1 do
      ended = append_run(segments[i], slots[i], counts[i])
      if i > 1 then expected, last = math.max(ended, last), ended end
      if ended > expected then expected = ended end
    end
    begin = goal + 1
    if #run_segment >= MOST_RUNS then finish = begin end
    return true
  end

  while begin < finish do
    local rest = ended < expected and expected - ended or expected
    if not serve(min(begin + rest, finish) - 1) then
      if begin == finish or not serve(begin) then return end
      while begin < finish do serve(math.floor((begin + finish) / 2)) end
    end
  end
end

-- servable(digests, bits): find the runs of the longest servable prefix. Returns the values of their
-- segments, in step with the runs, and how many blocks they serve.
local function servable(digests, bits)
  local values, known, locate = {}, {}, locator(bits)
  local function alive(segment)
    if known[segment] == nil then known[segment] = young(redis.call('HGET', segs, segment)) and true or false end
    return known[segment]
  end
  walk(digests, 0, locate)
  cut_runs(MOST_RUNS + 1)
  while #values < #run_segment do
    local first = #values + 1
    local upto = math.min(first + PIECE - 1, #run_segment)
    for i, value in ipairs(redis.call('HMGET', segs, unpack(run_segment, first, upto))) do
      value = young(value)
      known[run_segment[first + i - 1]] = value and true
      values[first + i - 1] = value
    end
    for i = first, upto do
      if not values[i] then
        cut_runs(i)
        for dead = upto, i, -1 do values[dead] = nil end
        walk(digests, served_blocks(), locate, alive)
        cut_runs(MOST_RUNS + 1)
        break
      end
    end
  end
  return values, served_blocks()
end
