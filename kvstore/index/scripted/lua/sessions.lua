-- Shared by session.lua and commit.lua: records of sessions. (Needs score.lua and retention.lua.) What they mean
-- stands in kvstore/index/sessions.py, and the schema in kvstore/index/scripted/index.py.
--
-- A record is a word with the unix minute of the last use * 8 + 4 if it has ended + its priority, a word with the
-- unix second until which it retains, or 0, and the segments that are its own, each once, as they were saved. It is in
-- the hash of the window in which the session was used last; `meta` has that window's number in `window`. When it
-- changes, the hash of the one before last goes as a whole.
local ENDED_MINUTE, LOW_MINUTES, HIGH_S, LONGEST_RETAINED_S = 1, 60, 3600, 86400
local UNUSED_MINUTES = 0.5
local WINDOW_S, MOST_SESSIONS, MOST_SEGMENTS = 86400, 2 ^ 20, 1024
local LOW, NORMAL, HIGH = 0, 1, 2
-- A shard has its part: a hint makes a record in each of them, whose number stands in the shard's name.
MOST_SESSIONS = math.floor(MOST_SESSIONS / (tonumber(string.match(meta, '^kvs:{%x+%.(%d+)%.') or nil) or 1))
local RECORD, RECORD_BYTES, ENDED = '>I4I4', 8, 4

-- windows(now): the hash of this window, and of the one before.
local function windows(now)
  local this = math.floor(now / WINDOW_S)
  local known = tonumber(redis.call('HGET', meta, 'window') or nil)
  -- A clock that was set back begins no window; one that no clock has told does not last.
  if not known or known < this or known > this + 1 then
    local old = sessions[(this + 1) % 2 + 1]
    redis.call('UNLINK', sessions[this % 2 + 1])
    if known ~= this - 1 then redis.call('UNLINK', old) end
    redis.call('HSET', meta, 'window', this)
    known = this
  end
  return sessions[known % 2 + 1], sessions[(known + 1) % 2 + 1]
end

-- recall(session, now): its record, a new one if there is none; one that nobody can read is none.
local function recall(session, now)
  local this, before = windows(now)
  local record = {this = this, before = before, used = 0, ends = 0, priority = NORMAL, ended = false, own = {}}
  for _, hash in ipairs({this, before}) do
    local value = redis.call('HGET', hash, session)
    if value and #value >= RECORD_BYTES and (#value - RECORD_BYTES) % 8 == 0 then
      local head
      head, record.ends = struct.unpack(RECORD, value)
      record.used = math.floor(head / 8)
      record.priority, record.ended = math.min(head % 4, HIGH), head % 8 >= ENDED
      record.own = items(string.sub(value, RECORD_BYTES + 1), 8)
      record.hash = hash
      break
    end
  end
  if record.ends <= now then record.ends = 0 end
  return record
end

-- make_room(record): forget a session for a new one, if there are too many: of some that chance draws the one
-- that was used longest ago.
local function make_room(record)
  if redis.call('HLEN', record.this) + redis.call('HLEN', record.before) < MOST_SESSIONS then return end
  local from = redis.call('EXISTS', record.before) == 1 and record.before or record.this
  local some, oldest, least = redis.call('HRANDFIELD', from, 8, 'WITHVALUES'), nil, math.huge
  for i = 1, #some, 2 do
    local used = #some[i + 1] >= RECORD_BYTES and struct.unpack('>I4', some[i + 1]) or 0
    if used < least then oldest, least = some[i], used end
  end
  redis.call('HDEL', from, oldest)
end

-- remember(session, record): write it, unless there is nothing to remember: then there is none any more.
local function remember(session, record)
  local plain = record.ends == 0 and record.priority == NORMAL and not record.ended and #record.own == 0
  if plain then
    if record.hash then redis.call('HDEL', record.hash, session) end
    return
  end
  if #record.own > MOST_SEGMENTS then
    local own = {}
    for i, one in ipairs(redis.call('HMGET', owner, unpack(record.own))) do
      if one == session then own[#own + 1] = record.own[i] end
    end
    local excess = math.max(0, #own - MOST_SEGMENTS)
    for i = 1, excess do redis.call('HDEL', owner, own[i]) end
    record.own = {unpack(own, excess + 1)}
  end
  if not record.hash then make_room(record) end
  local head = record.used * 8 + record.priority + (record.ended and ENDED or 0)
  local value = struct.pack(RECORD, math.min(head, 2 ^ 32 - 1), record.ends) .. table.concat(record.own)
  redis.call('HSET', record.this, session, value)
  if record.hash == record.before then redis.call('HDEL', record.before, session) end
end

-- held_by(session, own): bytes that are retained of those segments that are its own.
local function held_by(session, own)
  local nbytes = 0
  if #own == 0 or redis.call('EXISTS', kept) == 0 then return nbytes end
  local owners, values = redis.call('HMGET', owner, unpack(own)), redis.call('HMGET', segs, unpack(own))
  for i, ends in ipairs(redis.call('ZMSCORE', kept, unpack(own))) do
    if ends and values[i] and owners[i] == session then nbytes = nbytes + account(values[i]) end
  end
  return nbytes
end

-- retain(session, own, some, ends, is_own, most, most_of_salt, most_of_session): visible segments that aren't pinned
-- are retained until then, as long as the bytes allow it; what comes after one that was refused is refused as well.
-- What is retained already and is not its own is so for as long as it was, if that is longer; and if more is retained
-- than the bytes allow, it is so for no longer than it was. A session holds what is retained of its own, and what this
-- call adds. Returns bytes retained and bytes refused.
local function retain(session, own, some, ends, is_own, most, most_of_salt, most_of_session)
  local nbytes, refused = 0, 0
  if #some == 0 then return nbytes, refused end
  local mine = held_by(session, own)
  local values, places = redis.call('HMGET', segs, unpack(some)), redis.call('ZMSCORE', lru, unpack(some))
  local olds, sums, added = redis.call('ZMSCORE', kept, unpack(some)), {}, {[''] = 0}
  local function sum_of(salt)
    if not sums[salt] then sums[salt] = tonumber(redis.call('HGET', retained, salt) or 0) or 0 end
    return sums[salt] + (added[salt] or 0)
  end
  local keeping, placing = {}, {}
  for i, value in ipairs(values) do
    local placed = tonumber(places[i] or nil)
    if value and placed then
      local size, _, rest = account(value)
      local salt, old, upto = salt_of(value, rest), tonumber(olds[i] or nil), ends
      local used, less = use_of(placed)
      local more, full = old and 0 or size, refused > 0 and not old
      full = full or sum_of('') + more > most or salt ~= '' and sum_of(salt) + more > most_of_salt
      full = full or mine + more > most_of_session
      if old then
        local counted_as = used
        upto, used = ends_of(old)
        full = full and ends > upto
        if counted_as > math.floor(upto / 60) then used = counted_as end
        if ends > upto or is_own[some[i]] then upto = ends end
      elseif not full then
        added[''], mine = added[''] + size, mine + size
        if salt ~= '' then added[salt] = (added[salt] or 0) + size end
      end
      if full then
        refused = refused + size
      else
        nbytes = nbytes + size
        keeping[#keeping + 1] = retention(upto, used)
        keeping[#keeping + 1] = some[i]
        placing[#placing + 1] = string.format('%.17g', math.max(math.floor(upto / 60), used) - less)
        placing[#placing + 1] = some[i]
      end
    end
  end
  if #keeping > 0 then
    redis.call('ZADD', kept, unpack(keeping))
    redis.call('ZADD', lru, unpack(placing))
    if added[''] > 0 then held_back(added) end
  end
  return nbytes, refused
end

-- retained_until(record, now): until when a use retains; 0 if it doesn't.
local function retained_until(record, now)
  return math.max(record.ends, record.priority == HIGH and now + HIGH_S or 0)
end

-- demote(own): segments that nobody else uses go first from now on. Returns how many did not before.
local function demote(own)
  local changes = {}
  if #own == 0 then return 0 end
  for i, text in ipairs(redis.call('ZMSCORE', lru, unpack(own))) do
    local used, less = use_of(tonumber(text or nil) or 0)
    if text and used ~= ENDED_MINUTE then
      changes[#changes + 1] = string.format('%.17g', ENDED_MINUTE - less)
      changes[#changes + 1] = own[i]
    end
  end
  if #changes > 0 then redis.call('ZADD', lru, unpack(changes)) end
  return #changes / 2
end

-- adopt(session, segment, minute, most, most_of_salt, most_of_session): a request of the session has saved the segment, which is
-- visible and in `lru` as used in that minute, UNUSED_MINUTES before it was saved; it counts as the session's others do.
local function adopt(session, segment, minute, most, most_of_salt, most_of_session)
  local now = expire_retained()
  local record = recall(session, now)
  local ends = retained_until(record, now)
  redis.call('HSET', owner, segment, session)
  -- One that went and is committed again is listed still.
  local own = {}
  for _, one in ipairs(record.own) do
    if one ~= segment then own[#own + 1] = one end
  end
  own[#own + 1] = segment
  record.own = own
  if record.ended then
    demote({segment})
  elseif record.priority == LOW then
    local _, less = use_of(tonumber(redis.call('ZSCORE', lru, segment)))
    redis.call('ZADD', lru, string.format('%.17g', math.max(0, minute - LOW_MINUTES) - less), segment)
  elseif ends > 0 then
    retain(session, own, {segment}, ends, {[segment] = true}, most, most_of_salt, most_of_session)
  end
  record.used = math.max(record.used, math.floor(minute + UNUSED_MINUTES))
  remember(session, record)
end
