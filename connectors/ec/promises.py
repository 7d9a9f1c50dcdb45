"""Promised items: pinned in the staging folder from the promise until the workers have taken them.

    promised   until the scheduler's pass ends; an item that it does not schedule after all is asked for again
    loading    handed to the workers, until they report it; if the step never reaches one, for `_PIN_S`

One promise serves all requests for the item in a pass. Clients may give it several names in one request; the
workers load it under each name and report it once.

vLLM ends the engine over an item that does not come. So the file of an item that the workers load is kept
open here, too: they find it even after somebody has emptied the folder.

Everything here runs on the scheduler's thread.
"""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import replace

from connectors.ec.messages import StagedItem
from connectors.ec.staging import StagingFolder
from kvstore.keys import ContentKey

#: Time after which a pin ends whose release was lost, in seconds.
_PIN_S = 60.0


class Promises:
    """Pins the items that this engine has promised, and remembers what size each must have."""

    def __init__(self, staging: StagingFolder, hidden: int) -> None:
        """`hidden` is the width of the language model; an item's width is a multiple of it."""
        self._staging = staging
        self._hidden = hidden
        #: Sizes (rows, width if known) that the requests of this pass expect.
        self._expected: dict[ContentKey, tuple[int, int | None]] = {}
        #: Staged items that were promised in this pass, by name, and are pinned: as they were handed to the
        #: workers, if they were.
        self._promised: dict[str, StagedItem | None] = {}
        #: Loads handed to the workers, oldest first: (name, its descriptor or None, when its pin ends).
        self._loading: dict[ContentKey, deque[tuple[str, int | None, float]]] = {}

    def expect(self, key: ContentKey, rows: int, width: int | None) -> None:
        """Remember for this pass what size a request expects an item to have."""
        if self._expected.setdefault(key, (rows, width)) != (rows, width):
            # One item of two sizes in one pass, by a forged digest: what is staged is wrong for a request.
            self._expected[key] = (-1, None)

    def fits(self, key: ContentKey, staged: StagedItem | None) -> bool:
        """Returns whether a staged item has the size that is expected in this pass."""
        rows, width = self._expected.get(key, (-1, None))
        if staged is None or staged.rows != rows:
            return False
        # DeepStack levels are packed side by side: unless vLLM has told the width, any multiple will do.
        return staged.width == width if width else staged.width % self._hidden == 0

    def make(self, name: str) -> bool:
        """Pin a staged item until the end of this pass; False if it has gone."""
        if name not in self._promised:
            if not self._staging.pin(name):
                return False
            self._promised[name] = None
        return True

    def hand_over(self, staged: StagedItem, name: str) -> StagedItem | None:
        """Keep a promised item until the workers report its load. Returns the item as the workers load it,
        or None if no pass promised the item."""
        handed = self._promised.get(name)
        if handed is not None or name not in self._promised:
            return handed
        held = self._staging.open(name)
        self._loading.setdefault(staged.key, deque()).append((name, held, time.monotonic() + _PIN_S))
        handed = staged if held is None else replace(staged, spare=f"/proc/{os.getpid()}/fd/{held}")
        self._promised[name] = handed
        return handed

    def taken(self, key: ContentKey) -> None:
        """Let go of an item that the workers have loaded."""
        if pins := self._loading.get(key):
            self._let_go(pins)
            if not pins:
                del self._loading[key]

    def _let_go(self, pins: deque[tuple[str, int | None, float]]) -> None:
        name, held, _ = pins.popleft()
        self._staging.unpin(name)
        if held is not None:
            os.close(held)

    def end_pass(self) -> None:
        """End the pins of requests that were not scheduled, and those whose release was lost."""
        self._expected.clear()
        promised, self._promised = self._promised, {}
        for name, handed in promised.items():
            if handed is None:
                self._staging.unpin(name)
        now = time.monotonic()
        for key in [one for one, pins in self._loading.items() if pins[0][2] < now]:
            # The others of this key are on their way to the workers, the last perhaps with this very pass.
            while (pins := self._loading.get(key)) and pins[0][2] < now:
                self.taken(key)

    def close(self) -> None:
        """Let go of all items: the engine ends."""
        for pins in self._loading.values():
            while pins:
                self._let_go(pins)
        self._loading.clear()
