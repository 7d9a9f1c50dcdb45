"""Helpers of reports: segments counted and named, totals compared, and iterables cut into pages for single
calls."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

from kvstore.admin.reports import NAMED, Amount, Left, SegmentSummary
from kvstore.index.maintenance import Account, Listing
from kvstore.keys import NamespaceId, SegmentId

_T = TypeVar("_T")

#: How many segments or entries one call asks for.
PAGE = 256


@dataclass(slots=True)
class AmountSum:
    """A growing count of segments, their blocks and their bytes."""

    segments: int = 0
    blocks: int = 0
    nbytes: int = 0

    def add(self, blocks: int, nbytes: int) -> None:
        """Adds one segment."""
        self.segments += 1
        self.blocks += blocks
        self.nbytes += nbytes

    @property
    def amount(self) -> Amount:
        """Returns the count as a report has it."""
        return Amount(segments=self.segments, blocks=self.blocks, stored_bytes=self.nbytes)


@dataclass(slots=True)
class LeftOut:
    """Segments that were left out: all of them counted, the first ones named."""

    count: int = 0
    named: list[Left] = field(default_factory=list)

    def add(self, namespace: str, segment: SegmentId, reason: object) -> None:
        """Counts a segment, and names it if it is among the first."""
        self.count += 1
        if len(self.named) < NAMED:
            self.named.append(Left(namespace=namespace, segment=segment.hex(), reason=str(reason)))


class Growth:
    """Tells by how much totals grew between two calls.

    Totals begin anew when an index is emptied. For one thread.
    """

    def __init__(self) -> None:
        self._last: dict[NamespaceId, Mapping[str, int]] = {}

    def advance(
        self, namespace: NamespaceId, totals: Mapping[str, int], *, is_new: bool = False
    ) -> dict[str, int]:
        """Returns how much was added to each total since the last call.

        For a namespace that is seen for the first time that is nothing, or all of it if it `is_new`.
        """
        last = self._last.get(namespace)
        self._last[namespace] = dict(totals)
        if last is None:
            return {name: count for name, count in totals.items() if count > 0} if is_new else {}
        added = {}
        for name, count in totals.items():
            before = last.get(name, 0)
            difference = count - before if count >= before else count
            if difference > 0:
                added[name] = difference
        return added

    def last(self, namespace: NamespaceId) -> Mapping[str, int]:
        """Returns the totals that the last `advance` was given."""
        return self._last.get(namespace, {})

    def keep_to(self, namespaces: Container[NamespaceId]) -> None:
        """Forgets all namespaces but these: one that comes back is seen for the first time."""
        self._last = {name: totals for name, totals in self._last.items() if name in namespaces}


def paged(things: Iterable[_T]) -> Iterator[list[_T]]:
    """Yields `things` in lists of at most PAGE, as many as one call may carry."""
    rest = iter(things)
    while page := list(islice(rest, PAGE)):
        yield page


def amount_of(accounts: Iterable[Account]) -> Amount:
    """Returns what the namespaces of these accounts hold together."""
    usages = [account.usage for account in accounts]
    return Amount(
        segments=sum(usage.segments for usage in usages),
        blocks=sum(usage.blocks for usage in usages),
        stored_bytes=sum(usage.nbytes for usage in usages),
    )


def summary_of_segment(name: NamespaceId, listing: Listing) -> SegmentSummary:
    """Returns a segment's line in a report, from the index's record."""
    record = listing.record
    return SegmentSummary(
        namespace=name,
        segment=listing.segment.hex(),
        slots=record.slots,
        stored_bytes=record.nbytes,
        created_s=record.created_s,
        last_use_s=listing.last_use_s,
        depth=record.depth,
        codec=record.codec,
        ranks=len(record.parts),
        pinned=listing.pinned,
        cost_us=record.cost_us,
    )
