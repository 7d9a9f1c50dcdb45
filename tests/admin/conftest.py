"""A small cache to look at: one KV namespace with a chain of segments, one of encoder items."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvstore.build import load_settings, open_index, open_store
from kvstore.cli.app import app
from kvstore.format.segment import Slot
from kvstore.index.maintenance import FullIndex, Listing
from kvstore.keys import NO_SESSION, SessionId, block_key, digest, namespace_id, new_segment_id
from schemas.namespace import GroupSpec, Namespace, Parallel
from tests.admin.repair.damage import World
from tests.servers.redis import PATIENT
from tests.store.world import item

BLOCK_SHAPE = (2, 2, 16, 8)
BLOCKS_PER_SEGMENT = 4


def kv_space(**changes: Any) -> Namespace:
    """A namespace of KV blocks; `changes` make it another one."""
    fields: dict[str, Any] = {
        "kind": "kv",
        "model": "tiny-random",
        "weights": "0011223344556677",
        "dtype": "bfloat16",
        "block_tokens": 16,
        "hash_algo": "sha256",
        "hash_root": "8899aabbccddeeff",
        "kv_dtype": "auto",
        "page_order": "LHNC",
        "groups": (GroupSpec(kind="full", block_tokens=16, dtype="BF16", shape=BLOCK_SHAPE),),
    }
    return Namespace(**fields | changes)


def ec_space(**changes: Any) -> Namespace:
    """A namespace of encoder items."""
    fields: dict[str, Any] = {
        "kind": "ec",
        "model": "tiny-vision",
        "weights": "7766554433221100",
        "dtype": "float32",
        "codec": "lz4",
    }
    return Namespace(**fields | changes)


@dataclass
class Filled:
    """A cache with something in it, and how to name it on a command line."""

    folder: Path
    options: list[str]
    settings: dict[str, Any]
    kv: Namespace = field(default_factory=kv_space)
    ec: Namespace = field(default_factory=ec_space)

    @property
    def kv_id(self) -> str:
        return namespace_id(self.kv)

    @property
    def ec_id(self) -> str:
        return namespace_id(self.ec)

    def save(
        self,
        namespace: Namespace,
        slots: Sequence[Slot],
        *,
        depth: int = 0,
        session: SessionId = NO_SESSION,
        ago_s: int = 0,
    ) -> None:
        with closing(open_store(self.settings)) as store:
            space = store.open(namespace, block_bytes=4096)
            # One for all ranks, between which a second may end.
            chain = digest(slots[0].key)
            created_s = int(time.time()) - ago_s
            same: dict[str, Any] = {"segment": new_segment_id(chain), "created_s": created_s}
            for rank in range(ranks := namespace.parts()):
                space.save(slots, depth=depth, chain=chain, rank=rank, ranks=ranks, session=session, **same)

    def payload_files(self) -> list[Path]:
        """Every payload, by a look at the disk."""
        return sorted(path for path in self.folder.glob("*/??/*.*") if path.is_file())


def kv_slots(count: int, *, first: int = 0, seed: int = 1) -> list[Slot]:
    """Blocks `first`.. of one chain."""
    slots = []
    for i in range(first, first + count):
        noise = random.Random(f"{seed} {i}")
        size = BLOCK_SHAPE[0] * BLOCK_SHAPE[1] * BLOCK_SHAPE[2] * BLOCK_SHAPE[3] * 2
        data = memoryview(noise.randbytes(size))
        slots.append(Slot(block_key(noise.randbytes(32)), data, "BF16", BLOCK_SHAPE))
    return slots


def ec_slot(identifier: str, tokens: int, *, noisy: bool = False) -> Slot:
    """One item, of zeros (which compress) or of noise (which doesn't)."""
    size = tokens * 32 * 4
    data = random.Random(identifier).randbytes(size) if noisy else bytes(size)
    return Slot(item(identifier), memoryview(data), "F32", (tokens, 32))


def fill(folder: Path, index: str | None = None, ago_s: int = 0) -> Filled:
    """Three KV segments of one chain and two items, saved so many seconds ago."""
    settings: dict[str, Any] = {"payloads": f"file://{folder}"}
    options = ["--payloads", f"file://{folder}"]
    if index is not None:
        settings["index"] = index
        settings["redis"] = PATIENT.model_dump(include={"timeout_s", "connect_timeout_s"})
        options += ["--index", index]
    filled = Filled(folder, options, settings)
    for i in range(3):
        first = i * BLOCKS_PER_SEGMENT
        filled.save(filled.kv, kv_slots(BLOCKS_PER_SEGMENT, first=first), depth=first, ago_s=ago_s)
    filled.save(filled.ec, [ec_slot("a cat", 8)], ago_s=ago_s)
    filled.save(filled.ec, [ec_slot("a dog", 64, noisy=True)], ago_s=ago_s)
    return filled


@pytest.fixture
def filled(tmp_path: Path) -> Filled:
    """On SQLite, the default."""
    return fill(tmp_path / "cache")


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.servers)])
def either(request: pytest.FixtureRequest, tmp_path: Path) -> Filled:
    """On SQLite and on Redis."""
    url = request.getfixturevalue("redis_url") if request.param == "redis" else None
    return fill(tmp_path / "cache", url)


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.servers)])
def aged(request: pytest.FixtureRequest, tmp_path: Path) -> Filled:
    """On SQLite and on Redis, saved ten minutes ago."""
    url = request.getfixturevalue("redis_url") if request.param == "redis" else None
    return fill(tmp_path / "cache", url, ago_s=600)


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.servers)])
def empty_world(request: pytest.FixtureRequest, tmp_path: Path) -> World:
    """A cache to be damaged, on SQLite and on Redis."""
    url = request.getfixturevalue("redis_url") if request.param == "redis" else None
    return World.of(tmp_path / "cache", url)


@contextmanager
def opened(filled: Filled) -> Iterator[FullIndex]:
    with closing(open_index(load_settings(filled.settings, {}))) as index:
        yield index


def chain(filled: Filled) -> list[Listing]:
    """The KV segments, heads first."""
    with opened(filled) as index:
        listings = list(index.segments(namespace_id(filled.kv)))
    return sorted(listings, key=lambda each: each.record.depth)


def ids(listings: list[Listing]) -> list[str]:
    return [listing.segment.hex() for listing in listings]


def snapshot(filled: Filled) -> Any:
    """All that a plan must not change."""
    with opened(filled) as index:
        return index.accounts(), index.quotas(), filled.payload_files()


@dataclass(frozen=True)
class Ran:
    """What a command left behind."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Admin = Callable[..., Ran]


@pytest.fixture
def admin(monkeypatch: pytest.MonkeyPatch) -> Admin:
    """`admin("status", ...)`: run one command in this process, without this machine's settings."""
    for name in list(os.environ):
        if name.startswith("KVSTORE_"):
            monkeypatch.delenv(name)

    def run(*words: str, env: Mapping[str, str] | None = None) -> Ran:
        result = CliRunner().invoke(app, list(words), env={"COLUMNS": "160", **(env or {})})
        return Ran(result.exit_code, result.stdout, result.stderr)

    return run


def tensor_parallel(**changes: Any) -> Namespace:
    """A namespace whose segments have two parts."""
    group = GroupSpec(kind="full", block_tokens=16, dtype="BF16", shape=(2, 4, 16, 8), shards=2)
    return kv_space(**{"parallel": Parallel(tp=2), "groups": (group,)} | changes)
