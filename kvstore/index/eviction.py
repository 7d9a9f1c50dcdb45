"""The order of eviction, and how several quotas are met at once. Pure code.

The order inside a namespace sorts by

    keep = minute of the last use + WORTH_MINUTES * worth      ascending
    depth in its chain                                         descending: tails before heads
    minute of the last use                                     ascending
    segment id                                                 ascending

Minutes are known to the quarter. What was saved and not used since counts as used half a minute before it was
saved (kvstore.index.contract.saved_minute): what proves to be of use stays longer than what may never be.

`worth` is 0 for blocks of a chain: otherwise a head whose cost was measured on a quiet day would go before
its tail. An encoder item stands alone, and its worth is that of its own cost. In the order across namespaces
every chain of a namespace is worth the same: the whole namespace is moved by the worth of its average
(`shift_s`).

    worth = log2(1 + microseconds to compute / KiB), from 0 to 15

so each doubling of what a byte costs to compute is worth ten minutes of not being used. GreedyDual-Size (Cao
and Irani, 1997) adds cost / size to a clock that moves with every eviction; here the clock is time, which all
processes share without writing it, and the logarithm keeps an outlier from staying for a week.

A segment that was used in the last `fresh_s` goes only if nothing else is left in the quota's scope. Pinned
segments don't go. Quotas are met in these scopes, the smallest first: a salt in one namespace (which
kvstore.store.salts does), a namespace, a tenant, the store. A scope that holds more than the upper of its two
watermarks is brought down to the lower one.

The plan says how many bytes each namespace keeps, not which segments go; the index evicts the first ones of
its order until it holds no more than that. So two processes that carry out the same plan at once evict what
one of them would have evicted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import merge
from math import ceil, log2

from kvstore.index.maintenance import Account, Candidate, Usage
from kvstore.keys import NamespaceId, SaltId

MINUTE_S = 60
WORTH_MINUTES = 10
MAX_WORTH = 15
#: What is left free below a quota when eviction begins: a hundredth, and no more than this. It has to hold
#: what is written while a round of eviction runs, which is a matter of bandwidth and not of capacity: 10 GB/s
#: for a tenth of a second.
ROOM_BYTES = 1 << 30


def watermarks(quota: int) -> tuple[int, int]:
    """Returns how many bytes may be used under a quota before eviction begins, and how many it leaves."""
    room = min(quota // 100, ROOM_BYTES)
    return quota - room, quota - 2 * room


def worth(cost_us: int, nbytes: int) -> int:
    """Returns what the cost of computing `nbytes` adds to their last use, in units of WORTH_MINUTES."""
    return min(MAX_WORTH, int(log2(1 + cost_us * 1024 / nbytes))) if nbytes > 0 else 0


_SALT = re.compile("salt/([0-9a-f]{32})")
_TTL = "ttl/"


class Scope:
    """The names of quotas' scopes."""

    STORE = "store"

    @staticmethod
    def tenant(name: str) -> str:
        return f"tenant/{name}"

    @staticmethod
    def namespace(name: str) -> str:
        return f"namespace/{name}"

    @staticmethod
    def salt(salt: SaltId) -> str:
        return f"salt/{salt.hex()}"

    @staticmethod
    def ttl(scope: str) -> str:
        """Returns the name under which a scope's time to live stands among the quotas, in seconds."""
        return f"{_TTL}{scope}"

    @staticmethod
    def of_ttl(name: str) -> str | None:
        """Returns the scope of a time to live; None for what is a quota."""
        return name.removeprefix(_TTL) if name.startswith(_TTL) else None

    @staticmethod
    def salt_of(scope: str) -> SaltId | None:
        """Returns the salt that a scope names; None if it names none."""
        found = _SALT.fullmatch(scope)
        return SaltId(bytes.fromhex(found[1])) if found else None


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Times to live in seconds: one that holds for all, as the settings have it, and those that operators
    have set, by scope. Each is an upper bound, so of those that a namespace is under the shortest holds.

    Age counts from the second in which a segment was made: a use makes nothing younger, and what is computed
    again is new.
    """

    every: int | None = None
    given: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, every_s: float | None, given: Mapping[str, int]) -> Lifetimes:
        """Returns the settings' (eviction.ttl_s), and those among what operators have set (Quotas.quotas)."""
        found = {scope: seconds for name, seconds in given.items() if (scope := Scope.of_ttl(name))}
        return cls(None if every_s is None else max(1, int(every_s)), found)

    def of_account(self, account: Account) -> int | None:
        """Returns the shortest that a namespace is under; None: it is under none."""
        scopes = (Scope.STORE, Scope.tenant(account.tenant), Scope.namespace(account.namespace))
        known = [self.every, *(self.given.get(scope) for scope in scopes)]
        return min((one for one in known if one is not None), default=None)


#: Ghosts are counted by how many more bytes would have kept them, in steps of the fourth root of two.
GHOST_LEAST = 1 << 26
GHOST_STEPS = 4


def ghost_step(evicted_bytes: int) -> int:
    """Returns the step of a segment, given how many bytes were evicted since, its own included."""
    return max(0, ceil(GHOST_STEPS * log2(evicted_bytes / GHOST_LEAST))) if evicted_bytes > 0 else 0


def ghost_bytes(step: int) -> int:
    """Returns the additional capacity that a step stands for."""
    return round(GHOST_LEAST * 2 ** (step / GHOST_STEPS))


@dataclass(frozen=True, slots=True)
class Holder:
    """A namespace in the plan of one quota."""

    namespace: NamespaceId
    #: What its average block is worth, in seconds; 0 for a namespace of items.
    shift_s: float
    #: The first segments of its order, and whether there are more.
    first: Sequence[Candidate]
    more: bool


def shift_s(kind: str, usage: Usage) -> float:
    """Returns by how many seconds a namespace's whole order is moved against that of others."""
    return worth(usage.cost_us, usage.nbytes) * WORTH_MINUTES * MINUTE_S if kind == "kv" else 0.0


def plan(holders: Sequence[Holder], excess: int, *, spare_from_s: float | None) -> dict[NamespaceId, int]:
    """Returns how many bytes each namespace gives so that together they give `excess`.

    The plan follows the merge of their orders, and passes over what was used at or after `spare_from_s`. It
    ends early where a namespace has more segments than are known here: the rest is for the next plan.
    """
    given: dict[NamespaceId, int] = {}
    left = excess
    for number, candidate in _merged(holders, spare_from_s):
        if left <= 0:
            break
        if candidate is None:
            if given:
                break
            # All known segments of this namespace are spared: others' old segments must not be, for that.
            continue
        name = holders[number].namespace
        given[name] = given.get(name, 0) + candidate.nbytes
        left -= candidate.nbytes
    return given


def _merged(holders: Sequence[Holder], spare_from_s: float | None) -> Iterator[tuple[int, Candidate | None]]:
    """Yields the holders' candidates in one order, and None where a holder has more than its known ones."""

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
