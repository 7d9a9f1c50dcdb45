"""Says of every token of a prompt, once, where its KV came from.

    engine     the engine had it: in its own prefix cache, where another request's load may have put it a
               moment before, or by another connector of MultiConnector
    a tier     it was loaded, and its payload lay there when the load was planned (kvstore.rules.tiers)
    computed   all the rest

A whole prompt is counted when its request first gets a turn to compute: from then on only computing can bring
the missing tokens. So the counts of a request always add up to its prompt. Tokens that are computed or loaded
again after a preemption are not counted again. Tokens that an aborted request had still before it stay
counted. A session's prompt grows, and its new tokens are counted with each of its turns.

Where KV cache groups lie in different tiers, the group with most tokens in the load counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from kvstore.rules.tiers import TIERS, Tier

Source = Tier | Literal["engine", "computed"]
SOURCES: Final[tuple[Source, ...]] = ("engine", *TIERS, "computed")
#: The tier of what lies nowhere known.
FARTHEST: Final = TIERS[-1]


@dataclass(slots=True)
class Way:
    """The way of one request's prompt. Belongs to the scheduler's thread."""

    #: Tokens that the engine has itself, as of when the scheduler came to the request last.
    hit: int = 0
    #: Where each part of the load that follows ends, in tokens of the chain, and the tier it comes from.
    loads: Sequence[tuple[int, Tier]] = ()
    #: Leading tokens that are counted.
    counted: int = 0

    def begin(self, hit: int) -> None:
        """Starts anew: the engine has `hit` leading tokens itself, and nothing is to be loaded yet."""
        self.hit, self.loads = hit, ()

    def loading(self) -> dict[Tier, int]:
        """Returns by tier the tokens that the load is to bring."""
        counts: dict[Tier, int] = {}
        at = self.hit
        for stop, tier in self.loads:
            counts[tier] = counts.get(tier, 0) + stop - at
            at = stop
        return counts

    def runs(self, computed: int, prompt: int) -> dict[Source, int]:
        """Returns by source the tokens of a prompt of `prompt` tokens that weren't counted before: the
        request gets its turn with `computed` leading tokens there."""
        counts: dict[Source, int] = {}
        at, there = self.counted, min(computed, prompt)
        parts: list[tuple[int, Source]] = [(min(self.hit, there), "engine")]
        parts += [(min(stop, there), tier) for stop, tier in self.loads]
        for stop, source in (*parts, (there, "engine"), (prompt, "computed")):
            if stop > at:
                counts[source] = counts.get(source, 0) + stop - at
                at = stop
        self.counted = at
        return counts
