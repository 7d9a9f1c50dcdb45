"""Stores for tests: a small namespace, chains of blocks whose bytes follow from their identity."""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvstore.breaker import Breaker
from kvstore.build import load_settings, open_evidence, open_index
from kvstore.conformance.faulty import FaultyPayloads, Plan
from kvstore.format.keyring import NO_KEYS, Keyring
from kvstore.format.segment import Slot
from kvstore.index.breaking import BreakingIndex
from kvstore.index.port import EngineIndex
from kvstore.keys import ContentKey, block_key, digests, item_key
from kvstore.metrics import Counters
from kvstore.payloads.local import LocalPayloads
from kvstore.payloads.port import PayloadStore
from kvstore.payloads.throttle import Throttle
from kvstore.store.backends import Backends
from kvstore.store.space import Match, Space
from kvstore.store.store import Store
from kvstore.threads.transfers import Transfers
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


def item(name: str, salt: str = "") -> ContentKey:
    """Returns the content key of a picture that is named by what it is."""
    return item_key(hashlib.sha256(name.encode("utf-8", "surrogatepass")).digest(), salt)


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
    root: Path,
    *,
    plan: Plan | None = None,
    index: EngineIndex | None = None,
    clock: Any = None,
    keyring: Keyring = NO_KEYS,
    **settings: Any,
) -> Store:
    """A store on a folder, with faults planned, or another index, in place of the usual ones. What it has is
    loaded, whether that pays or not and however busy the machine is, unless `settings` say otherwise."""
    kv = {"load": "always", "match_deadline_s": 60.0, **settings.pop("kv", {})}
    made = load_settings({"payloads": f"file://{root}", "kv": kv, **settings}, environ={})
    leaf = open_index(made, **({"clock": clock} if clock else {}))
    payloads: PayloadStore = LocalPayloads(str(root))
    if plan is not None:
        payloads = FaultyPayloads(payloads, plan)
    return Store(
        Backends(
            settings=made,
            payloads=payloads,
            index=BreakingIndex(index or leaf, Breaker("index", made.breaker)),
            maintenance=leaf,
            transfers=Transfers(made.transfers),
            counters=Counters(),
            evidence=open_evidence(made),
            keyring=keyring,
            **({"clock": clock} if clock else {}),
        )
    )


def with_parts(store: Store, **parts: Any) -> Store:
    """A store like `store`, closed with it, but for these parts."""
    return Store(replace(store.backends, **parts))


def with_scarce_reads(store: Store) -> Store:
    """A store like `store`, closed with it, whose bucket has asked for fewer reads a moment ago, for ever."""
    throttle = Throttle(longest_s=2.0, clock=lambda: 1000.0)
    throttle.refused("reads", 1000.0)
    return with_parts(store, throttle=throttle)


def put_faults(payloads: Any, plan: Plan, sleep: Callable[[float], object] = time.sleep) -> None:
    """From now on a payload store that somebody else has opened has faults."""
    faulty = FaultyPayloads(copy.copy(payloads), plan, sleep)
    for verb in ("put", "read", "delete", "list", "ping"):
        setattr(payloads, verb, getattr(faulty, verb))


def open_space(store: Store, **changes: Any) -> Space:
    return store.open(namespace(**changes), block_bytes=SLOT_BYTES)
