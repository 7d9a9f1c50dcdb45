"""Indexes: which block is in which segment. Leaves for Redis and SQLite, and the breaker around one."""
