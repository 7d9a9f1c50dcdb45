"""The prefix match: which leading blocks of a hash chain are stored, in one look-up per segment.

The digests form a hash chain, so equal digests mean equal prefixes. An entry (segment S, slot s) found
for block j therefore proves that slots 0..s of S are blocks j-s..j of this very chain, whatever the
entries of those blocks say by now. So the walk looks at the block where it expects a segment to end,
takes everything that this one entry proves, and continues backwards over what is left in between:

    served ....|begin                        goal|        end (first block known to be missing)
                        <-------- S, slot s -----|   proves j-s..j
               <--- T, slot t ---|                   next look-up, at j-s-1

Only when it meets a missing block does it look more closely: first at `begin`, which settles the common
case (nothing more is stored) at once, then by bisection. No block is ever looked up twice, so a call
costs at most one look-up per block, and about one per segment where the chain is stored in runs.

A block is "present" here if its own entry exists and names a visible segment. The walk promises:

    - every block it returns is in the visible segment and slot that it names;
    - it returns at least the longest prefix of present blocks;
    - it may return more: blocks whose own entries were overwritten by a copy that was evicted since, or
      are missing, but that another entry proves to be in a visible segment.

kvstore/index/scripted/lua/walk.lua is the same algorithm inside Redis; tests/index/test_walk.py holds both
against an oracle.
"""

from __future__ import annotations

from collections.abc import Callable

from kvstore.index.port import MOST_RUNS, Run
from kvstore.keys import SegmentId
from schemas.records import SegmentRecord

#: Slots that a segment is expected to have before the walk has seen one: the default of
#: `segment.max_blocks`. A guess too large costs one look-up past the end, one too small a few on the way.
EXPECTED_SLOTS = 64

Lookup = Callable[[int], tuple[SegmentId, int] | None]
Alive = Callable[[SegmentId], SegmentRecord | None]


def walk(blocks: int, lookup: Lookup, alive: Alive, *, expected: int = EXPECTED_SLOTS) -> list[Run]:
    """Returns the longest servable prefix of a chain of `blocks` blocks, as runs that follow each other: the
    first MOST_RUNS of them.

    `lookup(position)` returns the entry of one block, `alive(segment)` the record of a visible segment;
    both return None for what isn't there. `lookup` is called at most once per position, `alive` may
    be called repeatedly. Adjacent slots of one segment are one run. `expected` is a guess of how many
    slots segments have; it changes the cost, never the promise.
    """
    state = _Walk(blocks, lookup, alive, expected)
    state.search()
    return state.runs[:MOST_RUNS]


class _Walk:
    """The walk's state: `runs` serve the blocks before `begin`; block `end`, if there is one, is missing."""

    def __init__(self, blocks: int, lookup: Lookup, alive: Alive, expected: int) -> None:
        self.runs: list[Run] = []
        self._begin = 0
        self._end = blocks
        #: Slots that the next segment is expected to have, and those of the last one whose end is known.
        self._slots = self._last = expected
        self._lookup = lookup
        self._alive = alive

    def search(self) -> None:
        """Moves `begin` and `end` towards each other until they meet."""
        while self._begin < self._end:
            if self._serve(min(self._expected_end(), self._end - 1)):
                continue
            if self._begin == self._end or not self._serve(self._begin):
                return
            while self._begin < self._end:
                self._serve((self._begin + self._end) // 2)

    def _expected_end(self) -> int:
        """Returns the block at which the segment that holds block `begin` probably ends.

        Sizes hardly vary inside a chain, except for a short segment here and there, so the larger one of
        the last two is the best guess. A longer segment doubles it until its end is found.
        """
        last = self.runs[-1].slot + self.runs[-1].count if self.runs else 0
        rest = self._slots - last if last < self._slots else self._slots
        return self._begin + rest - 1

    def _serve(self, goal: int) -> bool:
        """Serves blocks `begin`..`goal` and returns True, or finds a missing one and makes it `end`."""
        runs: list[Run] = []
        position = goal
        while position >= self._begin:
            entry = self._lookup(position)
            record = self._alive(entry[0]) if entry else None
            if entry is None or record is None:
                self._end = position
                return False
            segment, slot = entry
            count = min(slot, position - self._begin) + 1
            runs.append(Run(position - count + 1, segment, slot - count + 1, count, record))
            position -= count
        for left, run in zip(range(len(runs) - 1, -1, -1), reversed(runs), strict=True):
            self._append(run, ends=left > 0)
        self._begin = goal + 1
        if len(self.runs) >= MOST_RUNS:
            self._end = self._begin
        return True

    def _append(self, run: Run, *, ends: bool) -> None:
        """Appends a run; `ends`: its segment has nothing more of this chain."""
        last = self.runs[-1] if self.runs else None
        if last and last.segment == run.segment and last.slot + last.count == run.slot:
            run = Run(last.start, last.segment, last.slot, last.count + run.count, last.record)
            self.runs.pop()
        self.runs.append(run)
        size = run.slot + run.count
        self._slots = max(self._last if ends else self._slots, size)
        if ends:
            self._last = size
