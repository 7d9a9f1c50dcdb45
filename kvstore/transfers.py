"""The only threads of the store: bounded queues of calls, reads and writes.

    calls   index round trips, milliseconds each; their own threads, so no transfer delays them
    reads   go before writes: a thread that could do either takes the read
    writes  fewer threads than there are, so that reads always find one; dropped when full

Nothing waits to be queued: a full queue answers False, and the caller turns that into a miss or a
dropped save. Jobs handle their own errors; one that lets an exception escape is logged here and the
thread lives on.

Locking: `_ready` guards every field below it. Jobs run without it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from schemas.settings import TransferSettings

log = logging.getLogger(__name__)

Job = Callable[[], None]
_CALL_THREADS = 2


@dataclass(frozen=True, slots=True)
class _Queued:
    job: Job
    nbytes: int


class Transfers:
    """Threads start with the first job, so that a store that is only inspected has none."""

    def __init__(self, settings: TransferSettings, name: str = "kvstore") -> None:
        self._settings = settings
        self._name = name
        self._ready = threading.Condition()
        self._calls: deque[_Queued] = deque()
        self._reads: deque[_Queued] = deque()
        self._writes: deque[_Queued] = deque()
        self._write_bytes = 0
        self._active = 0
        self._threads: list[threading.Thread] = []
        self._closing = False

    def call(self, job: Job) -> bool:
        """Queue an index call. False: the queue is full or closed, `job` will not run."""
        return self._put(self._calls, _Queued(job, 0))

    def read(self, job: Job) -> bool:
        """Queue a load. False: the queue is full or closed, `job` will not run."""
        return self._put(self._reads, _Queued(job, 0))

    def write(self, nbytes: int, job: Job) -> bool:
        """Queue a save that holds `nbytes` of memory. False: over the bound, or closed."""
        with self._ready:
            if self._write_bytes + nbytes > self._settings.write_bytes:
                return False
            if not self._put(self._writes, _Queued(job, nbytes)):
                return False
            self._write_bytes += nbytes
            return True

    @property
    def queued(self) -> dict[str, int]:
        """Jobs waiting now, by kind, and bytes of saves queued or running."""
        with self._ready:
            return {
                "calls": len(self._calls),
                "reads": len(self._reads),
                "writes": len(self._writes),
                "write_bytes": self._write_bytes,
            }

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or running; False if that took too long."""
        end = time.monotonic() + timeout_s
        with self._ready:
            while self._calls or self._reads or self._writes or self._active:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._ready.wait(left)
            return True

    def close(self, drain_s: float | None = None) -> bool:
        """Refuse new jobs, wait for queued ones up to `drain_s`, end the threads.

        Returns False if jobs were abandoned. Idempotent. Threads are daemons: a backend that hangs
        past every deadline can't keep the process alive.
        """
        with self._ready:
            self._closing = True
            self._ready.notify_all()
        drained = self.drain(self._settings.drain_s if drain_s is None else drain_s)
        with self._ready:
            self._calls.clear()
            self._reads.clear()
            self._writes.clear()
            self._ready.notify_all()
            threads, self._threads = self._threads, []
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout=1.0)
        return drained

    def _put(self, queue: deque[_Queued], item: _Queued) -> bool:
        with self._ready:
            if self._closing or len(queue) >= self._settings.queue_jobs:
                return False
            if not self._threads:
                self._start()
            queue.append(item)
            # All: with notify(1) the one woken may be a thread that may not take this kind.
            self._ready.notify_all()
            return True

    def _start(self) -> None:
        kinds: list[tuple[str, tuple[deque[_Queued], ...]]] = [("call", (self._calls,))] * _CALL_THREADS
        kinds += [("read", (self._reads,))] * self._settings.read_threads
        kinds += [("write", (self._reads, self._writes))] * self._settings.write_threads
        for number, (kind, queues) in enumerate(kinds):
            thread = threading.Thread(
                target=self._run, args=(queues,), name=f"{self._name}-{kind}-{number}", daemon=True
            )
            thread.start()
            self._threads.append(thread)

    def _run(self, queues: tuple[deque[_Queued], ...]) -> None:
        while True:
            with self._ready:
                source = next((queue for queue in queues if queue), None)
                while source is None:
                    if self._closing:
                        return
                    self._ready.wait()
                    source = next((queue for queue in queues if queue), None)
                item = source.popleft()
                self._active += 1
            try:
                item.job()
            except Exception:
                log.exception("a transfer job let an error escape")
            finally:
                with self._ready:
                    self._active -= 1
                    self._write_bytes -= item.nbytes
                    if not self._active:
                        self._ready.notify_all()
