"""kvstore: one shared cache of encoder embeddings and KV blocks.

Index in Redis (or SQLite), payloads on disk; no server on the data path. Start with
`kvstore.build.open_store`. This package imports neither torch nor vLLM.
"""

__version__ = "0.1.0"
