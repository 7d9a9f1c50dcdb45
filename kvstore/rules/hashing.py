"""vLLM's block hashes, the names of a prompt's blocks, computed from token ids without vLLM.

    root        hash(seed)                      seed: PYTHONHASHSEED, or a fixed text if it is not set
    block i     hash((parent, tokens, extra))   parent: the hash of block i - 1, or the root
                                                extra: of block 0 (("cache_salt", salt),) if there is one

where hash is one of `ALGORITHMS`: SHA-256 or xxh3-128 of the value, pickled or in canonical CBOR (RFC 8949).
Source: `hash_block_tokens` and `init_none_hash` in vllm/v1/core/kv_cache_utils.py, vllm/utils/hashing.py.
tests/connectors/engine/test_hashing.py compares the two.

Prompts with images, adapters or embeddings have more in `extra`, which token ids don't tell.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable, Sequence
from typing import Any, Final

import xxhash

from kvstore.errors import ConfigError
from schemas.namespace import Namespace

#: The seed of the cryptographic algorithms where PYTHONHASHSEED is not set. With the others each process then
#: draws a root of its own, and its blocks are never shared.
DEFAULT_SEED: Final = "vllm-none-hash"


def _pickled(value: Any) -> bytes:
    # The highest protocol, as in vLLM: 5 since Python 3.8.
    return pickle.dumps(value, protocol=5)


def _cbor(value: Any) -> bytes:
    """Returns the canonical CBOR of what a block hash is computed from."""
    match value:
        case None:
            return b"\xf6"
        case int():
            return _head(0, value) if value >= 0 else _head(1, -1 - value)
        case bytes():
            return _head(2, len(value)) + value
        case str():
            text = value.encode()
            return _head(3, len(text)) + text
        case tuple():
            return _head(4, len(value)) + b"".join(map(_cbor, value))
    raise TypeError(f"{type(value).__name__} is not part of a block hash")


def _head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes([major << 5 | number])
    for code, width in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << 8 * width:
            return bytes([major << 5 | code]) + number.to_bytes(width, "big")
    raise OverflowError(f"{number} does not fit into CBOR's integers")


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


_HASHES: Final[dict[str, Callable[[Any], bytes]]] = {
    "sha256": lambda value: _sha256(_pickled(value)),
    "sha256_cbor": lambda value: _sha256(_cbor(value)),
    "xxhash": lambda value: xxhash.xxh3_128_digest(_pickled(value)),
    "xxhash_cbor": lambda value: xxhash.xxh3_128_digest(_cbor(value)),
}

#: `--prefix-caching-hash-algo`, as a namespace names it.
ALGORITHMS: Final = tuple(_HASHES)


def block_hashes(
    tokens: Sequence[int], *, algorithm: str, block_tokens: int, seed: str = DEFAULT_SEED, salt: str = ""
) -> list[bytes]:
    """Returns the hashes of the full blocks of a prompt; each stands for all that precedes its block, too."""
    made = _HASHES[algorithm]
    parent, hashes = made(seed), []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        extra = (("cache_salt", salt),) if salt and start == 0 else None
        parent = made((parent, tuple(tokens[start : start + block_tokens]), extra))
        hashes.append(parent)
    return hashes


def root_digest(seed: str) -> str:
    """Returns the `hash_root` of a namespace: a digest of the seed that its engines' chains start from."""
    return hashlib.sha256(seed.encode()).hexdigest()[:16]


def seed_for(namespace: Namespace, given: str | None) -> str:
    """Returns the seed of a namespace's engines: the given one, or vLLM's own. Raises ConfigError if theirs
    is another, or if their hashes can't be computed here.
    """
    if namespace.hash_algo not in _HASHES:
        raise ConfigError(
            f"blocks of this namespace are named by {namespace.hash_algo or 'nothing'}, which can't be "
            "computed from token ids here; ask by --request or --digest"
        )
    seed = DEFAULT_SEED if given is None else given
    if root_digest(seed) != namespace.hash_root:
        what = "its engines run with a PYTHONHASHSEED: give it with --seed"
        if given is not None:
            what = f"its engines' PYTHONHASHSEED is not {given!r}"
            if namespace.hash_root == root_digest(DEFAULT_SEED):
                what = "its engines have no PYTHONHASHSEED: leave out --seed"
        raise ConfigError(f"the namespace's chains start from another root: {what}")
    return seed
