"""Keeps the saves that find no room, in a worker, while their blocks stay where they are.

Each is tried again with every step, in order, so that what waits is always the last of what its request has
to save. What comes after a block that is given up is given up with it, whoever computed it: behind a hole
nobody would find it. A running request's blocks are its own. The scheduler
half keeps those of a finished one (connectors.kv.planner) until this half reports that all of them have been
read, or it is too late. Everything here belongs to the engine's thread.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Final

from connectors.kv.messages import Save
from kvstore.keys import SegmentId

#: How many segments are remembered after they were given up.
_MOST_DROPPED: Final = 4096


class KeptSaves:
    """Keeps one worker's saves, in order, until there is room or their blocks are taken."""

    def __init__(self, start: Callable[[Save], bool | None], drop: Callable[[Save], None]) -> None:
        """`start` reads a save's blocks; it returns False for lack of room, and None if there will never be
        any. `drop` gives a save up."""
        self._start = start
        self._drop = drop
        self._saves: deque[Save] = deque()
        #: The segments that were given up last, of which the scheduler half may not know yet.
        self._dropped: dict[SegmentId, None] = {}
        #: Finished requests whose blocks are kept -> the monotonic time until which they are.
        self._finished: dict[str, float] = {}

    @property
    def blocks(self) -> int:
        """Returns how many blocks wait."""
        return sum(len(save.hashes) for save in self._saves)

    def add(self, saves: Iterable[Save]) -> None:
        """Start these saves after all that wait, as far as there is room."""
        self._saves.extend(saves)
        while self._saves:
            began = None if self.is_behind_a_hole(self._saves[0]) else self._start(self._saves[0])
            if began is False:
                break
            save = self._saves.popleft()
            if began is None:
                self.drop(save)

    def is_behind_a_hole(self, save: Save) -> bool:
        """Returns whether the block before a save's was given up."""
        return save.after in self._dropped

    def drop(self, save: Save) -> None:
        """Give up a save, and with it all that comes after its blocks."""
        self._dropped[save.segment] = None
        if len(self._dropped) > _MOST_DROPPED:
            del self._dropped[next(iter(self._dropped))]
        self._drop(save)

    def release(self, requests: Iterable[str]) -> None:
        """Give up the kept saves of these requests, which lose their blocks with this step."""
        gone = set(requests)
        if gone and self._saves:
            self._give_up(gone)

    def give_up(self) -> None:
        """Give up all kept saves: the namespace that they were meant for no longer holds."""
        self._give_up({save.request_id for save in self._saves})

    def finished(self, requests: Mapping[str, float]) -> None:
        """Take requests that have ended -> for how many seconds at most their blocks are kept."""
        now = time.monotonic()
        self._finished.update({name: now + seconds for name, seconds in requests.items()})

    def take_read(self) -> set[str]:
        """Returns finished requests whose blocks needn't be kept any more, each once."""
        if not self._finished:
            return set()
        now = time.monotonic()
        self._give_up({name for name, end in self._finished.items() if now >= end})
        waiting = {save.request_id for save in self._saves}
        read = {name for name in self._finished if name not in waiting}
        for name in read:
            del self._finished[name]
        return read

    def _give_up(self, requests: Container[str]) -> None:
        rest: deque[Save] = deque()
        for save in self._saves:
            if save.request_id in requests or self.is_behind_a_hole(save):
                self.drop(save)
            else:
                rest.append(save)
        self._saves = rest
