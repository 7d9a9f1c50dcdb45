"""Requests against the real store, on a clock of their own: what replays are held against."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import count
from math import inf
from typing import Any
from unittest.mock import patch

import pytest

from kvstore.build import open_evidence
from kvstore.format.segment import Slot, encode
from kvstore.index import eviction
from kvstore.index.port import MISSING_DIGESTS, Outcome
from kvstore.index.scripted import journal
from kvstore.index.sessions import USE, Hint
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.keys import NO_SESSION, SegmentId, SessionId, block_key, canonical_json, chain_like, digests
from kvstore.metrics import Counters
from kvstore.payloads.memory import MemoryPayloads
from kvstore.store import rounds
from kvstore.store.backends import Backends
from kvstore.store.space import Space
from kvstore.store.store import Store
from kvstore.store.trace import TraceRecorder
from kvstore.threads.transfers import Transfers
from schemas.namespace import GroupSpec, Namespace
from schemas.settings import JournalSettings, Settings
from tests.admin.advise.workloads import Asked

#: A block of 128 KiB, of 16 tokens.
SHAPE = (4, 1, 16, 1024)
GROUP = GroupSpec(kind="full", block_tokens=16, dtype="BF16", shape=SHAPE)
BLOCK_BYTES = GROUP.slot_bytes
_ZEROS = memoryview(bytes(BLOCK_BYTES))
_MADE = count()


def namespace(model: str = "tiny") -> Namespace:
    return Namespace(
        kind="kv", model=model, weights="w", dtype="bfloat16", block_tokens=16, hash_algo="sha256",
        hash_root="r", kv_dtype="auto", page_order="LHNC", groups=(GROUP,),
    )  # fmt: skip


class Weightless(MemoryPayloads):
    """Payloads of which nothing but the name is kept: nobody reads them here."""

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        super().put(name, [])


def hashes(chain: Sequence[int]) -> list[bytes]:
    """A block's hash; a name stands for all that precedes it as well."""
    return [_hash(name) for name in chain]


@cache
def _hash(name: int) -> bytes:
    return hashlib.sha256(name.to_bytes(8, "big")).digest()


def header_bytes(slots: int) -> int:
    """Of a segment of so many slots here, exactly."""
    encoded = encode(
        [Slot(block_key(_hash(i)), _ZEROS, "BF16", SHAPE) for i in range(slots)],
        namespace_json=canonical_json(namespace()),
        kind="kv",
        segment=SegmentId(bytes(8)),
        created_s=1_790_000_000,
        writer="somebody",
    )
    return encoded.part.data_start


@dataclass
class Ran:
    """What became of the requests, in order."""

    hits: list[int] = field(default_factory=list)
    asked: int = 0

    @property
    def hit_ratio(self) -> float:
        return sum(self.hits) / self.asked


def tell_megabytes_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have distances told apart from 1 MiB on and not from 64: the stores here have megabytes."""
    source = journal._TELL.source.replace("local LEAST, QUARTERS = 2 ^ 26", "local LEAST, QUARTERS = 2 ^ 20")
    assert source != journal._TELL.source
    monkeypatch.setattr(journal, "_TELL", replace(journal._TELL, source=source))
    monkeypatch.setattr(eviction, "GHOST_LEAST", 1 << 20)


@dataclass
class World:
    """A store on a clock, and who asks it."""

    store: Store
    clock: list[float]
    cut: int
    ran: Ran = field(default_factory=Ran)
    _segments: Iterator[int] = field(default_factory=count)

    def serve(
        self,
        space: Space,
        at_s: float,
        chain: Sequence[int],
        *,
        second_use: bool = False,
        session: SessionId = NO_SESSION,
        hint: Hint = USE,
    ) -> None:
        """One request as a connector does it: match, use what was found, save the rest in segments, and tell
        what it says of its session."""
        self.clock[0] = at_s
        own = hashes(chain)
        packed = digests(own)
        worth = len(chain)
        if second_use:
            worth = space.note(packed)
        found = space.match(packed, session=session)
        segments = [run.segment for run in found.runs]
        if session:
            assert space.session(session, segments) is not None
        else:
            space.touch(segments)
        missing = packed[16 * found.blocks :][: 16 * MISSING_DIGESTS]
        reason = "absent" if missing else ""
        outcome = Outcome(at_s, "r", "match", len(own), found.blocks, reason, found.blocks, missing)
        space.tell([outcome])
        self.ran.hits.append(found.blocks)
        self.ran.asked += len(own)
        for begin in range(found.blocks, worth, self.cut):
            piece = own[begin : min(begin + self.cut, worth)]
            slots = [Slot(block_key(one), _ZEROS, "BF16", SHAPE) for one in piece]
            # Ids that rise, so that what is equal in all else goes in the order in which it was saved.
            segment = SegmentId(next(self._segments).to_bytes(8, "big"))
            space.save(slots, depth=begin, chain=chain_like(segment), segment=segment, session=session)
        if hint != USE:
            assert space.session(session, segments, hint) is not None


@contextmanager
def world(
    capacity_bytes: int, cut: int, trace: TraceRecorder | None = None, **settings: Any
) -> Iterator[World]:
    """A store of its own."""
    name = f"store-run-{next(_MADE)}"
    made = Settings(
        payloads=f"memory://{name}", index=f"memory://{name}", capacity_bytes=capacity_bytes,
        journal=JournalSettings(events=0, outcomes=0, ghosts=100_000), **settings,
    )  # fmt: skip
    clock = [0.0]
    index = SqliteIndex.in_memory(name, journal=made.journal, clock=lambda: clock[0])
    backends = Backends(
        settings=made,
        payloads=Weightless(name, clock=lambda: clock[0]),
        index=index,
        maintenance=index,
        transfers=Transfers(made.transfers),
        counters=Counters(),
        evidence=open_evidence(made),
        clock=lambda: clock[0],
        trace=trace,
    )
    # After a look at the quotas that takes long it rests, by the machine's clock: here every commit looks.
    with Store(backends) as store, patch.object(rounds, "_SHORT_S", inf):
        yield World(store, clock, cut)


def run(capacity_bytes: int, cut: int, asked: Sequence[Asked], **options: Any) -> Ran:
    """All requests of one namespace, at a capacity."""
    second_use = options.pop("second_use", False)
    with world(capacity_bytes, cut, **options) as it:
        space = it.store.open(namespace(), block_bytes=BLOCK_BYTES)
        space.register()
        for at_s, chain in asked:
            it.serve(space, at_s, chain, second_use=second_use)
        return it.ran
