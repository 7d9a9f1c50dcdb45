"""A row of the fault matrix: one fault, what was done meanwhile, and what became of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

#: What a row was run on. `engine`: a real vLLM engine. `scheduler`: vLLM's real scheduler and our connector,
#: without a model. `store`: the store alone, where no engine could tell the difference.
Reach = Literal["engine", "scheduler", "store"]


@dataclass
class Result:
    """What one row saw. Every count but the first two must be 0, and `added_s` within `bound_s`."""

    #: How often the fault was made, and how many requests (or saves and loads) were under way or came
    #: meanwhile.
    faults: int = 0
    requests: int = 0
    wrong_tokens: int = 0
    engines_lost: int = 0
    #: Blocks that were committed, not damaged by the fault itself, and can't be served afterwards.
    lost_blocks: int = 0
    #: Payloads, claims, threads, files, staging or block references that nothing frees afterwards.
    leaked: int = 0
    #: The longest that a request took beyond the same request without a store, in seconds, and the bound that
    #: the settings promise for it.
    added_s: float = 0.0
    bound_s: float = 0.0
    #: What a reader should know besides.
    remark: str = ""

    @property
    def holds(self) -> bool:
        """Whether the promises were kept, and the fault was really there."""
        kept = not (self.wrong_tokens or self.engines_lost or self.lost_blocks or self.leaked)
        return kept and self.faults > 0 and self.requests > 0 and self.added_s <= self.bound_s


@dataclass(frozen=True)
class Row:
    """A fault that can be made, in a temporary folder of its own."""

    #: Which part fails ("index", "payloads", "processes", "partitions", "versions") and how, in words.
    family: str
    fault: str
    reach: Reach
    run: Callable[[Path], Result]
    #: Takes seconds, so the suite runs it. The command runs all of them.
    quick: bool = field(default=False)
