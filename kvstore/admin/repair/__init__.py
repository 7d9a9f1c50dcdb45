"""Verbs that bring index and payloads into agreement: fsck, rebuild."""
