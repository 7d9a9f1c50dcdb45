"""The index in one SQLite file: the scripts of kvstore.index.redis, run in this process."""
