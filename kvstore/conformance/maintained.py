"""What the suites of kvstore.catalogue arrange with: fixtures, hooks, an oracle of the order of eviction."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pytest

from kvstore.catalogue import Listing, Maintenance, Usage
from kvstore.conformance.chains import CREATED_S, EXPECTED_BLOCKS, chain, items, namespace, record
from kvstore.eviction import WORTH_MINUTES, worth
from kvstore.keys import NamespaceId, SegmentId, new_segment_id
from kvstore.ports import CommitState, Index
from schemas.records import EvictionRule, rounded_cost
from schemas.settings import JournalSettings

MINUTE = 60
#: The minute in which the suites' segments were made, and the one after.
MADE_S = CREATED_S // MINUTE * MINUTE
SOON_S = MADE_S + MINUTE
DELETE_AFTER_S = CREATED_S + 3600
NOTHING = Usage(0, 0, 0)


class Maintained:
    """A suite of kvstore.catalogue. Subclasses give one fixture and three methods."""

    @pytest.fixture
    def index(self) -> Index | Iterator[Index]:
        """An empty index."""
        raise NotImplementedError

    @pytest.fixture
    def catalogue(self, index: Index) -> Maintenance:
        """The maintenance of the same storage; by default `index` itself."""
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

    def configured(self, *, journal: JournalSettings | None = None, cost_aware: bool = True) -> Any:
        """Another handle, Index and Maintenance, on the storage of the index that the fixture gave last.

        `journal` None: the defaults.
        """
        raise NotImplementedError

    def miscount(self, name: NamespaceId, nbytes: int) -> None:
        """Behind the index's back, add to the bytes that are recorded for a namespace."""
        raise NotImplementedError


def usage_of(listed: Iterable[Listing]) -> Usage:
    """What segments amount to."""
    some = list(listed)
    return Usage(
        nbytes=sum(one.record.nbytes for one in some),
        segments=len(some),
        blocks=sum(one.record.slots for one in some),
        pinned_bytes=sum(one.record.nbytes for one in some if one.pinned),
        cost_us=sum(one.record.cost_us for one in some),
    )


def keep_minute(one: Listing, *, worthy: bool) -> int:
    """The minute that eviction orders by; `worthy`: encoder items, where costs count."""
    extra = worth(one.record.cost_us, one.record.nbytes) if worthy else 0
    return int(one.last_use_s) // MINUTE + WORTH_MINUTES * extra


def in_order(listed: Iterable[Listing], *, worthy: bool = False) -> list[SegmentId]:
    """The order of eviction, as kvstore.eviction describes it."""

    def key(one: Listing) -> tuple[int, int, float, bytes]:
        return keep_minute(one, worthy=worthy), -min(one.record.depth, 2**22 - 1), one.last_use_s, one.segment

    return [one.segment for one in sorted((one for one in listed if not one.pinned), key=key)]


def fill(index: Index, name: NamespaceId, source: random.Random, count: int) -> list[SegmentId]:
    """Commit segments of one block whose ages, depths, sizes and costs differ, with many ties."""
    segments = []
    for _ in range(count):
        one = record(
            1,
            depth=source.choice([0, 0, 16, 32, 2**22 - 1, 2**22 + 5]),
            created_s=CREATED_S - MINUTE * source.randrange(40),
            sizes=[source.choice([500, 60_000])],
            cost_us=rounded_cost(source.choice([0, 3, 70, 2000, 90_000, 10**8])),
        )
        segments.append(new_segment_id())
        digests = chain(1, seed=segments[-1].hex())
        assert index.commit(name, segments[-1], digests, one, rank=0, ranks=1) is CommitState.VISIBLE
    return segments


def evict(
    index: Index, name: NamespaceId, segments: Sequence[SegmentId], rule: EvictionRule = "admin"
) -> int:
    """Evict with the suites' deletion time."""
    return index.evict(name, segments, delete_after_s=DELETE_AFTER_S, rule=rule)


def pin(catalogue: Maintenance, name: NamespaceId, segments: Sequence[SegmentId]) -> int:
    """Pin without a limit."""
    return catalogue.pin(name, segments, most_bytes=1 << 60)
