-- Shared by what puts segments into the trash.
--
-- Race closed: who evicts reckons a deletion's time before it calls, and may be stopped on its way, or its
-- command may wait in a server that hangs; meanwhile somebody is given a match. So the grace time begins
-- here, when the segment goes out of sight, by the clock of this server.

-- deletion(text): the unix second of the payloads' deletion, from "<wanted>:<grace>" in seconds. Not before
-- the grace time is over, unless 0 is wanted: at once.
local function deletion(text)
  local wanted, grace = string.match(text, '^(%d+):(%d+)$')
  wanted, grace = tonumber(wanted), tonumber(grace)
  if wanted == 0 or grace == 0 then return wanted end
  -- TIME's seconds are rounded down.
  return math.max(wanted, tonumber(redis.call('TIME')[1]) + 1 + grace)
end
