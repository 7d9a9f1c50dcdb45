"""The shapes that cross a boundary: settings, identity, stored metadata, index records.

Everything here is frozen and strict: an unknown key is an error, never ignored. The package does no I/O, and
imports neither torch nor vLLM.
"""
