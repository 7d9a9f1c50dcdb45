"""How a long verb reports how far it is, to something that may show it."""

from __future__ import annotations

from typing import Protocol


class ProgressListener(Protocol):
    """A listener to a verb's progress, called by one thread at a time."""

    def begin(self, what: str, total_bytes: int | None = None) -> None:
        """Begins a stage and ends the one before. `total_bytes` is None if its length is unknown."""

    def advance(self, nbytes: int) -> None:
        """Adds to the bytes of this stage that are done."""


class Silent:
    """A progress that shows nothing."""

    def begin(self, what: str, total_bytes: int | None = None) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        pass
