-- touch: KEYS[1] meta, ARGV packed segments, an earlier unix minute than now or '', 1 if the first of them is where a load begins, at
-- how many of those that are watched the less used are forgotten, how many are kept then.
--
-- Race closed: an eviction between looking and writing would be undone by a blind ZADD, which would
-- leave a last use without a segment; and a late touch must not set a newer one back. What a score holds
-- besides the last use is kept.
--
-- A segment that is retained counts as used in a later minute already; its true last use is set in `kept`. It is
-- a use by nobody's session, so no session owns the segments any more.
--
-- The segments where loads begin are counted once a minute in `hot`.
local minute, begins = minute_of(ARGV[2], redis.call('TIME')[1]), ARGV[3] == '1'
local segments = items(ARGV[1], 8)

local function touch(where)
  for first = 1, #segments, PIECE do
    local upto = math.min(first + PIECE - 1, #segments)
    local changes = {}
    for i, text in ipairs(redis.call('ZMSCORE', where, unpack(segments, first, upto))) do
      local score = tonumber(text or nil)
      local used, less = minute, 0
      if score then used, less = use_of(score) end
      if used < minute then
        local at = first + i - 1
        changes[#changes + 1] = string.format('%.17g', minute - less)
        changes[#changes + 1] = segments[at]
        if begins and at == 1 and used < math.floor(minute) then redis.call('ZINCRBY', hot, 1, segments[at]) end
      end
    end
    if #changes > 0 then redis.call('ZADD', where, unpack(changes)) end
  end
end

touch(lru)
if redis.call('EXISTS', pins) == 1 then touch(pins) end
used_while_retained(segments, minute)
if redis.call('EXISTS', owner) == 1 then
  for first = 1, #segments, PIECE do
    redis.call('HDEL', owner, unpack(segments, first, math.min(first + PIECE - 1, #segments)))
  end
end
if redis.call('ZCARD', hot) > tonumber(ARGV[4]) then
  redis.call('ZREMRANGEBYRANK', hot, 0, -1 - tonumber(ARGV[5]))
end
return 0
