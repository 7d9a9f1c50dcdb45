"""Calls of which each begins when the one before it has ended, on whichever call thread."""

from __future__ import annotations

import logging
import threading
from collections import deque

from kvstore.threads.transfers import Job, Transfers

log = logging.getLogger(__name__)


class InTurn:
    """Calls in the order in which they were queued. No thread waits for another's turn: whoever has it goes
    on with what was queued meanwhile. Any thread may call."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._queued: deque[Job] = deque()
        self._turn = threading.Lock()

    def call(self, job: Job) -> bool:
        """Queues a call. Returns False if the queue of calls is full or closed: `job` will not run."""
        self._queued.append(job)
        if self._transfers.call(self._go_on):
            return True
        try:
            self._queued.remove(job)
        except ValueError:
            return True  # whoever has the turn has taken it
        return False

    def _go_on(self) -> None:
        while self._queued and self._turn.acquire(blocking=False):
            try:
                self._next()
            finally:
                self._turn.release()

    def _next(self) -> None:
        try:
            job = self._queued.popleft()
        except IndexError:
            return  # refused meanwhile
        try:
            job()
        except Exception:
            log.exception("a call failed unexpectedly")
