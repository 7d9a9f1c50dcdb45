"""Measures the reads of one rank, by tier, and tells when a load is not worth waiting for any more.

The engine's thread and the transfer threads call it; one lock guards everything, and nothing is waited for
with it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from typing import Final

from connectors.choice.speeds import FIRST, PART_REQUESTS, Measured, Meter
from connectors.engine.guard import otherwise
from connectors.kv.messages import KVStoreWorkerMetadata
from kvstore.rules.tiers import Tier

#: A load is cut if computing the rest is faster even if that takes longer than estimated by this factor: a
#: cut load can't be taken up again, and noise must not cut a load that does as planned.
_SURE: Final = 1.25
#: A read that is overdue is expected to take so many times as long as it is overdue. With 1, the best guess
#: if nothing is known of why, a load on a store that stalls is cut when computing would be over.
_HANGS: Final = 4.0


#: A load that may be cut is read in rounds of about `_PIECES_S` seconds, so that its speed shows soon and
#: there is something to keep. Waiting for the first bytes of more rounds may cost a load no more than the
#: share `_PRICE` of its time, once that is known. A load of less than `_WORTH_S` seconds is not cut into
#: pieces.
_PIECES_S: Final = 0.1
_PRICE: Final = 0.05
_WORTH_S: Final = 0.5


class Pace:
    """The meters of one rank."""

    def __init__(self, wait: float, threads: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`wait` is one of connectors.choice.decision.WAIT, `threads` how many reads there are at a time."""
        self._wait = wait
        self._threads = threads
        self._clock = clock
        self._lock = threading.Lock()
        self._meters: dict[Tier, Meter] = {}
        self._changed: set[Tier] = set()
        #: Most bytes of one read.
        self.most_bytes = 1 << 30
        self.restart()

    def restart(self) -> None:
        """Forget all reads, and what they took."""
        with self._lock:
            self._meters = {tier: Meter(first, self._threads) for tier, first in FIRST.items()}

    def ask(self, read: Hashable, tier: Tier, nbytes: int, requests: int = 1) -> None:
        """Record that a read was queued, which is so many requests, one after the other."""
        with self._lock:
            self._meters[tier].ask(read, nbytes, self._clock(), requests)

    def begin(self, read: Hashable, tier: Tier) -> None:
        """Record that a read has a thread and memory."""
        with self._lock:
            self._meters[tier].begin(read, self._clock())

    def held(self, read: Hashable, tier: Tier, held_s: float) -> None:
        """Record that a read is about to end, because the store asks for fewer reads. `held_s` is Meter's."""
        with self._lock:
            self._meters[tier].held(read, self._clock(), held_s)

    def end(self, read: Hashable, tier: Tier, *, arrived: bool) -> None:
        """Record that a read has ended; `arrived`: with its bytes."""
        with self._lock:
            self._meters[tier].end(read, self._clock(), arrived=arrived)
            self._changed.add(tier)

    def begin_probe(self, read: Hashable, tier: Tier, nbytes: int, requests: int = 1) -> None:
        """Record that a read has begun for the sake of measuring."""
        with self._lock:
            self._meters[tier].begin_probe(read, nbytes, self._clock(), requests)

    def end_probe(self, read: Hashable, tier: Tier, *, arrived: bool) -> None:
        """Record that such a read has ended; `arrived`: with its bytes."""
        with self._lock:
            self._meters[tier].end_probe(read, self._clock(), arrived=arrived)
            self._changed.add(tier)

    @otherwise(bool)
    def late(self, left: Mapping[Tier, int], compute_s: float) -> bool:
        """Returns whether computing a load, in `compute_s` seconds, is faster than waiting for its bytes
        `left` and for the bytes before it."""
        with self._lock:
            now, rest, behind = self._clock(), 0.0, 0.0
            for tier, nbytes in left.items():
                if nbytes:
                    meter = self._meters[tier]
                    speed = meter.speed(now)
                    rest += nbytes / speed.bytes_per_s + speed.latency_s * nbytes / self._round_bytes
                    behind = max(behind, meter.behind(now))
        return self._wait * max(rest, _HANGS * behind) > _SURE * compute_s

    @otherwise(lambda: 1)
    def pieces(self, tier: Tier, nbytes: int) -> int:
        """Returns in how many reads at most `nbytes` of a load that may be cut should come, if not in one for
        each segment.

        They come in one round while the cost of latency is unknown. More rounds would take longer for their
        latency, which would look like a lack of bandwidth and cause still more rounds.
        """
        requests = PART_REQUESTS[tier]
        with self._lock:
            meter = self._meters[tier]
            speed, known = meter.speed(self._clock()), meter.count > 0
        least = speed.bytes_per_s * _PIECES_S
        if known:
            seconds = speed.seconds(nbytes)
            many = seconds > _WORTH_S and meter.tells_apart
            rounds = int(1 + _PRICE * seconds / (requests * speed.latency_s)) if many else 1
            if rounds == 1 and requests > 1:
                return 1
            least = max(least, nbytes / rounds)
        return max(1, int(self._threads * nbytes / least))

    @property
    def _round_bytes(self) -> int:
        return self._threads * self.most_bytes

    @property
    @otherwise(bool)
    def has_news(self) -> bool:
        """Returns whether there is something to report."""
        if not self._changed and not any(meter.left_bytes for meter in self._meters.values()):
            return False
        with self._lock:
            now = self._clock()
            for tier, meter in self._meters.items():
                if meter.left_bytes:
                    meter.give_up(now)
                    if meter.behind(now) > 0:
                        self._changed.add(tier)
            return bool(self._changed)

    def tell(self, report: KVStoreWorkerMetadata, rank: int) -> None:
        """Move to a report what the scheduler half must know."""
        with self._lock:
            now, changed, self._changed = self._clock(), self._changed, set()
            found = {
                tier: Measured(
                    replace(
                        meter.speed(now),
                        threads=self._threads,
                        round_bytes=self._round_bytes,
                        part_requests=PART_REQUESTS[tier],
                    ),
                    meter.done_bytes,
                    meter.count,
                    meter.better,
                )
                for tier, meter in self._meters.items()
                if tier in changed
            }
        if found:
            report.speeds[rank] = found
