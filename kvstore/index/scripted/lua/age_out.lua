-- age_out: KEYS[1] meta, ARGV time to live in seconds or '' for none, then the arguments of drop.lua's `dropping`, then at how many segments
-- to look, roughly, how many to drop at most, the cursor to go on from (0 first), by whom.
-- Answers {how many were dropped, the cursor to go on from; '': all were looked at}.
--
-- Race closed: from this step on match, claim and find hold to the time to live, so nothing that a page has been
-- looked at for is served again before a later page is. The first write is one that a full Redis accepts (HDEL).
dropping(ARGV[2], ARGV[3], ARGV[4], ARGV[5])
local ttl, most, cursor = ARGV[1], tonumber(ARGV[7]), ARGV[8]
local known = redis.call('HMGET', meta, 'bucket_bits', 'ttl')
if not known[1] then return {0, ''} end
if (known[2] or '') ~= ttl then
  redis.call('HDEL', meta, 'ttl')
  if ttl ~= '' then redis.call('HSET', meta, 'ttl', ttl) end
end
if ttl == '' then return {0, ''} end

local oldest = redis.call('TIME')[1] - ttl
local page = redis.call('HSCAN', segs, cursor, 'COUNT', ARGV[6])
for i = 1, #page[2], 2 do
  local value = page[2][i + 1]
  local _, _, rest = account(value)
  if created_of(value, rest) <= oldest then
    -- What is left of the page is looked at again.
    if dropped == most then
      account_drops()
      return {dropped, cursor}
    end
    drop(page[2][i])
  end
end
account_drops()
return {dropped, page[1] ~= '0' and page[1] or ''}
