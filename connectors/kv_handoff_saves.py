"""Saves of a prompt that is handed over, in a worker, while there is no room for them.

A cache drops such a save. Of a hand-off the block stays where it is, until its request has ended and beyond,
and the save is tried again with each step; the scheduler's half keeps the blocks of a finished request until
this half says that all of them have been read, or it is too late. All on the engine's thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterable, Mapping

from connectors.kv_types import Save


class KeptSaves:
    """Of one worker."""

    def __init__(self, start: Callable[[Save], bool], drop: Callable[[Save], None]) -> None:
        """`start` reads a save's blocks, or answers False for lack of room; `drop` gives it up."""
        self._start = start
        self._drop = drop
        self._saves: list[Save] = []
        #: Finished requests whose blocks are kept -> the monotonic time until which they are.
        self._finished: dict[str, float] = {}

    def keep(self, save: Save) -> bool:
        """Try this one again later, if its blocks stay."""
        if save.blocks_stay:
            self._saves.append(save)
        return save.blocks_stay

    def retry(self) -> None:
        """Once more, in order, as far as there is room."""
        while self._saves and self._start(self._saves[0]):
            del self._saves[0]

    def release(self, requests: Iterable[str]) -> None:
        """These requests lose their blocks with this step: what of them could not be read is given up."""
        gone = set(requests)
        if gone and self._saves:
            self._give_up(gone)

    def give_up(self) -> None:
        """All of them: what they would be saved under no longer holds."""
        self._give_up({save.handed_over for save in self._saves})

    def finished(self, requests: Mapping[str, float]) -> None:
        """These requests have ended; their blocks are kept for so many seconds at most."""
        now = time.monotonic()
        self._finished.update({name: now + seconds for name, seconds in requests.items()})

    def take_read(self) -> set[str]:
        """Finished requests whose blocks needn't be kept any more. Each is named once."""
        if not self._finished:
            return set()
        now = time.monotonic()
        self._give_up({name for name, end in self._finished.items() if now >= end})
        waiting = {save.handed_over for save in self._saves}
        read = {name for name in self._finished if name not in waiting}
        for name in read:
            del self._finished[name]
        return read

    def _give_up(self, requests: Container[str | None]) -> None:
        rest = []
        for save in self._saves:
            if save.handed_over in requests:
                self._drop(save)
            else:
                rest.append(save)
        self._saves = rest
