"""The survey: the payloads that the payload store lists, page by page beside what the index knows of them.

A listing is kept small because there may be millions of payloads.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from kvstore.admin.counting import paged
from kvstore.admin.progress import ProgressListener
from kvstore.index.maintenance import Catalogue, SegmentState
from kvstore.keys import NamespaceId, SegmentId, parse_payload_name, payload_name
from kvstore.payloads.port import PayloadStore

#: Payloads between two calls of the progress.
_EVERY = 1000


@dataclass(frozen=True, slots=True)
class StoredSegment:
    """The payloads of one segment as they were listed."""

    segment: SegmentId
    #: Bytes by rank.
    sizes: dict[int, int]
    #: When the youngest and the oldest of them were written, unix seconds.
    modified_s: float
    oldest_s: float

    @property
    def nbytes(self) -> int:
        """Bytes of all ranks together."""
        return sum(self.sizes.values())


class Stock:
    """The payloads of one namespace, 26 bytes each. Call `settle` when all are added, then ask."""

    def __init__(self) -> None:
        self._segments, self._ranks = array("Q"), array("H")
        self._sizes, self._modified = array("Q"), array("d")
        self._ids = np.empty(0, np.uint64)
        self._order = np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads."""
        return sum(self._sizes)

    def add(self, segment: SegmentId, rank: int, nbytes: int, modified_s: float) -> None:
        """Adds one payload."""
        self._segments.append(int.from_bytes(segment, "big"))
        self._ranks.append(rank)
        self._sizes.append(nbytes)
        self._modified.append(modified_s)

    def settle(self) -> None:
        """Sorts the payloads; from now on they can be asked for, and none may be added."""
        ids = np.array(self._segments, np.uint64)
        self._order = np.argsort(ids, kind="stable")
        self._ids = ids[self._order]

    def of(self, segment: SegmentId) -> StoredSegment:
        """Returns the payloads of one segment, with empty `sizes` if there are none."""
        number = np.uint64(int.from_bytes(segment, "big"))
        first = np.searchsorted(self._ids, number, side="left")
        end = np.searchsorted(self._ids, number, side="right")
        return self._stored(segment, int(first), int(end))

    def besides(self, seen: array[int]) -> Iterator[StoredSegment]:
        """Yields every segment whose number is not in `seen`, by id."""
        known = np.isin(self._ids, np.array(seen, np.uint64))
        for stored in self.segments():
            if not known[np.searchsorted(self._ids, np.uint64(int.from_bytes(stored.segment, "big")))]:
                yield stored

    def segments(self) -> Iterator[StoredSegment]:
        """Yields every segment, by id."""
        ends = [*np.flatnonzero(np.diff(self._ids)) + 1, len(self._ids)]
        first = 0
        for end in map(int, ends):
            if end > first:
                segment = SegmentId(int(self._ids[first]).to_bytes(8, "big"))
                yield self._stored(segment, first, end)
            first = end

    def _stored(self, segment: SegmentId, first: int, end: int) -> StoredSegment:
        rows = [int(row) for row in self._order[first:end]]
        sizes = {self._ranks[row]: self._sizes[row] for row in rows}
        times = [self._modified[row] for row in rows] or [0.0]
        return StoredSegment(segment, sizes, max(times), min(times))


def take_stock(
    payloads: PayloadStore, progress: ProgressListener, prefixes: Sequence[str] = ()
) -> dict[NamespaceId, Stock]:
    """Returns the payloads whose names start with one of `prefixes`, or all, of every namespace that has any.
    Raises what the listing raises."""
    progress.begin("list payloads")
    found: dict[NamespaceId, Stock] = {}
    count, nbytes = 0, 0
    # Without prefixes that start with another one: no payload is listed twice.
    within = {one for one in prefixes if any(one != other and one.startswith(other) for other in prefixes)}
    for listed in chain.from_iterable(map(payloads.list, sorted({*prefixes} - within) or [""])):
        name = parse_payload_name(listed.name)
        # A rank is one byte of a record: a name with a larger one belongs to no segment.
        if name is None or name[2] > 0xFF:
            continue
        found.setdefault(name[0], Stock()).add(name[1], name[2], listed.nbytes, listed.modified_s)
        count, nbytes = count + 1, nbytes + listed.nbytes
        if count % _EVERY == 0:
            progress.advance(nbytes)
            nbytes = 0
    for stock in found.values():
        stock.settle()
    return found


def surveyed(
    index: Catalogue | None, name: NamespaceId, segments: Iterable[StoredSegment]
) -> Iterator[tuple[StoredSegment, SegmentState | None]]:
    """Yields each segment with its state in the index, which is asked a page at a time; None: it knows
    nothing of the segment, or there is no index. Raises what the index raises."""
    for page in paged(segments):
        ids = [stored.segment for stored in page]
        yield from zip(page, index.states(name, ids) if index else [None] * len(page), strict=True)


def look_up(payloads: PayloadStore, namespace: NamespaceId, segment: SegmentId) -> StoredSegment:
    """Lists the payloads of one segment now. Raises what the listing raises."""
    stem = payload_name(namespace, segment, 0).removesuffix("0")
    sizes: dict[int, int] = {}
    times: list[float] = []
    for listed in payloads.list(stem):
        name = parse_payload_name(listed.name)
        if name is not None and name[2] <= 0xFF:
            sizes[name[2]] = listed.nbytes
            times.append(listed.modified_s)
    return StoredSegment(segment, sizes, max(times, default=0.0), min(times, default=0.0))
