"""The index's entries held against what the payloads' headers say: of millions of blocks, in arrays.

26 bytes per block and side; sorting them takes about twice that for a moment.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.catalogue import Entry
from kvstore.keys import DIGEST_BYTES, SEGMENT_ID_BYTES, Digest, SegmentId

#: Fixed-width strings compare byte by byte; that trailing zeros don't count makes no two of one width equal.
_DIGEST = np.dtype(f"S{DIGEST_BYTES}")
_Strings = npt.NDArray[np.bytes_]
_Numbers = npt.NDArray[np.uint64]


class Blocks:
    """Blocks and where they lie, in the order of adding."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._segments, self._slots = array("Q"), array("H")

    def __len__(self) -> int:
        return len(self._slots)

    def add_entry(self, entry: Entry) -> None:
        """One entry of the index."""
        self._digests += entry.digest
        self._segments.append(int.from_bytes(entry.segment, "big"))
        self._slots.append(entry.slot)

    def add_segment(self, segment: SegmentId, digests: bytes) -> None:
        """All slots of a segment, by its packed digests."""
        count = len(digests) // DIGEST_BYTES
        self._digests += digests
        self._segments.extend([int.from_bytes(segment, "big")] * count)
        self._slots.extend(range(count))

    @property
    def digests(self) -> _Strings:
        """A view; nothing may be added while it lives."""
        return np.frombuffer(self._digests, _DIGEST)

    @property
    def segments(self) -> _Numbers:
        """As `digests`; ids as numbers."""
        return np.frombuffer(self._segments, np.uint64)

    @property
    def slots(self) -> npt.NDArray[np.uint16]:
        """As `digests`."""
        return np.frombuffer(self._slots, np.uint16)

    @property
    def places(self) -> _Strings:
        """Digest, segment and slot of each as one string; a copy."""
        rows = np.empty(
            len(self), np.dtype([("digest", _DIGEST), ("segment", np.uint64), ("slot", np.uint16)])
        )
        rows["digest"], rows["segment"], rows["slot"] = self.digests, self.segments, self.slots
        return rows.view(np.dtype(f"S{rows.dtype.itemsize}"))

    def entry(self, row: int) -> Entry:
        """One of them."""
        at = row * DIGEST_BYTES
        digest = Digest(bytes(self._digests[at : at + DIGEST_BYTES]))
        return Entry(digest, SegmentId(self._segments[row].to_bytes(8, "big")), self._slots[row])


@dataclass(frozen=True, slots=True)
class Differences:
    """Between the entries and the truth."""

    #: Blocks that no entry leads to: segment -> packed digests. Of several segments that hold a block, one.
    hidden: dict[SegmentId, bytes] = field(default_factory=dict)
    #: Entries that lead into a segment, but to another block or past its end.
    astray: list[Entry] = field(default_factory=list)
    #: Entries that lead to segments that are neither good nor bad: to nothing.
    elsewhere: int = 0


def compare(entries: Blocks, truth: Blocks, bad: Collection[SegmentId] = ()) -> Differences:
    """`truth` holds every slot of every segment that is known to be good, `bad` are known not to be."""
    # An entry may be listed twice, and a block be stored twice: each entry is judged by itself.
    good = np.isin(entries.places, truth.places)
    served = np.isin(truth.digests, entries.digests[good])
    return Differences(
        _by_segment(truth, np.flatnonzero(~served)),
        *_wrong(entries, np.flatnonzero(~good), np.unique(truth.segments), bad),
    )


def _by_segment(truth: Blocks, rows: npt.NDArray[np.intp]) -> dict[SegmentId, bytes]:
    """Each digest of these rows once, with the first segment that holds it."""
    _, first = np.unique(truth.digests[rows], return_index=True)
    hidden: dict[SegmentId, bytearray] = {}
    for row in np.sort(rows[first]):
        entry = truth.entry(int(row))
        hidden.setdefault(entry.segment, bytearray()).extend(entry.digest)
    return {segment: bytes(digests) for segment, digests in hidden.items()}


def _wrong(
    entries: Blocks, rows: npt.NDArray[np.intp], good: _Numbers, bad: Collection[SegmentId]
) -> tuple[list[Entry], int]:
    where = entries.segments[rows]
    inside = np.isin(where, good)
    known = inside | np.isin(where, np.array([int.from_bytes(one, "big") for one in bad], np.uint64))
    return [entries.entry(int(row)) for row in rows[inside]], int(np.count_nonzero(~known))


def collect(entries: Iterable[Entry]) -> Blocks:
    """All of them, without those that are none by their form: no match takes them for one."""
    blocks = Blocks()
    for entry in entries:
        if (len(entry.digest), len(entry.segment)) == (DIGEST_BYTES, SEGMENT_ID_BYTES):
            blocks.add_entry(entry)
    return blocks
