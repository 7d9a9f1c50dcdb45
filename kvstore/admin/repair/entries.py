"""Comparison of the index's entries with what the payloads' headers say, in arrays: there may be millions.

Each side takes 26 bytes per block; sorting takes about twice that for a moment.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.index.maintenance import Entry
from kvstore.keys import DIGEST_BYTES, SEGMENT_ID_BYTES, Digest, SegmentId

#: Fixed-width strings compare byte by byte. That trailing zeros don't count makes no two of one width equal.
_DIGEST = np.dtype(f"S{DIGEST_BYTES}")
_Strings = npt.NDArray[np.bytes_]
_Numbers = npt.NDArray[np.uint64]


class Blocks:
    """Digests of blocks with their segments and slots, in the order in which they were added."""

    def __init__(self) -> None:
        self._digests = bytearray()
        self._segments, self._slots = array("Q"), array("H")

    def __len__(self) -> int:
        return len(self._slots)

    def add_entry(self, entry: Entry) -> None:
        """Adds one entry of the index."""
        self._digests += entry.digest
        self._segments.append(int.from_bytes(entry.segment, "big"))
        self._slots.append(entry.slot)

    def add_segment(self, segment: SegmentId, digests: bytes) -> None:
        """Adds all slots of a segment, given its packed digests."""
        count = len(digests) // DIGEST_BYTES
        self._digests += digests
        self._segments.extend([int.from_bytes(segment, "big")] * count)
        self._slots.extend(range(count))

    @property
    def digests(self) -> _Strings:
        """The digests, as a view: nothing may be added while it lives."""
        return np.frombuffer(self._digests, _DIGEST)

    @property
    def segments(self) -> _Numbers:
        """The segments' ids as numbers, as a view like `digests`."""
        return np.frombuffer(self._segments, np.uint64)

    @property
    def slots(self) -> npt.NDArray[np.uint16]:
        """The slots, as a view like `digests`."""
        return np.frombuffer(self._slots, np.uint16)

    @property
    def places(self) -> _Strings:
        """Digest, segment and slot of each block as one string, as a copy."""
        rows = np.empty(
            len(self), np.dtype([("digest", _DIGEST), ("segment", np.uint64), ("slot", np.uint16)])
        )
        rows["digest"], rows["segment"], rows["slot"] = self.digests, self.segments, self.slots
        return rows.view(np.dtype(f"S{rows.dtype.itemsize}"))

    def entry(self, row: int) -> Entry:
        """Returns the block in this row as an entry."""
        at = row * DIGEST_BYTES
        digest = Digest(bytes(self._digests[at : at + DIGEST_BYTES]))
        return Entry(digest, SegmentId(self._segments[row].to_bytes(8, "big")), self._slots[row])


@dataclass(frozen=True, slots=True)
class Differences:
    """The differences between the entries and the truth."""

    #: Packed digests of blocks that no entry leads to, by segment: one of those that hold the block.
    hidden: dict[SegmentId, bytes] = field(default_factory=dict)
    #: Entries that lead into a segment, but to another block or past its end.
    astray: list[Entry] = field(default_factory=list)
    #: The number of dangling entries: their segments are neither good nor bad.
    elsewhere: int = 0


def compare(entries: Blocks, truth: Blocks, bad: Collection[SegmentId] = ()) -> Differences:
    """Compares entries with `truth`, every slot of every segment that is known to be good.

    `bad` are the segments that are known not to be good.
    """
    # An entry may be listed twice, and a block be stored twice: each entry is judged by itself.
    good = np.isin(entries.places, truth.places)
    served = np.isin(truth.digests, entries.digests[good])
    return Differences(
        _by_segment(truth, np.flatnonzero(~served)),
        *_wrong(entries, np.flatnonzero(~good), np.unique(truth.segments), bad),
    )


def _by_segment(truth: Blocks, rows: npt.NDArray[np.intp]) -> dict[SegmentId, bytes]:
    """Returns each digest of these rows once, with the first segment that holds it."""
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
    """Returns all entries that are well-formed. A match ignores the others."""
    blocks = Blocks()
    for entry in entries:
        if (len(entry.digest), len(entry.segment)) == (DIGEST_BYTES, SEGMENT_ID_BYTES):
            blocks.add_entry(entry)
    return blocks
