-- salted: KEYS[1] meta, ARGV salt id, the segment to begin after ('' first), how many at most.
-- Answers the segments of that salt that are visible, and the one to go on after; '' if these were the last.
--
-- Race closed: members without a segment, which an older release leaves behind, are removed in the step that
-- finds them so. The first write is one that a full Redis accepts (ZREM).
local salt, limit = ARGV[1], tonumber(ARGV[3])
local from = '[' .. salt
if ARGV[2] ~= '' then from = '(' .. salt .. ARGV[2] end
local found = redis.call('ZRANGE', salts, from, '[' .. salt .. string.rep('\255', 8), 'BYLEX', 'LIMIT', 0, limit)
local visible, last = {}, ''
for _, member in ipairs(found) do
  last = string.sub(member, 17)
  if redis.call('HEXISTS', segs, last) == 1 then
    visible[#visible + 1] = last
  else
    redis.call('ZREM', salts, member)
  end
end
return {visible, #found == limit and last or ''}
