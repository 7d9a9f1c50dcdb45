"""Which segments go: the order of eviction, and how several quotas are met at once. Pure code.

The order inside a namespace is that of

    keep = minute of the last use + WORTH_MINUTES * worth      ascending
    depth in its chain                                         descending: tails before heads
    minute of the last use                                     ascending
    segment id                                                 ascending

`worth` is 0 for blocks of a chain, so that no head goes before its tail because its cost was measured on a
busier day. An encoder item stands alone, and its worth is that of its own cost. Across namespaces, where a
whole chain is worth the same, a namespace of chains is moved by the worth of its average (`shift_s`).

    worth = log2(1 + microseconds to compute / KiB), from 0 to 15

so each doubling of what a byte costs to compute is worth ten minutes of not being used. GreedyDual-Size (Cao
and Irani, 1997) adds cost / size to a clock that moves with every eviction; here the clock is time, which all
processes share without writing it, and the logarithm keeps an outlier from staying for a week.

What was used in the last `fresh_s` goes only if nothing else is left in the quota's scope. Pinned segments
don't go. A quota is met in three scopes, the smallest first: a namespace, a tenant, the store. Above `high`
of it as much goes as brings it down to `low`.

The plan says how many bytes each namespace keeps, not which segments go; the index drops the first of its
order until it holds no more than that. So a plan that two processes carry out at once evicts what one of
them would have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import merge
from math import ceil, log2

from kvstore.catalogue import Candidate, Usage
from kvstore.keys import NamespaceId

MINUTE_S = 60
WORTH_MINUTES = 10
MAX_WORTH = 15


def worth(cost_us: int, nbytes: int) -> int:
    """What the cost of computing `nbytes` adds to their last use, in units of WORTH_MINUTES."""
    return min(MAX_WORTH, int(log2(1 + cost_us * 1024 / nbytes))) if nbytes > 0 else 0


class Scope:
    """How a quota's scope is spelled."""

    STORE = "store"

    @staticmethod
    def tenant(name: str) -> str:
        return f"tenant/{name}"

    @staticmethod
    def namespace(name: str) -> str:
        return f"namespace/{name}"


#: Ghosts are counted by how many bytes more would have kept them, in steps of a fourth root of two.
GHOST_LEAST = 1 << 26
GHOST_STEPS = 4


def ghost_step(evicted_bytes: int) -> int:
    """The step for a segment since whose eviction so many bytes were evicted, its own included."""
    return max(0, ceil(GHOST_STEPS * log2(evicted_bytes / GHOST_LEAST))) if evicted_bytes > 0 else 0


def ghost_bytes(step: int) -> int:
    """The capacity that a step stands for."""
    return round(GHOST_LEAST * 2 ** (step / GHOST_STEPS))


@dataclass(frozen=True, slots=True)
class Holder:
    """A namespace in the plan of one quota."""

    namespace: NamespaceId
    #: What its average block is worth, for namespaces of chains.
    shift_s: float
    #: The first of its order, and whether there are more.
    first: Sequence[Candidate]
    more: bool


def shift_s(kind: str, usage: Usage) -> float:
    """By how much a namespace's whole order is moved against others'."""
    return worth(usage.cost_us, usage.nbytes) * WORTH_MINUTES * MINUTE_S if kind == "kv" else 0.0


def plan(holders: Sequence[Holder], excess: int, *, spare_from_s: float | None) -> dict[NamespaceId, int]:
    """How many bytes each namespace gives so that together they give `excess`.

    The merge of their orders, without what was used at or after `spare_from_s`. It ends early where a
    namespace has more than is known of it here: the rest is for the next plan.
    """
    given: dict[NamespaceId, int] = {}
    left = excess
    for number, candidate in _merged(holders, spare_from_s):
        if left <= 0:
            break
        if candidate is None:
            if given:
                break
            # All that is known of this one is spared: that must not spare what others have used long ago.
            continue
        name = holders[number].namespace
        given[name] = given.get(name, 0) + candidate.nbytes
        left -= candidate.nbytes
    return given


def _merged(holders: Sequence[Holder], spare_from_s: float | None) -> Iterator[tuple[int, Candidate | None]]:
    """The holders' candidates in one order; None where one holder's are at an end, but not its segments."""

    def queue(number: int, holder: Holder) -> Iterator[tuple[float, int, int, Candidate | None]]:
        at = float("-inf")
        for place, candidate in enumerate(holder.first):
            at = candidate.keep_s + holder.shift_s
            if spare_from_s is None or candidate.used_s < spare_from_s:
                yield at, number, place, candidate
        if holder.more and at > float("-inf"):
            yield at, number, len(holder.first), None

    queues = (queue(number, holder) for number, holder in enumerate(holders))
    for _, number, _, candidate in merge(*queues, key=lambda item: item[:3]):
        yield number, candidate
