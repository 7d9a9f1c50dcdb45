-- states: KEYS[1] meta, ARGV packed segments.
-- Answers for each 1 visible, 2 incomplete, 3 invalidated, 4 in the trash, 0 unknown.
--
-- Race closed: a segment goes from one state to the next, and looks one after the other could miss it in
-- all of them. Reads only.
local states = {}
for i, segment in ipairs(items(ARGV[1], 8)) do
  if redis.call('HEXISTS', segs, segment) == 1 then
    states[i] = 1
  elseif redis.call('EXISTS', prefix .. 'part:' .. hex(segment)) == 1 then
    states[i] = 2
  elseif generation_of(segment) then
    states[i] = 3
  else
    states[i] = redis.call('ZSCORE', trash, segment) and 4 or 0
  end
end
return states
