"""The shapes that cross a boundary: settings, identity, stored metadata, index records.

Everything here is frozen and strict: an unknown key is an error, never ignored. Nothing here does
I/O, and nothing imports torch or vLLM.
"""
