"""The index as scripts in Lua over hashes, sorted sets, strings and streams: in Redis, or in this process."""
