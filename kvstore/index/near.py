"""NearRuns: what a process remembers, for some seconds, of the beginnings of prompts that were stored.

Most prompts of a fleet begin alike, and what of that is stored was asked a moment ago. So only what comes
after it has to be asked for, which costs the server that keeps it the less the longer the beginning is; and
of a prompt that was all there a moment ago, nothing. What is not stored is never remembered: what anybody
has saved since is found at once.

What is remembered is of the time at which it was asked for, and is used until it is `near_s` old, whatever
has been evicted meanwhile; payloads outlive that by their grace time. Nobody is told of evictions: who
followed a namespace's events would ask more often than this saves (docs/adr/0046-hot-prefixes.md).

Bounded in chains per first block, in chains, in blocks, in runs, and in age. No I/O; microseconds.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Final, NamedTuple

from kvstore.index.port import Run
from kvstore.keys import DIGEST_BYTES, NamespaceId, SegmentId

#: What becomes of matches: blocks that were remembered, and matches that asked nobody.
COUNTED: Final = ("near_blocks", "near_matches")
#: Most chains of one beginning, and of all; most blocks of all, a MiB of digests; and most runs of all, whose
#: records take some hundred bytes each.
MOST_ALIKE, MOST_CHAINS, MOST_BLOCKS, MOST_RUNS = 32, 256, 1 << 16, 1 << 13


class _Chain(NamedTuple):
    #: Packed, of the blocks that were there.
    digests: bytes
    runs: tuple[Run, ...]
    asked_s: float


class NearRuns:
    """What was stored a moment ago. Safe for threads."""

    def __init__(
        self,
        near_s: float,
        *,
        count: Callable[[str, int], None] = lambda name, amount: None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`near_s`: the greatest age, in seconds; 0: nothing is remembered. `count` is told of COUNTED."""
        self._near_s = near_s
        self._count = count
        self._monotonic = monotonic
        self._lock = threading.Lock()
        #: Namespace and first digest -> chains, the latest last. The one that was used longest ago is first.
        self._chains: dict[tuple[NamespaceId, bytes], list[_Chain]] = {}
        self._number = self._blocks = self._runs = 0
        #: How often something was forgotten: what was asked for before that is not remembered.
        self._forgotten = 0

    def match(self, namespace: NamespaceId, digests: bytes, ask: Callable[[bytes], list[Run]]) -> list[Run]:
        """Returns the longest stored prefix of a chain, by what is remembered and what `ask` says of the rest
        of it, which is not called if there is none. Raises what it raises."""
        asked_s = self._monotonic()
        if not self._near_s or not digests:
            return ask(digests)
        forgotten = self._forgotten
        known, known_s = self._known((namespace, digests[:DIGEST_BYTES]), digests, asked_s)
        blocks = _blocks(known)
        runs = known
        if blocks * DIGEST_BYTES == len(digests):
            self._count("near_matches", 1)
        else:
            runs = _joined(known, blocks, ask(digests[blocks * DIGEST_BYTES :]))
        if blocks:
            # Not before it is certain that they are found: `ask` may have failed.
            self._count("near_blocks", blocks)
        if _blocks(runs) > blocks:
            self._learn(namespace, digests, runs, known_s, forgotten)
        return runs

    def forget(self, namespace: NamespaceId, segments: Collection[SegmentId]) -> None:
        """Forgets all chains with one of some segments."""
        if not self._near_s:
            return
        gone = set(segments)
        with self._lock:
            self._forgotten += 1
            for key in [one for one in self._chains if one[0] == namespace]:
                chains = self._chains.pop(key)
                self._put(
                    key, [one for one in chains if gone.isdisjoint(run.segment for run in one.runs)], chains
                )

    def forget_all(self, namespace: NamespaceId) -> None:
        """Forgets all chains of a namespace."""
        if not self._near_s:
            return
        with self._lock:
            self._forgotten += 1
            for key in [one for one in self._chains if one[0] == namespace]:
                self._put(key, [], self._chains.pop(key))

    def _known(self, key: tuple[NamespaceId, bytes], digests: bytes, now: float) -> tuple[list[Run], float]:
        """Returns the runs of the longest beginning that is remembered, and when they were asked for."""
        best, most = None, 0
        with self._lock:
            chains = self._chains.get(key)
            if chains is None:
                return [], now
            young = [one for one in chains if now - one.asked_s < self._near_s]
            # Put last also if nothing is too old: it is used.
            del self._chains[key]
            self._put(key, young, chains)
        # The latest first: of two that know as much it is the younger one.
        for one in reversed(young):
            alike = _alike(one.digests, digests, most)
            if alike > most:
                best, most = one, alike
        return ([], now) if best is None else (_cut(best.runs, most), best.asked_s)

    def _learn(
        self, namespace: NamespaceId, digests: bytes, runs: Sequence[Run], asked_s: float, forgotten: int
    ) -> None:
        blocks = _blocks(runs)
        if blocks > MOST_BLOCKS // 4 or len(runs) > MOST_RUNS // 4:
            return
        key = namespace, digests[:DIGEST_BYTES]
        one = _Chain(digests[: blocks * DIGEST_BYTES], tuple(runs), asked_s)
        with self._lock:
            if forgotten != self._forgotten:
                return
            before = self._chains.pop(key, [])
            self._put(key, [*before[-MOST_ALIKE + 1 :], one], before)
            while self._number > MOST_CHAINS or self._blocks > MOST_BLOCKS or self._runs > MOST_RUNS:
                oldest = next(iter(self._chains))
                chains = self._chains.pop(oldest)
                # All of another beginning, or the older half of this one's.
                self._put(oldest, chains[len(chains) // 2 + 1 :] if oldest == key else [], chains)

    def _put(self, key: tuple[NamespaceId, bytes], chains: list[_Chain], before: Sequence[_Chain]) -> None:
        """Puts chains in the place of those that were there, last in order. The lock is held."""
        self._number += len(chains) - len(before)
        self._blocks += sum(len(one.digests) for one in chains) // DIGEST_BYTES
        self._blocks -= sum(len(one.digests) for one in before) // DIGEST_BYTES
        self._runs += sum(len(one.runs) for one in chains) - sum(len(one.runs) for one in before)
        if chains:
            self._chains[key] = chains


def _alike(one: bytes, other: bytes, beyond: int) -> int:
    """Returns how many leading digests two chains share; `beyond`, if it isn't more. A digest says all that
    comes before it, so that a search by halves finds the end."""
    most = min(len(one), len(other)) // DIGEST_BYTES

    def same(place: int) -> bool:
        at = place * DIGEST_BYTES
        return one[at : at + DIGEST_BYTES] == other[at : at + DIGEST_BYTES]

    if beyond >= most or not same(beyond):
        return beyond
    low, high = beyond + 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if same(middle - 1):
            low = middle
        else:
            high = middle - 1
    return low


def _blocks(runs: Sequence[Run]) -> int:
    return runs[-1].start + runs[-1].count if runs else 0


def _cut(runs: Sequence[Run], blocks: int) -> list[Run]:
    """Returns what of the runs is within so many leading blocks."""
    cut = []
    for run in runs:
        if run.start >= blocks:
            break
        count = min(run.count, blocks - run.start)
        cut.append(run if count == run.count else Run(run.start, run.segment, run.slot, count, run.record))
    return cut


def _joined(known: list[Run], blocks: int, rest: Sequence[Run]) -> list[Run]:
    """Returns runs, and those of what follows them, which count from 0."""
    joined = list(known)
    for run in rest:
        last = joined[-1] if joined else None
        if last is not None and last.segment == run.segment and last.slot + last.count == run.slot:
            joined[-1] = Run(last.start, last.segment, last.slot, last.count + run.count, last.record)
        else:
            joined.append(Run(run.start + blocks, run.segment, run.slot, run.count, run.record))
    return joined
