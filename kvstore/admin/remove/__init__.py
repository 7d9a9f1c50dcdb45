"""Verbs that take something away: evict, drop, erase."""
