"""One listing of the payload store, kept small because there may be millions of payloads."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kvstore.admin.progress import ProgressListener
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
    #: When the youngest of them was written, unix seconds.
    modified_s: float

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
        return StoredSegment(segment, sizes, max((self._modified[row] for row in rows), default=0.0))


def take_stock(
    payloads: PayloadStore, progress: ProgressListener, prefix: str = ""
) -> dict[NamespaceId, Stock]:
    """Returns the payloads whose names start with `prefix`, of every namespace that has any. Raises what the
    listing raises."""
    progress.begin("list payloads")
    found: dict[NamespaceId, Stock] = {}
    count, nbytes = 0, 0
    for listed in payloads.list(prefix):
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


def look_up(payloads: PayloadStore, namespace: NamespaceId, segment: SegmentId) -> StoredSegment:
    """Lists the payloads of one segment now. Raises what the listing raises."""
    stem = payload_name(namespace, segment, 0).removesuffix("0")
    sizes: dict[int, int] = {}
    modified = 0.0
    for listed in payloads.list(stem):
        name = parse_payload_name(listed.name)
        if name is not None and name[2] <= 0xFF:
            sizes[name[2]] = listed.nbytes
            modified = max(modified, listed.modified_s)
    return StoredSegment(segment, sizes, modified)
