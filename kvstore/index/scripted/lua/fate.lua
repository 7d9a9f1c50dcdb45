-- Shared by evict.lua and cull.lua: what was told of a segment that a quota evicts, for the journal. (Needs score.lua
-- and retention.lua. How a session's record begins stands in sessions.lua.)
local known = redis.call('EXISTS', owner, kept) > 0
local now, told_of = known and tonumber(redis.call('TIME')[1]), {}

-- Until when a session was to be retained, 0 if it wasn't: a record is long, so each is read once.
local function told_until(session)
  local told = told_of[session]
  if told then return told end
  told = 0
  for _, hash in ipairs(sessions) do
    -- A key of another type says nothing, and must not cut an eviction off in its middle.
    local record = redis.pcall('HGET', hash, session)
    if type(record) == 'string' and #record >= 8 then
      local _, until_s = struct.unpack('>I4I4', record)
      if until_s > 0 and (told == 0 or until_s < told) then told = until_s end
    end
  end
  told_of[session] = told
  return told
end

-- fate_of(segment): '' or 'ended', 'retained', 'expired' (it was to be retained, and that is over), and the session
-- that alone has used it, if one has. To be asked before the segment is taken out.
local function fate_of(segment)
  if not known then return '', '' end
  local session = redis.call('HGET', owner, segment) or ''
  local ends = tonumber(redis.call('ZSCORE', kept, segment) or nil)
  if ends then return math.floor(ends) > now and 'retained' or 'expired', session end
  if session == '' then return '', '' end
  local score = tonumber(redis.call('ZSCORE', lru, segment) or nil)
  if score and use_of(score) == 1 then return 'ended', session end
  local told = told_until(session)
  if told > 0 and told <= now then return 'expired', session end
  return '', ''
end
