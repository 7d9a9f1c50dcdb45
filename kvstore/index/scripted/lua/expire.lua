-- expire: KEYS[1] meta.
-- Answers how many retained segments are so no more, because their time is over: some, and 0 if none is left.
--
-- Race closed: one that is retained anew between the look and the change would lose that. The first write is one
-- that a full Redis accepts (ZREM).
local _, count = expire_retained()
return count
