"""Comparison of the index's entries with what the payloads' headers say: there may be hundreds of millions.

Both sides are compared part by part: a part is what begins with the same byte, and digests are evenly spread.
What doesn't fit a few megabytes waits in a temporary file (26 bytes a block), in runs that are ordered by
part. So memory holds one part of each side, and 8 bytes for each segment.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO, Any, Self

import numpy as np
import numpy.typing as npt

from kvstore.errors import KVStoreError
from kvstore.index.maintenance import Entry
from kvstore.keys import DIGEST_BYTES, SEGMENT_ID_BYTES, Digest, SegmentId

#: Blocks of one side that wait in memory.
AT_ONCE = 1 << 18
#: Parts that are compared one after the other: one for each first byte of a digest.
_PARTS = 256
#: Fixed-width strings compare byte by byte. That trailing zeros don't count makes no two of one width equal.
_DIGEST = np.dtype(f"S{DIGEST_BYTES}")
_ROW = np.dtype([("digest", _DIGEST), ("segment", np.uint64), ("slot", np.uint16)])
_PLACE = np.dtype(f"S{_ROW.itemsize}")
_Rows = npt.NDArray[Any]
_Numbers = npt.NDArray[np.uint64]


class Blocks:
    """Digests of blocks with their segments and slots. Close it, which drops its file.

    Raises KVStoreError where there is no room for the file. For one thread at a time.
    """

    def __init__(self, at_once: int | None = None) -> None:
        """`at_once` blocks wait in memory; None: AT_ONCE."""
        self._at_once = AT_ONCE if at_once is None else at_once
        self._digests = bytearray()
        self._segments, self._slots = array("Q"), array("H")
        self._whole = array("Q")
        self._file: IO[bytes] | None = None
        #: Rows of the file at which each part of a run begins, and where its last one ends; run by run.
        self._runs: list[npt.NDArray[np.int64]] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Drops the file. Idempotent."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    def add_entry(self, entry: Entry) -> None:
        """Adds one entry of the index."""
        self._digests += entry.digest
        self._segments.append(int.from_bytes(entry.segment, "big"))
        self._slots.append(entry.slot)
        self._added(1)

    def add_segment(self, segment: SegmentId, digests: bytes) -> None:
        """Adds all slots of a segment, given its packed digests."""
        count, number = len(digests) // DIGEST_BYTES, int.from_bytes(segment, "big")
        self._whole.append(number)
        self._digests += digests
        self._segments.extend([number] * count)
        self._slots.extend(range(count))
        self._added(count)

    @property
    def whole(self) -> _Numbers:
        """The ids of all segments that were added, as numbers, in order."""
        return np.unique(np.array(self._whole, np.uint64))

    def parts(self) -> Iterator[_Rows]:
        """Yields the blocks of each part, in the order in which they were added. Nothing may be added
        afterwards."""
        rows, bounds = self._ordered()
        for part in range(_PARTS):
            runs = [self._read(int(run[part]), int(run[part + 1])) for run in self._runs]
            yield np.concatenate([*runs, rows[bounds[part] : bounds[part + 1]]])

    def _added(self, count: int) -> None:
        self._count += count
        if len(self._slots) < self._at_once:
            return
        rows, bounds = self._ordered()
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="kvstore-fsck-")  # noqa: SIM115 (`close` closes it)
            self._file.write(rows.tobytes())
            self._file.flush()  # a full disk is told of here
        except OSError as exc:
            raise KVStoreError(
                f"entries are compared in a temporary file, which takes {2 * _ROW.itemsize} bytes for each "
                f"block ({exc.strerror}); TMPDIR names another folder for it"
            ) from exc
        self._runs.append(bounds + (self._count - len(rows)))
        self._digests.clear()
        self._segments, self._slots = array("Q"), array("H")

    def _ordered(self) -> tuple[_Rows, npt.NDArray[np.int64]]:
        """Returns what is in memory, ordered by part, and where each part begins and the last one ends."""
        first = np.frombuffer(bytes(self._digests[::DIGEST_BYTES]), np.uint8)
        order = np.argsort(first, kind="stable")
        rows = np.empty(len(first), _ROW)
        rows["digest"] = np.frombuffer(bytes(self._digests), _DIGEST)[order]
        rows["segment"] = np.array(self._segments, np.uint64)[order]
        rows["slot"] = np.array(self._slots, np.uint16)[order]
        return rows, np.searchsorted(first[order], np.arange(_PARTS + 1)).astype(np.int64)

    def _read(self, first: int, end: int) -> _Rows:
        assert self._file is not None, "a run is in the file"
        try:
            self._file.seek(first * _ROW.itemsize)
            return np.frombuffer(self._file.read((end - first) * _ROW.itemsize), _ROW)
        except OSError as exc:
            raise KVStoreError(f"the temporary file can't be read: {exc.strerror}") from exc


@dataclass(frozen=True, slots=True)
class Differences:
    """The differences between the entries and the truth."""

    #: Packed digests of blocks that no entry leads to, by segment: one of those that hold the block.
    hidden: dict[SegmentId, bytearray] = field(default_factory=dict)
    #: Entries that lead into a segment, but to another block or past its end.
    astray: list[Entry] = field(default_factory=list)
    #: The number of dangling entries: their segments are neither good nor bad.
    elsewhere: int = 0


def compare(entries: Blocks, truth: Blocks, bad: Collection[SegmentId] = ()) -> Differences:
    """Compares entries with `truth`, every slot of every segment that is known to be good.

    `bad` are the segments that are known not to be good.
    """
    hidden: dict[SegmentId, bytearray] = {}
    astray: list[Entry] = []
    elsewhere = 0
    good = truth.whole
    known = np.union1d(good, np.array([int.from_bytes(one, "big") for one in bad], np.uint64))
    for listed, true in zip(entries.parts(), truth.parts(), strict=True):
        # An entry may be listed twice, and a block be stored twice: each entry is judged by itself.
        right = np.isin(listed.view(_PLACE), true.view(_PLACE))
        _hide(hidden, true[~np.isin(true["digest"], listed["digest"][right])])
        wrong = listed[~right]
        astray += map(_entry, wrong[_among(wrong["segment"], good)])
        elsewhere += int(np.count_nonzero(~_among(wrong["segment"], known)))
    return Differences(hidden, astray, elsewhere)


def _hide(hidden: dict[SegmentId, bytearray], rows: _Rows) -> None:
    """Adds each digest of these rows once, to the first segment that holds it."""
    _, first = np.unique(rows["digest"], return_index=True)
    for entry in map(_entry, rows[np.sort(first)]):
        hidden.setdefault(entry.segment, bytearray()).extend(entry.digest)


def _among(numbers: _Numbers, known: _Numbers) -> npt.NDArray[np.bool_]:
    """Tells of each number whether it is among those `known`, which are in order."""
    if not len(known):
        return np.zeros(len(numbers), np.bool_)
    at = np.minimum(np.searchsorted(known, numbers), len(known) - 1)
    return np.asarray(known[at] == numbers, np.bool_)


def _entry(row: np.void) -> Entry:
    """Returns a row as an entry. A field of its digest would lack trailing zeros."""
    digest = Digest(row.tobytes()[:DIGEST_BYTES])
    return Entry(digest, SegmentId(int(row["segment"]).to_bytes(SEGMENT_ID_BYTES, "big")), int(row["slot"]))


def collect(entries: Iterable[Entry], into: Blocks) -> None:
    """Adds all entries that are well-formed. A match ignores the others."""
    for entry in entries:
        if (len(entry.digest), len(entry.segment)) == (DIGEST_BYTES, SEGMENT_ID_BYTES):
            into.add_entry(entry)
