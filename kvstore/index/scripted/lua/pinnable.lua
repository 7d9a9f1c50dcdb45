-- Shared by pin.lua and unpin.lua: which of the packed segments of ARGV[1] are visible and have their last use
-- in `from`; together with it, as ZADD takes them; and their bytes.
--
-- Races closed: what several callers move at once is counted together; and an eviction that comes between
-- the look and the move would leave a last use without a segment.
local function placed(from)
  local segments = items(ARGV[1], 8)
  local chosen, moved, nbytes, known = {}, {}, 0, {}
  if #segments == 0 then return chosen, moved, nbytes end
  local values = redis.call('HMGET', segs, unpack(segments))
  local scores = redis.call('ZMSCORE', from, unpack(segments))
  for i, segment in ipairs(segments) do
    if values[i] and scores[i] and not known[segment] then
      known[segment] = true
      nbytes = nbytes + account(values[i])
      chosen[#chosen + 1] = segment
      moved[#moved + 1] = scores[i]
      moved[#moved + 1] = segment
    end
  end
  return chosen, moved, nbytes
end
