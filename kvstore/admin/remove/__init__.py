"""Verbs that take something away: evict, invalidate, drop, erase."""
