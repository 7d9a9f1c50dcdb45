"""A store of kvstore's with a little of everything in it, for the second implementation to read."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np

from kvstore.admin.backends import Cache
from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.fsck import fsck
from kvstore.build import load_settings, open_index, open_store
from kvstore.format.segment import Slot
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.keys import (
    NO_SALT,
    NO_SESSION,
    SaltId,
    SessionId,
    block_key,
    chain_like,
    digests,
    new_segment_id,
)
from kvstore.store.space import Space
from kvstore.store.store import Store
from schemas.namespace import DTYPE_BYTES, GroupSpec, Namespace, Parallel
from schemas.records import Codec
from tests.store.world import item

NOW_S = 1_763_000_000
SHAPES: dict[str, tuple[int, ...]] = {"BF16": (2, 2, 16, 32), "F16": (2, 2, 16, 32), "F32": (2, 2, 16, 16)}


def kv(codec: Codec = "none", *, shards: int = 1, dtype: str = "BF16", model: str = "tiny-é") -> Namespace:
    """Two groups: full attention, cut into `shards`, and a sliding window."""
    layers, heads, tokens, content = SHAPES[dtype]
    whole = (layers, heads * shards, tokens, content)
    full = GroupSpec(kind="full", block_tokens=4, dtype=dtype, shape=whole, shards=shards)
    window = GroupSpec(kind="sliding_window", block_tokens=4, dtype=dtype, shape=SHAPES[dtype], window=8)
    return Namespace(
        kind="kv", tenant="t\"e\\n\u2028\U0001f600", model=model, weights="w", dtype="bfloat16",
        block_tokens=4, hash_algo="sha256_cbor", hash_root="r", kv_dtype="auto", page_order="LHNC",
        groups=(full, window), parallel=Parallel(tp=shards), codec=codec,
    )  # fmt: skip


def ec(codec: Codec = "none") -> Namespace:
    return Namespace(kind="ec", model="eyes", weights="w", dtype="float32", codec=codec)


def path(seed: str, count: int) -> list[bytes]:
    """Block hashes of a chain."""
    hashes, parent = [], seed.encode()
    for number in range(count):
        parent = hashlib.sha256(parent + bytes([number])).digest()
        hashes.append(parent)
    return hashes


def content(name: bytes, rank: int, dtype: str, shape: Sequence[int]) -> bytes:
    """Numbers as a cache holds them: of every codec's forms some are the smallest."""
    rng = np.random.default_rng(int.from_bytes(name[:4], "big") + rank)
    count = prod(shape)
    values = np.resize(rng.normal(0, 2, max(1, count // 4) if name[0] < 96 else count), count)
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    whole = values.astype("<f4").view(np.uint8).reshape(-1, 4)
    return (whole if dtype == "F32" else whole[:, 2:]).tobytes()


@dataclass
class World:
    """One namespace in a folder, with its index in Redis or SQLite."""

    root: Path
    store: Store
    space: Space
    index: RedisIndex | SqliteIndex

    def save(
        self,
        hashes: Sequence[bytes],
        *,
        group: int = 0,
        depth: int = 0,
        cost_us: float = 0,
        ranks: int = 1,
        salt: SaltId = NO_SALT,
        session: SessionId = NO_SESSION,
        created_s: int = NOW_S,
    ) -> bytes:
        """Save blocks of a chain as one segment, all ranks of it; returns its id."""
        dtype = self.space.namespace.groups[group].dtype
        segment = new_segment_id()
        for rank in range(ranks):
            slots = [
                Slot(
                    block_key(one, group),
                    memoryview(content(one, rank, dtype, SHAPES[dtype])),
                    dtype,
                    SHAPES[dtype],
                )
                for one in hashes
            ]
            self.space.save(
                slots,
                depth=depth,
                chain=chain_like(segment),
                segment=segment,
                created_s=created_s,
                rank=rank,
                ranks=ranks,
                cost_us=cost_us,
                salt=salt,
                session=session,
            )
        return segment

    def save_item(self, identifier: str, *, shape: tuple[int, int] = (7, 16), cost_us: float = 0) -> bytes:
        """One item."""
        segment, key = new_segment_id(), item(identifier)
        data = memoryview(content(key, 0, "F32", shape))
        self.space.save([Slot(key, data, "F32", shape)], segment=segment, created_s=NOW_S, cost_us=cost_us)
        return segment

    def served(self, hashes: Sequence[bytes], *, group: int = 0, rank: int = 0) -> list[bytes]:
        """What kvstore matches of a chain, loaded and verified by it."""
        found = self.space.match(digests(hashes, group))
        dtype = self.space.namespace.groups[group].dtype
        out: list[bytes] = []
        for run in found.runs:
            some = hashes[run.start : run.start + run.count]
            into = [memoryview(bytearray(prod(SHAPES[dtype]) * DTYPE_BYTES[dtype])) for _ in some]
            self.space.load(run, [block_key(one, group) for one in some], into, rank=rank)
            out += [bytes(view) for view in into]
        return out

    def faults(self) -> list[str]:
        """What fsck finds, every byte read."""
        with Cache(self.store.settings) as cache:
            report = fsck(cache, depth=Depth(percent=100.0, settled_s=0.0))
        assert report.ended == "complete", report.problem
        return [f"{one.kind}: {one.detail}" for one in report.faults]


@contextmanager
def world(root: Path, index: str, namespace: Namespace) -> Iterator[World]:
    """Open one, registered."""
    settings = {"payloads": f"file://{root}", "index": index, "capacity_bytes": "1GiB"}
    store = open_store(load_settings(settings, environ={}))
    with store, open_index(store.settings) as leaf:
        space = store.open(namespace, block_bytes=1 << 14)
        space.register()
        yield World(root, store, space, leaf)
