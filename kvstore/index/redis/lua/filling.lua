-- Shared by what fills a shard for a reshard: ARGV ends with the run and by whom. Another run that has begun since then
-- has put its own name there, so of two only the later one changes anything.
if redis.call('HGET', meta, 'role') ~= 'fills ' .. ARGV[#ARGV - 1] then return false end
