"""Payload stores: the leaves (local, memory) and the wrappers that each add one concern."""
