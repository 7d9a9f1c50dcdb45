"""Reads of runs, side by side on the store's threads, for a caller that waits for all of them.

A read that outlives its deadline goes on writing into the memory it was given. That memory belongs to the
load alone and is never reused; and while such a read hangs, no further load begins: it would most likely hang
too, at the expense of one more step, and what hangs would add up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.errors import KVStoreError
from kvstore.index.port import Run
from kvstore.keys import ContentKey
from kvstore.store.space import Match, Space
from kvstore.store.store import Store


@dataclass(slots=True)
class _Load:
    """One caller's reads; guarded by `Reads._changed`."""

    pending: int
    good: bool = True


class Reads:
    """Loads the runs of a match, for one thread and one load at a time."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._changed = threading.Condition()
        #: Number of reads that have not ended, of this load or of one that was given up.
        self._under_way = 0

    @property
    def hanging(self) -> bool:
        """Returns whether reads of a load that was given up have not ended."""
        with self._changed:
            return self._under_way > 0

    def load(
        self,
        space: Space,
        match: Match,
        keys: Sequence[ContentKey],
        into: Sequence[memoryview],
        *,
        rank: int,
        end: float,
    ) -> bool:
        """Read everything that a match promised, verified; returns by the `time.monotonic` time `end`.

        True if all of it is there. After False the buffers may hold anything, and may still be written to.
        `keys[i]` and `into[i]` belong to block i. Never raises.
        """
        mine = _Load(len(match.runs))
        with self._changed:
            self._under_way += mine.pending
        for run in match.runs:
            job = lambda r=run: self._one(mine, space, r, keys, into, rank, end)  # noqa: E731
            if not self._store.transfers.read(job):
                self._store.counters.miss("capacity", run.count)
                self._ended(mine, good=False)
        with self._changed:
            while mine.pending and (left := end - time.monotonic()) > 0:
                self._changed.wait(left)
            return mine.good and not mine.pending

    def _one(
        self,
        mine: _Load,
        space: Space,
        run: Run,
        keys: Sequence[ContentKey],
        into: Sequence[memoryview],
        rank: int,
        end: float,
    ) -> None:
        """Reads one run. Runs on a transfer thread."""
        blocks, good = slice(run.start, run.start + run.count), False
        try:
            left = max(0.001, end - time.monotonic())
            space.load(run, keys[blocks], into[blocks], rank=rank, deadline_s=left)
            good = True
        except KVStoreError as exc:
            space.not_loaded.note(run.count, exc, run.segment)
        finally:
            self._ended(mine, good=good)

    def _ended(self, mine: _Load, *, good: bool) -> None:
        with self._changed:
            self._under_way -= 1
            mine.pending -= 1
            mine.good = mine.good and good
            self._changed.notify_all()
