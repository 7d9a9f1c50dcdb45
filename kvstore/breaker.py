"""A circuit breaker that closes again.

While the breaker is closed, calls pass. After `failures` transient failures in a row it opens, and calls are
refused at once. Failures that are all about one subject (one object of a bucket) count once: it may be that
one alone. After the backoff one call is let through as a probe; its success closes the breaker, its failure
doubles the backoff, up to a maximum. A probe that never reports (its thread died) frees its place
after another backoff, so the breaker can't stay open for good. Backoffs are jittered: one failover opens the
breakers of a whole fleet at one moment, and their probes must not come at one moment as well. They are only
made shorter, by up to a half: the maximum is a promise.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvstore.errors import BreakerOpen, Throttled, TransientError
from kvstore.jitter import sooner
from schemas.settings import BreakerSettings


class Breaker:
    """The breaker in front of one backend. Safe for threads: all of a store share it."""

    def __init__(
        self,
        name: str,
        settings: BreakerSettings,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._name = name
        self._settings = settings
        self._clock = clock
        self._draw = draw
        self._lock = threading.Lock()
        self._failures = 0
        #: Set while not all calls pass.
        self._opened = threading.Event()
        #: Subject of the last failure.
        self._subject: str | None = None
        self._backoff = settings.backoff_s
        self._retry_at = 0.0

    @property
    def is_closed(self) -> bool:
        """Tells whether all calls pass, not only a probe."""
        return not self._opened.is_set()

    @contextmanager
    def guard(self, *, may_probe: bool = True, subject: str | None = None) -> Iterator[None]:
        """Guards one call. Only TransientError counts as a failure; any other error is the backend's answer.
        Throttled says nothing while calls pass: who makes the calls slows down, and blames what that doesn't
        help.

        If `may_probe` is false, the call is refused even when a probe is due: for calls that a request
        waits for, which should not pay for finding out that the backend is still down. Raises BreakerOpen.
        """
        probe = self._admit(may_probe)
        try:
            yield
        except Throttled:
            if probe:
                self._failed(subject)
            raise
        except TransientError:
            # One that was under way when the breaker opened tells nothing that is not known.
            if probe or self.is_closed:
                self._failed(subject)
            raise
        except BaseException:
            self._succeeded()
            raise
        self._succeeded()

    def blame(self, subject: str | None = None) -> None:
        """Counts a transient failure that no guarded call reports: it has not returned, or was refused again
        and again. Does nothing while the breaker is open: it tells nothing that a probe has not told.
        """
        if self.is_closed:
            self._failed(subject)

    def check(self, *, may_probe: bool = True) -> bool:
        """Returns whether a call made now would be a probe. Raises BreakerOpen if it would be refused.

        For what has to wait before it calls: it takes no probe's place, and the call is guarded as well.
        """
        with self._lock:
            if self.is_closed:
                return False
            self._refuse(self._clock(), may_probe)
            return True

    def wait(self, seconds: float) -> None:
        """Sleeps for so long, or until not all calls pass any more."""
        self._opened.wait(seconds)

    def _admit(self, may_probe: bool) -> bool:
        """Returns whether the caller is the probe."""
        with self._lock:
            if self.is_closed:
                return False
            now = self._clock()
            self._refuse(now, may_probe)
            # Others are refused until it reports or the backoff passes again.
            self._retry_at = now + self._backoff
            return True

    def _refuse(self, now: float, may_probe: bool) -> None:
        if now < self._retry_at or not may_probe:
            raise BreakerOpen(f"{self._name}: not tried, it failed {self._failures} times in a row")

    def _failed(self, subject: str | None) -> None:
        with self._lock:
            if subject is not None and subject == self._subject and self.is_closed:
                return
            self._subject = subject
            self._failures += 1
            if self._failures > self._settings.failures:
                self._backoff = min(self._backoff * 2, self._settings.max_backoff_s)
            if self._failures >= self._settings.failures:
                self._retry_at = self._clock() + sooner(self._backoff, self._draw)
                self._opened.set()

    def _succeeded(self) -> None:
        with self._lock:
            self._failures = 0
            if not self.is_closed:
                self._opened.clear()
            self._subject = None
            self._backoff = self._settings.backoff_s
