-- match: KEYS[1] meta, ARGV[1] packed digests of a chain.
-- Answers three lists in step, one item per run: segment, slot * 65536 + count, value of the segment.
--
-- Race closed: see walk.lua. Reads only, so it also works on a full Redis.
if not bits then return {{}, {}, {}} end

local values = servable(ARGV[1], tonumber(bits))
local places = {}
for i, slot in ipairs(run_slot) do places[i] = slot * 65536 + run_count[i] end
return {run_segment, places, values}
