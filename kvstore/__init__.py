"""kvstore: one shared cache of encoder embeddings and KV blocks.

Index in Redis (or SQLite), payloads on disk; no server on the data path. Start with
`kvstore.build.open_store`. This package imports neither torch nor vLLM.
"""

from pathlib import Path

import schemas

__version__ = "0.1.0"

# The name is a common one: a folder of it where Python looks first would take its place.
if Path(schemas.__file__ or "").parent.parent != Path(__file__).parent.parent:
    raise ImportError(
        f"kvstore: the package `schemas` that Python finds is not kvstore's, but {list(schemas.__path__)}; "
        "start elsewhere, or take the folder above it out of PYTHONPATH"
    )
