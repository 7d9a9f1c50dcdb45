-- session: KEYS[1] meta, ARGV session, packed segments that its request uses, heads first, an earlier unix minute than
-- now or '', 1 if the
-- first of them is where a load begins, 1 if the session ends, '' or for how many seconds from now it retains (0 for
-- no longer), '' or its priority (0 to 2), bytes that may be retained in all, under one salt, and of a session's own, at
-- how many of those that are watched in `hot` the less used are forgotten, how many are kept then.
-- Answers {0 live, 1 retained, 2 ended; how many segments are its own; how many of these moved to the front; bytes
-- retained, bytes refused}; nil if the namespace is unknown.
--
-- Races closed: those of touch.lua; two sessions that use a segment for the first time in the same moment would both
-- take it for their own; and what is retained and the sums that bound it are one step.
if redis.call('HEXISTS', meta, 'bucket_bits') == 0 then return false end

local session, segments, begins = ARGV[1], items(ARGV[2], 8), ARGV[4] == '1'
local now = expire_retained()
local minute = minute_of(ARGV[3], now)
local record = recall(session, now)
if ARGV[6] ~= '' then
  local seconds = math.min(tonumber(ARGV[6]), LONGEST_RETAINED_S)
  record.ends = seconds > 0 and now + seconds or 0
end
if ARGV[7] ~= '' then record.priority = tonumber(ARGV[7]) end
record.ended = ARGV[5] == '1'
if record.ended then record.ends = 0 end

local listed, passed, is_own, own = {}, {}, {}, {}
for _, segment in ipairs(record.own) do listed[segment] = true end
for _, segment in ipairs(segments) do passed[segment] = true end
if ARGV[6] ~= '' then
  -- What is told of all that it uses is told of its own as well.
  for _, segment in ipairs(record.own) do
    if not passed[segment] then segments[#segments + 1] = segment end
  end
end

-- use(where): touch what is there of the segments.
local function use(where)
  local changes = {}
  for i, text in ipairs(redis.call('ZMSCORE', where, unpack(segments))) do
    local score, segment = tonumber(text or nil), segments[i]
    if score then
      local used, less = use_of(score)
      local counts = minute
      if is_own[segment] then
        if record.priority == LOW then counts = math.max(0, minute - LOW_MINUTES) end
        if not listed[segment] then
          listed[segment] = true
          record.own[#record.own + 1] = segment
        end
      end
      if used < counts then
        changes[#changes + 1] = string.format('%.17g', counts - less)
        changes[#changes + 1] = segment
      end
      if begins and i == 1 and used < math.floor(counts) then redis.call('ZINCRBY', hot, 1, segment) end
    end
  end
  if #changes > 0 then redis.call('ZADD', where, unpack(changes)) end
end

if #segments > 0 then
  local others = {}
  for i, one in ipairs(redis.call('HMGET', owner, unpack(segments))) do
    is_own[segments[i]] = one == session
    if one and one ~= session and passed[segments[i]] then others[#others + 1] = segments[i] end
  end
  if #others > 0 then redis.call('HDEL', owner, unpack(others)) end
  use(lru)
  if redis.call('EXISTS', pins) == 1 then use(pins) end
  used_while_retained(segments, minute)
  if redis.call('ZCARD', hot) > tonumber(ARGV[11]) then
    redis.call('ZREMRANGEBYRANK', hot, 0, -1 - tonumber(ARGV[12]))
  end
end
if #record.own > 0 then
  for i, one in ipairs(redis.call('HMGET', owner, unpack(record.own))) do
    if one == session then own[#own + 1] = record.own[i] end
  end
  record.own = own
end

local demoted, nbytes, refused, ends = 0, 0, 0, retained_until(record, now)
if record.ended then
  restore_kept(own)
  demoted = demote(own)
elseif ends > 0 then
  nbytes, refused = retain(session, record.own, segments, ends, is_own, tonumber(ARGV[8]), tonumber(ARGV[9]),
    tonumber(ARGV[10]))
elseif ARGV[6] ~= '' then
  restore_kept(own)
end
record.used = math.max(record.used, math.floor(minute))
remember(session, record)
return {record.ended and 2 or record.ends > 0 and 1 or 0, #own, demoted, string.format('%.0f', nbytes),
  string.format('%.0f', refused)}
