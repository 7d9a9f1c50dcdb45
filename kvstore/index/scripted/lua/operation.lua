-- operation: KEYS[1] all operations, ARGV how many are kept, for how many seconds after the last one, by whom,
-- verb, what.
--
-- No race. A script because a full Redis refuses an XADD that is not preceded by a write that it accepts, and
-- what is recorded may be how room is made.
redis.call('EXPIRE', KEYS[1], ARGV[2])
redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'by', ARGV[3], 'verb', ARGV[4], 'what', ARGV[5])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 0
