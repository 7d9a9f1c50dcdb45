"""How a long verb says how far it is, to whoever wants to show it."""

from __future__ import annotations

from typing import Protocol


class Progress(Protocol):
    """Told by one thread at a time."""

    def begin(self, what: str, total_bytes: int | None = None) -> None:
        """A new stage, which ends the one before; `total_bytes` None: no telling how long it is."""

    def advance(self, nbytes: int) -> None:
        """So many bytes more of this stage are done."""


class Silent:
    """Shows nothing."""

    def begin(self, what: str, total_bytes: int | None = None) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        pass
