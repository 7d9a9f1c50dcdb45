"""Stores for tests: a small namespace, chains of blocks whose bytes follow from their identity."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvstore.blobs.faulty import FaultyPayloads, Plan
from kvstore.blobs.local import LocalPayloads
from kvstore.breaker import Breaker
from kvstore.build import load_settings, open_index
from kvstore.codec import Slot
from kvstore.index.breaking import BreakingIndex
from kvstore.keys import ContentKey, block_key, digests
from kvstore.metrics import Counters
from kvstore.ports import Index, PayloadStore
from kvstore.store import Match, Space, Store
from kvstore.transfers import Transfers
from schemas.namespace import GroupSpec, Namespace

SHAPE = (2, 2, 8, 16)
GROUP = GroupSpec(kind="full", block_tokens=8, dtype="BF16", shape=SHAPE)
SLOT_BYTES = GROUP.slot_bytes


def namespace(**changes: Any) -> Namespace:
    fields: dict[str, Any] = {
        "kind": "kv", "model": "tiny", "weights": "w", "dtype": "bfloat16", "block_tokens": 8,
        "hash_algo": "sha256", "hash_root": "r", "kv_dtype": "auto", "page_order": "LHNC", "groups": (GROUP,),
    }  # fmt: skip
    return Namespace(**fields | changes)


def chain(*path: int) -> list[bytes]:
    """Block hashes of a chain: each follows from its parent and one number."""
    hashes, parent = [], b"root"
    for step in path:
        parent = hashlib.sha256(parent + step.to_bytes(8, "big")).digest()
        hashes.append(parent)
    return hashes


def content(block_hash: bytes) -> bytes:
    """The one right content of a block."""
    return hashlib.shake_128(block_hash).digest(SLOT_BYTES)


def keys(hashes: Sequence[bytes]) -> list[ContentKey]:
    return [block_key(one) for one in hashes]


def slots(hashes: Sequence[bytes]) -> list[Slot]:
    return [Slot(block_key(one), memoryview(content(one)), "BF16", SHAPE) for one in hashes]


def buffers(count: int) -> list[memoryview]:
    return [memoryview(bytearray(SLOT_BYTES)) for _ in range(count)]


def match(space: Space, hashes: Sequence[bytes]) -> Match:
    return space.match(digests(hashes))


def fetch(space: Space, hashes: Sequence[bytes], found: Match) -> list[bytes]:
    """Load everything that a match promised; raises what a load raises."""
    out: list[bytes] = []
    for run in found.runs:
        into = buffers(run.count)
        space.load(run, keys(hashes[run.start : run.start + run.count]), into)
        out += [bytes(view) for view in into]
    return out


def make_store(
    root: Path, *, plan: Plan | None = None, index: Index | None = None, clock: Any = None, **settings: Any
) -> Store:
    """A store on a folder, with faults planned, or another index, in place of the usual ones."""
    made = load_settings({"payloads": f"file://{root}", **settings}, environ={})
    leaf = open_index(made, **({"clock": clock} if clock else {}))
    payloads: PayloadStore = LocalPayloads(str(root))
    if plan is not None:
        payloads = FaultyPayloads(payloads, plan)
    return Store(
        settings=made,
        payloads=payloads,
        index=BreakingIndex(index or leaf, Breaker("index", made.breaker)),
        catalogue=leaf,
        transfers=Transfers(made.transfers),
        counters=Counters(),
        **({"clock": clock} if clock else {}),
    )


def open_space(store: Store, **changes: Any) -> Space:
    return store.open(namespace(**changes), block_bytes=SLOT_BYTES)
