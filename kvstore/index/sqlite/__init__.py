"""The index in one SQLite file: the scripts of kvstore.index.scripted, run in this process."""
