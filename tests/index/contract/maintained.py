"""Helpers of the maintenance suites: fixtures, hooks, an oracle of the order of eviction."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from kvstore.index.contract import UNUSED_S
from kvstore.index.eviction import WORTH_MINUTES, worth
from kvstore.index.maintenance import Erased, Listing, Maintenance, Pins, Usage
from kvstore.index.port import CommitState, Index
from kvstore.keys import NamespaceId, SegmentId, new_segment_id
from schemas.records import EvictionRule, rounded_cost
from schemas.settings import JournalSettings
from tests.index.contract.chains import CREATED_S, EXPECTED_BLOCKS, chain, items, namespace, record

MINUTE = 60
#: The minute in which the suites' segments were made, and the one after.
MADE_S = CREATED_S // MINUTE * MINUTE
SOON_S = MADE_S + MINUTE
#: The last use of what was saved then and not used since.
SAVED_S = MADE_S - UNUSED_S
DELETE_AFTER_S = CREATED_S + 3600
NOTHING = Usage(0, 0, 0)


class Maintained:
    """The base of the suites of kvstore.index.maintenance. Subclasses define one fixture and a method."""

    #: In how many shards the index keeps a namespace (kvstore.index.sharding).
    shards = 1

    def in_step(self, some: Iterable[Any]) -> list[Any]:
        """Returns what happened in that order, or if several shards say so, who can't be told apart by their
        clocks, in any one."""
        return list(some) if self.shards == 1 else sorted(some)

    @pytest.fixture
    def index(self) -> Index | Iterator[Index]:
        """An empty index."""
        raise NotImplementedError

    @pytest.fixture
    def catalogue(self, index: Index) -> Maintenance:
        """The maintenance port on the same storage; by default `index` itself."""
        assert isinstance(index, Maintenance), "override the fixture `catalogue`"
        return index

    @pytest.fixture
    def name(self, index: Index) -> NamespaceId:
        """A registered namespace of chains."""
        return index.register(namespace(), expected_blocks=EXPECTED_BLOCKS)

    @pytest.fixture
    def encoder(self, index: Index) -> NamespaceId:
        """A registered namespace of encoder items."""
        return index.register(items(), expected_blocks=EXPECTED_BLOCKS)

    def configured(
        self, *, journal: JournalSettings | None = None, cost_aware: bool = True, by: str = ""
    ) -> Any:
        """Returns another handle, Index and Maintenance, on the storage of the index that the fixture gave
        last.

        `journal` None stands for the defaults.
        """
        raise NotImplementedError

    def pin_some(
        self, catalogue: Any, name: NamespaceId, segments: Sequence[SegmentId]
    ) -> Sequence[SegmentId]:
        """Pins segments if the index has pins (PinConformance). Returns those that are pinned now."""
        return []

    def unpin_some(self, catalogue: Any, name: NamespaceId, segments: Sequence[SegmentId]) -> None:
        """Unpins segments if the index has pins."""


def usage_of(listed: Iterable[Listing]) -> Usage:
    """Returns the usage that segments add up to."""
    some = list(listed)
    return Usage(
        nbytes=sum(one.record.nbytes for one in some),
        segments=len(some),
        blocks=sum(one.record.slots for one in some),
        pinned_bytes=sum(one.record.nbytes for one in some if one.pinned),
        cost_us=sum(one.record.cost_us for one in some),
    )


def keep_minute(one: Listing, *, cost_counts: bool) -> float:
    """Returns the minute that eviction orders by. `cost_counts` is for encoder items."""
    extra = worth(one.record.cost_us, one.record.nbytes) if cost_counts else 0
    return one.last_use_s / MINUTE + WORTH_MINUTES * extra


def in_order(listed: Iterable[Listing], *, cost_counts: bool = False) -> list[SegmentId]:
    """Returns segments in the order of eviction, as kvstore.index.eviction describes it."""

    def key(one: Listing) -> tuple[float, int, float, bytes]:
        return (
            keep_minute(one, cost_counts=cost_counts),
            -min(one.record.depth, 2**20 - 1),
            one.last_use_s,
            one.segment,
        )

    return [one.segment for one in sorted((one for one in listed if not one.pinned), key=key)]


def fill(index: Index, name: NamespaceId, source: random.Random, count: int) -> list[SegmentId]:
    """Commits segments of one block whose ages, depths, sizes and costs differ, with many ties."""
    segments = []
    for _ in range(count):
        one = record(
            1,
            depth=source.choice([0, 0, 16, 32, 2**22 - 1, 2**22 + 5]),
            created_s=CREATED_S - MINUTE * source.randrange(40),
            sizes=[source.choice([500, 60_000])],
            cost_us=rounded_cost(source.choice([0, 3, 70, 2000, 90_000, 10**8])),
        )
        digests = chain(1, seed=secrets.token_hex(8))
        segments.append(new_segment_id(digests))
        assert index.commit(name, segments[-1], digests, one, rank=0, ranks=1) is CommitState.VISIBLE
    return segments


def evict(
    index: Index, name: NamespaceId, segments: Sequence[SegmentId], rule: EvictionRule = "admin"
) -> int:
    """Evicts with the suites' deletion time."""
    return index.evict(name, segments, delete_after_s=DELETE_AFTER_S, rule=rule)


def pin(catalogue: Pins, name: NamespaceId, segments: Sequence[SegmentId]) -> int:
    """Pins without a limit."""
    return catalogue.pin(name, segments, most_bytes=1 << 60)


def drain(catalogue: Maintenance, name: NamespaceId, limit: int = 1000) -> int:
    """Drains with the suites' deletion time."""
    return catalogue.drain(name, delete_after_s=DELETE_AFTER_S, limit=limit)


def reapable_ranks(catalogue: Maintenance, name: NamespaceId) -> dict[SegmentId, int]:
    """Returns the trash that is reapable at the suites' deletion time: ranks by segment."""
    return dict(catalogue.reapable(name, DELETE_AFTER_S, 10_000))


def reap_all(catalogue: Maintenance, name: NamespaceId) -> None:
    """Empties the trash."""
    catalogue.reaped(name, list(reapable_ranks(catalogue, name)))


def erased(catalogue: Maintenance, name: NamespaceId, limit: int = 1000) -> list[Erased]:
    """Erases until that is done. Returns all answers."""
    answers: list[Erased] = []
    while not answers or answers[-1] == "more":
        answers.append(catalogue.erase(name, limit))
        assert len(answers) < 100
    return answers


def cull(catalogue: Maintenance, name: NamespaceId, keep: int = 0, limit: int = 1000) -> list[SegmentId]:
    """Culls with the suites' deletion time."""
    return catalogue.cull(name, keep_bytes=keep, delete_after_s=DELETE_AFTER_S, limit=limit, rule="capacity")
