"""Calls timed: one after the other, or so many side by side for so long."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.admin.parallel import for_each
from kvstore.errors import KVStoreError
from schemas.bench import Latency


def latency(times: Sequence[float]) -> Latency:
    """Of at least one call."""
    ordered = sorted(times)
    high = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    return Latency(count=len(ordered), p50_s=statistics.median(ordered), p99_s=high)


def timed(call: Callable[[], object], seconds: float, *, least: int = 5, most: int = 2000) -> list[float]:
    """Times of one call after the other, for about `seconds`. Raises what it raises."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    least = min(least, most)
    while len(times) < least or (time.perf_counter() < end and len(times) < most):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def rate(call: Callable[[], object], nbytes: int, seconds: float) -> float:
    """Bytes per second of a call that handles `nbytes`: the median, so that a disturbance doesn't count."""
    return nbytes / statistics.median(timed(call, seconds, least=3))


@dataclass
class SideBySide:
    """What came of calls that ran `concurrency` at a time."""

    concurrency: int
    times: list[float] = field(default_factory=list)
    nbytes: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    #: The last one, for when nothing succeeded.
    error: KVStoreError | None = None
    _began: float = float("inf")
    _ended: float = 0.0
    _preparing: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def bytes_s(self) -> float:
        """Bytes per second by the clock, without the time that preparing took."""
        if not self.times:
            return 0.0
        return self.nbytes / max(1e-9, self._ended - self._began - self._preparing / self.concurrency)

    def run(self, prepare: Callable[[], Callable[[], int]], seconds: float, most: int) -> SideBySide:
        """Begin calls for `seconds`, at least one for each that runs side by side, at most `most`.

        `prepare` makes a call, whose time then counts and which answers with its bytes.
        """
        for_each(lambda _: self._one(prepare), self._tickets(seconds, most), self.concurrency)
        return self

    def _tickets(self, seconds: float, most: int) -> Iterator[int]:
        end = time.perf_counter() + seconds
        for number in range(max(most, self.concurrency)):
            if number >= self.concurrency and time.perf_counter() >= end:
                return
            yield number

    def _one(self, prepare: Callable[[], Callable[[], int]]) -> None:
        asked = time.perf_counter()
        call = prepare()
        began = time.perf_counter()
        nbytes, error = 0, None
        try:
            nbytes = call()
        except KVStoreError as exc:
            error = exc
        ended = time.perf_counter()
        with self._lock:
            self._began = min(self._began, asked)
            self._ended = max(self._ended, ended)
            self._preparing += began - asked
            self.nbytes += nbytes
            if error is None:
                self.times.append(ended - began)
            else:
                self.error = error
                self.errors[error.reason] += 1
