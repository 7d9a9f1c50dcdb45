"""What an engine weighed when it computed what the store had, as journals carry it and as people read it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

#: How many times as long as computing takes a request waits for a load at most, with the objective
#: `throughput`.
PATIENCE = 4.0

#: Milliseconds to load, milliseconds to compute, and the number of tokens.
_TOLD = re.compile(r"(\d{1,12}) (\d{1,12}) (\d{1,12})", re.ASCII)


@dataclass(frozen=True, slots=True)
class Weighed:
    """What loading and what computing the same tokens was expected to take, in seconds."""

    load_s: float
    compute_s: float
    tokens: int

    def told(self) -> str:
        """Returns the detail of an outcome (kvstore.index.port), which `read` reads, in milliseconds."""
        return f"{self.load_s * 1e3:.0f} {self.compute_s * 1e3:.0f} {self.tokens}"

    @classmethod
    def read(cls, detail: str) -> Self | None:
        """Returns what was told; None if it is something else, of another release."""
        if (found := _TOLD.fullmatch(detail)) is None:
            return None
        load_ms, compute_ms, tokens = map(int, found.groups())
        return cls(load_ms / 1e3, compute_ms / 1e3, tokens)

    def __str__(self) -> str:
        return (
            f"loading {self.tokens:,} tokens was expected to take {self.load_s:.3g} s, "
            f"computing them {self.compute_s:.3g} s"
        )
