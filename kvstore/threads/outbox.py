"""Hands things to a thread of its own, in batches: for background work that may hang."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, Generic, TypeVar

from kvstore.jitter import jittered

log = logging.getLogger(__name__)

_T = TypeVar("_T")
#: Most things of one batch.
BATCH: Final = 64


class Outbox(Generic[_T]):
    """A bounded queue and the thread that empties it. Any thread may put. That doesn't wake the queue's
    thread, which looks by itself, once in about a period."""

    def __init__(
        self, work: Callable[[Sequence[_T]], None], *, most: int, period_s: float, name: str
    ) -> None:
        """`work` gets up to BATCH things at a time, in order; its errors are logged. At most `most` things
        wait.

        Raises RuntimeError where no thread can be started.
        """
        self._work = work
        self._most = most
        self._period_s = period_s
        self._waiting: deque[_T] = deque()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def put(self, thing: _T) -> bool:
        """Queues a thing. Returns False if too many wait already, or after `close`: it is lost."""
        if len(self._waiting) >= self._most or self._ends.is_set():
            return False
        self._waiting.append(thing)
        return True

    def close(self, wait_s: float) -> list[_T]:
        """Ends the thread when its queue is empty, or after `wait_s`. Returns the things that are given up.
        The fate of things with which `work` hangs is unknown."""
        self._ends.set()
        self._thread.join(wait_s)
        return self._some(self._most)

    def _run(self) -> None:
        over = False
        while not over:
            # Set before the last look, so that nothing put before `close` is left.
            over = self._ends.wait(jittered(self._period_s))
            while self._waiting:
                self._hand_over()

    def _hand_over(self) -> None:
        batch = self._some(BATCH)
        try:
            self._work(batch)
        except Exception:
            log.exception("%d things are lost", len(batch))

    def _some(self, most: int) -> list[_T]:
        """Takes up to `most` of the waiting things. Another thread may do so, too."""
        some: list[_T] = []
        with contextlib.suppress(IndexError):
            while len(some) < most:
                some.append(self._waiting.popleft())
        return some
