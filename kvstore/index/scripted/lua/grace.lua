-- Shared by what puts segments into the trash.
--
-- Race closed: a process that evicts computes the time of deletion before it calls. Then it may be stopped, or
-- its command may wait in a server that hangs, and meanwhile another process gets a match. So the grace time
-- begins here, when the segment becomes invisible, by the clock of this server.

-- deletion(text): the unix second of the payloads' deletion, from "<wanted>:<grace>" in seconds: when the grace
-- time is over, unless 0 is wanted: at once, or nobody has said how long that is.
local function deletion(text)
  local wanted, grace = string.match(text, '^(%d+):(%d+)$')
  wanted, grace = tonumber(wanted), tonumber(grace)
  if wanted == 0 or grace == 0 then return wanted end
  -- TIME's seconds are rounded down.
  return tonumber(redis.call('TIME')[1]) + 1 + grace
end
