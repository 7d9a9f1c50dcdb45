"""The only threads of the store: bounded queues of calls, reads and writes, and a crew for parts of a read.

    calls   index round trips, milliseconds each; their own threads, so no transfer delays them
    reads   go before writes: a thread that could do either takes the read
    writes  fewer threads than there are, so that reads always find one; dropped when full
    errands what nobody waits for (fills of a local tier, uploads from it), on threads of their own: a store
            that is busy with reads, or hangs with uploads, must not keep the others from ending
    crew    lends a hand to a thread whose job falls into parts; whoever calls it works along

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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from schemas.settings import TransferSettings

log = logging.getLogger(__name__)

Job = Callable[[], None]
_T = TypeVar("_T")
#: One of them may be waiting for a sick payload store (kvstore.store.Store.probe_payloads).
_CALL_THREADS = 3
_ERRAND_THREADS = 2


@dataclass(frozen=True, slots=True)
class _Queued:
    job: Job
    nbytes: int = 0
    #: Whose bytes: "writes", "errands", or nobody's.
    kind: str = ""


class Transfers:
    """Threads start with the first job, so that a store that is only inspected has none."""

    def __init__(self, settings: TransferSettings, name: str = "kvstore") -> None:
        self._settings = settings
        self._name = name
        self._ready = threading.Condition()
        self._calls: deque[_Queued] = deque()
        self._reads: deque[_Queued] = deque()
        self._writes: deque[_Queued] = deque()
        self._errands: deque[_Queued] = deque()
        self._held = {"writes": 0, "errands": 0}
        self._active = 0
        self._threads: list[threading.Thread] = []
        self._closing = False

    def call(self, job: Job) -> bool:
        """Queue an index call. False: the queue is full or closed, `job` will not run."""
        return self._put(self._calls, _Queued(job))

    def read(self, job: Job) -> bool:
        """Queue a load. False: the queue is full or closed, `job` will not run."""
        return self._put(self._reads, _Queued(job))

    def write(self, nbytes: int, job: Job) -> bool:
        """Queue a save that holds `nbytes` of memory. False: over the bound, or closed."""
        return self._hold(self._writes, _Queued(job, nbytes, "writes"), self._settings.write_bytes)

    def errand(self, nbytes: int, job: Job) -> bool:
        """Queue what nobody waits for and holds `nbytes` of memory. False: over the bound, or closed."""
        return self._hold(self._errands, _Queued(job, nbytes, "errands"), self._settings.errand_bytes)

    def _hold(self, queue: deque[_Queued], item: _Queued, most: int) -> bool:
        with self._ready:
            if self._held[item.kind] + item.nbytes > most or not self._put(queue, item):
                return False
            self._held[item.kind] += item.nbytes
            return True

    @property
    def queued(self) -> dict[str, int]:
        """Jobs waiting now, by kind, and bytes of saves and errands queued or running."""
        with self._ready:
            return {
                "calls": len(self._calls),
                "reads": len(self._reads),
                "writes": len(self._writes),
                "errands": len(self._errands),
                "write_bytes": self._held["writes"],
                "errand_bytes": self._held["errands"],
            }

    def drain(self, timeout_s: float) -> bool:
        """Wait until nothing is queued or running; False if that took too long."""
        end = time.monotonic() + timeout_s
        with self._ready:
            while self._calls or self._reads or self._writes or self._errands or self._active:
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
            self._errands.clear()
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
        # One that takes no reads, or a store that always has some would never save.
        kinds += [("write", (self._writes,))]
        kinds += [("write", (self._reads, self._writes))] * (self._settings.write_threads - 1)
        kinds += [("errand", (self._errands,))] * _ERRAND_THREADS
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
                    if item.kind:
                        self._held[item.kind] -= item.nbytes
                    if not self._active:
                        self._ready.notify_all()


@dataclass(slots=True)
class _Parts(Generic[_T]):
    """The parts of one call. The condition guards everything; it is notified when the last one ends."""

    todo: deque[tuple[int, Callable[[], _T]]]
    results: list[_T | None]
    running: int = 0
    failure: BaseException | None = None
    ended: threading.Condition = field(default_factory=threading.Condition)

    def work(self) -> None:
        """Do parts until none is left or one has failed."""
        while True:
            with self.ended:
                if not self.todo or self.failure is not None:
                    return
                number, part = self.todo.popleft()
                self.running += 1
            try:
                self.results[number] = part()
            except BaseException as exc:  # noqa: BLE001 - handed to the caller
                with self.ended:
                    self.failure = self.failure or exc
            finally:
                with self.ended:
                    self.running -= 1
                    if not self.running:
                        self.ended.notify_all()


class Crew:
    """Threads that help their callers. They start with the first call that has more than one part.

    The caller does parts too, so a call proceeds even if every helper is busy or the crew is closed, and
    nothing here can be full: a helper that comes too late finds nothing to do.
    """

    def __init__(self, helpers: int, name: str = "kvstore") -> None:
        self._helpers = helpers
        self._name = name
        self._ready = threading.Condition()
        self._calls: deque[_Parts[object]] = deque()
        self._threads: list[threading.Thread] = []
        self._closing = False

    def together(self, parts: Sequence[Callable[[], _T]]) -> list[_T]:
        """Run all parts, side by side as far as there are helpers; returns their results in order.

        If one fails, those that have not begun are left out, and its error is raised when those under way
        have ended: after this returns or raises, no part runs.
        """
        call: _Parts[_T] = _Parts(deque(enumerate(parts)), [None] * len(parts))
        if len(parts) > 1:
            self._ask_for_help(call, len(parts) - 1)
        call.work()
        with call.ended:
            while call.running:
                call.ended.wait()
        if call.failure is not None:
            raise call.failure
        return call.results  # type: ignore[return-value]  # every part has put its result there

    def close(self) -> None:
        """End the helpers. Idempotent; later calls run on their caller's thread alone."""
        with self._ready:
            self._closing = True
            self._ready.notify_all()
            threads, self._threads = self._threads, []
        for thread in threads:
            if thread is not threading.current_thread():
                thread.join(timeout=1.0)

    def _ask_for_help(self, call: _Parts[_T], helpers: int) -> None:
        with self._ready:
            if self._closing:
                return
            while len(self._threads) < self._helpers:
                name = f"{self._name}-part-{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError:
                    break  # a process without room for threads: those that there are must do
                self._threads.append(thread)
            for _ in range(min(helpers, self._helpers)):
                self._calls.append(call)  # type: ignore[arg-type]
                self._ready.notify()

    def _run(self) -> None:
        while True:
            with self._ready:
                while not self._calls:
                    if self._closing:
                        return
                    self._ready.wait()
                call = self._calls.popleft()
            call.work()
