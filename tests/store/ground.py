"""A store that children of a row open one after the other: what is prepared in it, and what is left of it.

Two namespaces, of one rank and of two; chains of four blocks, each in two segments, whose bytes follow from
their identity. Everything has the names that it had the last time, so that two runs can be compared.
"""

from __future__ import annotations

import hashlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import redis

from kvstore.admin.backends import Cache
from kvstore.admin.remove.drop import drop
from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.fsck import fsck
from kvstore.build import load_settings, open_strays
from kvstore.errors import KVStoreError
from kvstore.index.maintenance import FullIndex
from kvstore.janitor.janitor import Janitor
from kvstore.keys import NamespaceId, SegmentId, chain_like, digests, namespace_id, payload_name, tag_of
from kvstore.metrics import Counters
from kvstore.rules.lateness import SETTLED_S
from kvstore.store.housekeeping import Housekeeping
from kvstore.store.space import Match, Space
from kvstore.store.store import Store
from schemas.namespace import GroupSpec, Parallel
from schemas.settings import Settings
from tests.store.world import SLOT_BYTES, buffers, chain, content, keys, match, namespace, slots

ONE = namespace()
TWO = namespace(
    parallel=Parallel(tp=2),
    groups=(GroupSpec(kind="full", block_tokens=8, dtype="BF16", shape=(2, 4, 8, 16), shards=2),),
)
SPACES = {"one": ONE, "two": TWO}
BLOCKS, PER_SEGMENT = 4, 2
#: Two namespaces of these are in every store before anything else happens: (namespace, chain).
CHAINS = [*(("one", number) for number in range(4)), ("two", 0), ("two", 1)]
#: What rows save: one segment each, of which the first half is stored already, as a part of chain 0.
NEW = [("one", 100), ("two", 100)]

GRACE_S = 0.3
#: What those who write and tidy up have: nobody loads under their hands, so nothing has to wait for long.
HASTY: dict[str, Any] = {
    "grace_s": GRACE_S,
    "kv": {"match_ttl_s": 0.1, "load_deadline_s": 0.1},
    "claim_ttl_s": 0.5,
}
#: An index makes as many buckets as its capacity needs, and looking at all of them takes as long.
_SMALL: dict[str, Any] = {"capacity_bytes": 1 << 26}


def hashes(which: str, number: int) -> list[bytes]:
    """The block hashes of a chain."""
    shared = number % 100
    return chain(shared, shared, *[number] * (BLOCKS - 2))


def segment_of(which: str, number: int, first: int, attempt: int = 0) -> SegmentId:
    """Ends with the chain's tag, as every id."""
    name = hashlib.sha256(f"{which}/{number}/{first}/{attempt}".encode()).digest()
    return SegmentId(name[:7] + bytes([tag_of(digests(hashes(which, number)))]))


def later() -> float:
    """A clock by which all that was written in this row is old enough for everything."""
    return time.time() + 2 * SETTLED_S


@dataclass(frozen=True)
class Ground:
    """A store, as settings name it."""

    settings: dict[str, Any]
    #: When everything was written, for the order of eviction.
    created_s: int = field(default_factory=lambda: int(time.time()) - 7200)
    #: Saves of one attempt give their segments the same names.
    attempt: int = 0

    def made(self, **changes: Any) -> Settings:
        return load_settings({**_SMALL, **self.settings, **changes}, environ={})

    @contextmanager
    def cache(self, **changes: Any) -> Iterator[Cache]:
        with Cache(self.made(**changes)) as cache:
            yield cache

    @contextmanager
    def store(self, **changes: Any) -> Iterator[Store]:
        """A store; without `changes` one that never tidies up in passing."""
        with self.cache(**changes) as cache, closing(cache.saving()) as store:
            if not changes:
                store.rounds.committed = lambda nbytes: None  # type: ignore[method-assign]
            yield store

    @contextmanager
    def index(self, **changes: Any) -> Iterator[FullIndex]:
        with self.cache(**changes) as cache:
            yield cache.made_index()

    @contextmanager
    def housekeeping(self, **changes: Any) -> Iterator[Housekeeping]:
        with self.cache(**HASTY, **changes) as cache:
            index, settings = cache.made_index(), cache.settings
            yield Housekeeping(index, cache.payloads, settings, Counters(), time.time)

    def save(self, store: Store, which: str, number: int, *, ranks: Sequence[int] = ()) -> None:
        """Saves a chain, or those ranks' parts of it."""
        space, parts = open_space(store, which), SPACES[which].parts()
        blocks = hashes(which, number)
        size = BLOCKS if (which, number) in NEW else PER_SEGMENT
        for first in range(0, BLOCKS, size):
            some = slots(blocks[first : first + size])
            segment = segment_of(which, number, first, self.attempt)
            for rank in ranks or range(parts):
                space.save(
                    some,
                    depth=first,
                    chain=chain_like(segment),
                    segment=segment,
                    created_s=self.created_s + number,
                    rank=rank,
                    ranks=parts,
                )

    def fill(self) -> None:
        """Saves what is there before a row's fault."""
        with self.store() as store:
            for which, number in CHAINS:
                self.save(store, which, number)

    def look(self) -> dict[str, Any]:
        """How many blocks of each chain can be matched and loaded, how many are wrong, and how many can be
        matched and not loaded."""
        seen: dict[str, Any] = {"blocks": {}, "wrong": 0, "unreadable": 0}
        with self.store() as store:
            for which, number in CHAINS + NEW:
                space, blocks = open_space(store, which), hashes(which, number)
                found = match(space, blocks)
                seen["blocks"][f"{which} {number}"] = found.blocks
                for rank in range(SPACES[which].parts()):
                    try:
                        got = loaded(space, blocks, found, rank)
                    except KVStoreError as exc:
                        space.not_loaded.note(found.blocks, exc)  # as the connectors do
                        seen["unreadable"] += found.blocks
                    else:
                        right = [content(one) for one in blocks[: found.blocks]]
                        seen["wrong"] += sum(a != b for a, b in zip(got, right, strict=True))
        return seen

    def settle(self) -> None:
        """Does what a janitor does in its rounds, and an operator with `fsck --list --apply`. To be called
        twice, with the grace time between."""
        with self.cache(**HASTY) as cache:
            if cache.index is not None:
                janitor = Janitor(cache.index, cache.payloads, cache.evidence, cache.settings)
                for _ in range(2):
                    janitor.round()
                fsck(cache, depth=Depth(only_list=True), apply=True, older_than_s=SETTLED_S, clock=later)

    def leaks(self) -> list[str]:
        """What nobody needs and nobody will free, once it has settled; and what fsck complains of."""
        with self.cache(**HASTY) as cache:
            index, found = cache.made_index(), []
            named: set[str] = set()
            for account in index.accounts():
                name = account.namespace
                found += ["trash"] * account.trashed + ["invalidated"] * account.bygone
                listed = {one.segment: one.record for one in index.segments(name)}
                for segment, record in listed.items():
                    named |= {payload_name(name, segment, rank) for rank in range(len(record.parts))}
                found += ["entry" for one in index.entries(name) if one.segment not in listed]
            there = {one.name for one in cache.payloads.list()}
            found += [f"payload {name}" for name in there - named] + [
                f"lost {name}" for name in named - there
            ]
            strays = open_strays(cache.settings)
            found += [f"stray {one.kind} {one.name}" for one in strays.list()]
            strays.close()
            everything = Depth(percent=100.0, settled_s=0.0)
            for fault in fsck(cache, depth=everything, clock=later).faults:
                found.append(f"fsck {fault.kind}: {fault.detail}")
            report = fsck(cache, depth=Depth(only_list=True), older_than_s=SETTLED_S, clock=later)
            assert report.waste is not None
            found += ["waste"] * (report.ended != "complete" or report.waste.found.objects > 0)
        return found

    def erase(self) -> list[str]:
        """Drops all namespaces. Returns what is left of them: rows, keys and payloads."""
        with self.cache(**HASTY) as cache:
            for name in cache.namespaces():
                state = drop(cache, name, apply=True, now=True, clock=later).state
                assert state == "erased", state
            left = [one.name for one in cache.payloads.list()]
            url = cache.settings.index_url
        return left + (_keys(url) if url.startswith("redis") else _rows(url.removeprefix("sqlite://")))


def open_space(store: Store, which: str) -> Space:
    return store.open(SPACES[which], block_bytes=SLOT_BYTES)


def loaded(space: Space, blocks: Sequence[bytes], found: Match, rank: int) -> list[bytes]:
    """Loads what a match promised, as one rank. Raises what a load raises."""
    out: list[bytes] = []
    for run in found.runs:
        into = buffers(run.count)
        space.load(run, keys(blocks[run.start : run.start + run.count]), into, rank=rank)
        out += [bytes(view) for view in into]
    return out


def ids() -> dict[str, NamespaceId]:
    return {which: namespace_id(made) for which, made in SPACES.items()}


#: What belongs to no namespace, and stays.
_GENERAL_KEYS = ("kvs:operations", "kvs:quotas", "kvs:ping")


def _rows(path: str) -> list[str]:
    with closing(sqlite3.connect(path)) as db:
        live = "SELECT name FROM keys WHERE coalesce(expires_ms > ?, 1) ORDER BY name"
        names = [name.decode() for (name,) in db.execute(live, (1000 * time.time(),))]
    return [name for name in names if name not in _GENERAL_KEYS]


def _keys(url: str) -> list[str]:
    with closing(redis.Redis.from_url(url)) as client:
        found = [key.decode() for key in client.scan_iter(count=1000)]
    return sorted(key for key in found if not key.startswith(_GENERAL_KEYS))
