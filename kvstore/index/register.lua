-- register: KEYS[1] meta, ARGV namespace JSON, bucket bits, unix seconds.
--
-- Race closed: replicas that start together may expect different numbers of blocks. The first one
-- fixes the bucket bits for as long as the namespace exists; two values would split it in halves that
-- don't see each other.
if redis.call('EXISTS', meta) == 1 then return 0 end
redis.call('HSET', meta, 'json', ARGV[1], 'bits', ARGV[2], 'created', ARGV[3],
  'bytes', 0, 'segments', 0, 'blocks', 0, 'cursor', 0)
-- Without a meta key there are no segments: should Redis have lost it alone (it must not, but a
-- maxmemory-policy other than noeviction does such things), then the counters begin at zero and so
-- must the segments. Their entries dangle and are swept; their payloads are found by gc.
redis.call('UNLINK', segs, lru)
return 1
