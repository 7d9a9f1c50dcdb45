-- cull: KEYS[1] meta, ARGV bytes to keep, unix seconds of the payloads' deletion, most segments to drop.
-- Answers the segments dropped.
--
-- Race closed: many engines cull at once. Usage and choice are one step, so together they drop what
-- is too much once and not once each, and a segment that was touched a moment ago is not the oldest.
local keep, delete_after, limit = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3])
local used = tonumber(redis.call('HGET', meta, 'bytes') or 0)
local gone = {}
if limit > 0 and used > keep then
  for _, segment in ipairs(redis.call('ZRANGE', lru, 0, limit - 1)) do
    if used - freed <= keep then break end
    if drop(segment, delete_after) then
      gone[#gone + 1] = segment
    else
      redis.call('ZREM', lru, segment)
    end
  end
end
account_drops()
return gone
