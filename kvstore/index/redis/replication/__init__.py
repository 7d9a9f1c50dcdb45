"""Replicas of Redis: where they are, and which of them may be read."""
