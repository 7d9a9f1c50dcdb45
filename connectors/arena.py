"""Runs of bytes in one range that never grows: a caller that takes three blocks' worth has three blocks'
worth.

First fit from the low end, and neighbours that are free are one run again. Runs are given back in any order;
there are a dozen or a few hundred of them, so that a list is enough.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final

#: Runs begin and end at multiples of this, so that any dtype can be viewed at their start.
ALIGNMENT: Final = 64


class Arena:
    """Free and taken runs of a range. For one thread at a time."""

    def __init__(self, size: int) -> None:
        """`size` is in bytes; what is beyond the last multiple of ALIGNMENT isn't used."""
        self.size = size // ALIGNMENT * ALIGNMENT
        #: Starts and ends of free runs, in order; no two of them touch.
        self._starts = [0] if self.size else []
        self._ends = [self.size] if self.size else []
        self._taken: dict[int, int] = {}
        #: Bytes that are taken.
        self.used = 0

    @staticmethod
    def room(nbytes: int) -> int:
        """Returns how many bytes of an arena a run of `nbytes` takes."""
        return max(ALIGNMENT, -(-nbytes // ALIGNMENT) * ALIGNMENT)

    def take(self, nbytes: int) -> int | None:
        """Returns the start of a run of at least `nbytes`, or None if none is free."""
        length = self.room(nbytes)
        for i, start in enumerate(self._starts):
            if self._ends[i] - start >= length:
                break
        else:
            return None
        if self._ends[i] - start == length:
            del self._starts[i], self._ends[i]
        else:
            self._starts[i] += length
        self._taken[start] = length
        self.used += length
        return start

    def give(self, start: int) -> None:
        """Give a run back by its start. Raises KeyError if it is not taken."""
        length = self._taken.pop(start)
        self.used -= length
        end = start + length
        i = bisect_left(self._starts, start)
        if i < len(self._starts) and self._starts[i] == end:
            end = self._ends[i]
            del self._starts[i], self._ends[i]
        if i > 0 and self._ends[i - 1] == start:
            self._ends[i - 1] = end
        else:
            self._starts.insert(i, start)
            self._ends.insert(i, end)
