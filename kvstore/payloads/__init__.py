"""Payload stores: the leaves (local, memory, s3) and the wrappers that each add one concern."""
