-- Shared by what takes segments out of sight, or pins them: while a reshard compares a shard with those that it fills,
-- and after that, it stays as it is.
if redis.call('HEXISTS', meta, 'sealed') == 1 then error('SEALED', 0) end
