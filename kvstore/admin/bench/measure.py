"""Timing of calls: one after the other, or several side by side."""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.admin.bench.reports import Latency
from kvstore.errors import KVStoreError
from kvstore.threads.each import for_each


def latency(times: Sequence[float]) -> Latency:
    """Returns the median and the 99th percentile of the times of at least one call."""
    ordered = sorted(times)
    high = ordered[min(len(ordered) - 1, round(0.99 * len(ordered)))]
    return Latency(count=len(ordered), p50_s=statistics.median(ordered), p99_s=high)


def timed(call: Callable[[], object], seconds: float, *, least: int = 5, most: int = 2000) -> list[float]:
    """Calls `call` again and again for about `seconds`, and returns the times. Raises what it raises."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    least = min(least, most)
    while len(times) < least or (time.perf_counter() < end and len(times) < most):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return times


def rate(call: Callable[[], object], nbytes: int, seconds: float) -> float:
    """Returns the bytes per second of a call that handles `nbytes`: the median, to ignore disturbances."""
    return nbytes / statistics.median(timed(call, seconds, least=3))


@dataclass
class SideBySide:
    """Runs calls, `concurrency` at a time, and collects their times, bytes and errors."""

    concurrency: int
    times: list[float] = field(default_factory=list)
    nbytes: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    #: The last error, to be raised if nothing succeeded.
    error: KVStoreError | None = None
    _began: float = float("inf")
    _ended: float = 0.0
    _preparing: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def bytes_s(self) -> float:
        """Bytes per second of elapsed time, less the time that preparing took."""
        if not self.times:
            return 0.0
        return self.nbytes / max(1e-9, self._ended - self._began - self._preparing / self.concurrency)

    def run(self, prepare: Callable[[], Callable[[], int]], seconds: float, most: int) -> SideBySide:
        """Begins calls for `seconds`, at least `concurrency` and at most `most` of them.

        `prepare` returns a call, which is timed and returns its number of bytes.
        """
        for_each(lambda _: self._one(prepare), self._turns(seconds, most), self.concurrency)
        return self

    def _turns(self, seconds: float, most: int) -> Iterator[int]:
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
