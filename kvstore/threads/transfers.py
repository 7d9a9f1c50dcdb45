"""The only threads of the store: bounded queues of calls, reads and writes, and a crew for parts of a read.

    calls   index round trips of some milliseconds; on threads of their own, so that no transfer delays them
    ordered index calls of which none may overtake another, on one thread: none is begun before the last has
            ended, and a client that causes many keeps no match waiting
    reads   go before writes: a thread that may do either takes the read
    writes  may use fewer threads than there are, so that reads always find one; a write is dropped when its
            queue is full
    errands fills of the fast tier and uploads from it, which nobody waits for; on threads of their own: a
            store that is busy with reads, or hangs in uploads, must not keep the others from ending
    ahead   what requests that wait for their turn may want: on threads of their own, which begin a job only
            while no read waits, and are forgotten when the store closes
    crew    helps a thread whose job falls into parts; the calling thread does parts too

Two threads wait for the device, and no other thread does. One takes writes whose bytes aren't there yet and
queues them when they are, so that a thread that writes never stands waiting. The other does the jobs that
follow a copy to the device. They are two because such a copy ends long before the write of blocks that the
device computes meanwhile may begin.

Queueing never waits: a full queue answers False, and the caller turns that into a miss or a dropped save.
Jobs handle their own errors. An exception that escapes a job is logged here, and the thread goes on. No job
ever runs on the thread that queues it.

An engine's threads start when its store is opened: `start` raises if the process can't have so many.
Elsewhere they start with the first job. A job that no thread may take is refused, and the next job tries to
start the missing threads.

Locking: `_ready` guards every field below it. Jobs run without it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from kvstore.errors import ConfigError
from schemas.settings import TransferSettings

log = logging.getLogger(__name__)

Job = Callable[[], None]
_T = TypeVar("_T")
#: Threads for calls. One of them may be waiting for a sick payload store (kvstore.store.health).
_CALL_THREADS = 3
_ERRAND_THREADS = 2
#: Threads for what is done ahead, and so the most of such jobs that run at once.
AHEAD_THREADS = 2


@dataclass(frozen=True, slots=True)
class _Queued:
    job: Job
    nbytes: int = 0
    #: Kind that `nbytes` counts as: "writes" or "errands", which are bounded, or "staged"; "" if it doesn't
    #: count.
    kind: str = ""


class Transfers:
    """Runs jobs of these kinds. A store that is only inspected has no threads."""

    def __init__(self, settings: TransferSettings, name: str = "kvstore") -> None:
        self._settings = settings
        self._name = name
        self._ready = threading.Condition()
        self._calls: deque[_Queued] = deque()
        self._ordered: deque[_Queued] = deque()
        self._reads: deque[_Queued] = deque()
        self._writes: deque[_Queued] = deque()
        self._errands: deque[_Queued] = deque()
        self._ahead: deque[_Queued] = deque()
        #: Jobs for the threads that wait for a device.
        self._unready: deque[_Queued] = deque()
        self._in_turn: deque[_Queued] = deque()
        self._held = {"writes": 0, "staged": 0, "errands": 0}
        self._active = 0
        self._threads: list[threading.Thread] = []
        #: The threads that have not started: their names, and the queues from which they take.
        self._missing = deque(self._kinds())
        #: Ids of the queues from which some thread takes.
        self._taken: set[int] = set()
        self._closing = False
        self._closed = False

    def start(self) -> None:
        """Starts all threads now. Raises ConfigError, in words, if the process can't have so many."""
        with self._ready:
            if self._closing or self._has_thread(None):
                return
            started, most = len(self._threads), len(self._threads) + len(self._missing)
        self.close(0.0)
        raise ConfigError(
            f"kvstore: this process could start {started} of the {most} threads that its store needs; raise "
            "its limit (`ulimit -u`, or the container's limit of pids), or lower transfers.read_threads and "
            "transfers.write_threads"
        )

    def call(self, job: Job) -> bool:
        """Queues an index call. Returns False if the queue is full or closed, or no thread may take it:
        `job` will not run."""
        return self._put(self._calls, _Queued(job))

    def call_in_order(self, job: Job) -> bool:
        """Queues an index call that begins when all have ended that were queued here before it. Returns
        False as `call`."""
        return self._put(self._ordered, _Queued(job))

    def read(self, job: Job) -> bool:
        """Queues a load. Returns False as `call`."""
        return self._put(self._reads, _Queued(job))

    def write(self, nbytes: int, job: Job, after: Callable[[], object] | None = None) -> bool:
        """Queues a save that holds `nbytes` of memory. Returns False if that is over the bound, or closed.

        If its bytes are still on their way, `after` returns or raises when they are there or never will be;
        the job takes its turn then, and finds out which."""
        with self._ready:
            if self._held["writes"] + nbytes > self._settings.write_bytes:
                return False
            return self._write(_Queued(job, nbytes, "writes"), after)

    def write_staged(self, nbytes: int, job: Job, after: Callable[[], object] | None = None) -> bool:
        """Queues a save whose memory is the caller's and bounded there. Returns False if the queue is full or
        closed. `after` as in `write`."""
        with self._ready:
            return self._write(_Queued(job, nbytes, "staged"), after)

    def in_turn(self, job: Job) -> bool:
        """Runs a job that waits for a device, after all that were given before. Their number has no bound
        here: the caller bounds it. Returns False if the store is closed, or no thread may take it: `job` will
        not run. Until the close has ended it is taken, since memory is at stake."""
        with self._ready:
            return not self._closed and self._queue(self._in_turn, _Queued(job))

    def takes_staged(self) -> bool:
        """Returns whether the queue of writes has a place. A queue that is closed takes everything, and
        refuses it afterwards: waiting for a place would be of no use."""
        with self._ready:
            return self._closing or self._count_writes() < self._settings.queue_jobs

    def errand(self, nbytes: int, job: Job) -> bool:
        """Queues a background job that holds `nbytes` of memory. Returns False as `write`."""
        with self._ready:
            if self._held["errands"] + nbytes > self._settings.errand_bytes:
                return False
            if not self._put(self._errands, _Queued(job, nbytes, "errands")):
                return False
            self._held["errands"] += nbytes
            return True

    def ahead(self, job: Job) -> bool:
        """Queues a background job that gives way to reads. Returns False as `call`; a job that has not begun
        when the store closes will not run either."""
        return self._put(self._ahead, _Queued(job))

    def _write(self, item: _Queued, after: Callable[[], object] | None) -> bool:
        """Queues a save; the caller holds the lock."""
        if self._closing or self._count_writes() >= self._settings.queue_jobs:
            return False
        if after is None:
            queued = self._queue(self._writes, item)
        else:
            queued = self._has_thread(self._writes) and self._queue(
                self._unready, _Queued(lambda: self._make_ready(after, item))
            )
        if queued:
            self._held[item.kind] += item.nbytes
        return queued

    def _make_ready(self, after: Callable[[], object], item: _Queued) -> None:
        # The job itself finds out what went wrong, and reports it.
        with contextlib.suppress(Exception):
            after()
        with self._ready:
            if not self._closed:
                self._writes.append(item)
                self._ready.notify_all()

    def _count_writes(self) -> int:
        return len(self._writes) + len(self._unready)

    @property
    def queued(self) -> dict[str, int]:
        """The number of jobs waiting now, by kind, and the bytes of saves and errands queued or running."""
        with self._ready:
            return {
                "calls": len(self._calls) + len(self._ordered),
                "reads": len(self._reads),
                "writes": self._count_writes(),
                "errands": len(self._errands),
                "ahead": len(self._ahead),
                "write_bytes": self._held["writes"] + self._held["staged"],
                "errand_bytes": self._held["errands"],
            }

    def drain(self, timeout_s: float) -> bool:
        """Waits until nothing is queued or running. Returns False if that took longer than `timeout_s`."""
        end = time.monotonic() + timeout_s
        with self._ready:
            while any(self._queues()) or self._active:
                left = end - time.monotonic()
                if left <= 0:
                    return False
                self._ready.wait(left)
            return True

    def close(self, drain_s: float | None = None) -> bool:
        """Refuses new jobs, waits up to `drain_s` for the queued ones and ends the threads.

        Returns False if jobs were abandoned. Idempotent. Threads are daemons: a backend that hangs
        past every deadline can't keep the process alive.
        """
        with self._ready:
            self._closing = True
            self._ahead.clear()
            self._ready.notify_all()
        drained = self.drain(self._settings.drain_s if drain_s is None else drain_s)
        with self._ready:
            self._closed = True
            for queue in self._queues():
                queue.clear()
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
            return self._queue(queue, item)

    def _queue(self, queue: deque[_Queued], item: _Queued) -> bool:
        """Appends a job if a thread takes from the queue; the caller holds the lock."""
        if not self._has_thread(queue):
            return False
        queue.append(item)
        # notify(1) could wake a thread that may not take this kind.
        self._ready.notify_all()
        return True

    def _has_thread(self, queue: deque[_Queued] | None) -> bool:
        """Starts the threads that are missing, as far as the process can have them. Returns whether one takes
        from `queue`; None: whether all have started. The caller holds the lock."""
        while self._missing:
            name, queues = self._missing[0]
            thread = threading.Thread(
                target=self._run, args=(queues,), name=f"{self._name}-{name}", daemon=True
            )
            try:
                thread.start()
            except (RuntimeError, MemoryError):
                return queue is not None and id(queue) in self._taken
            self._threads.append(thread)
            self._taken.update(map(id, queues))
            del self._missing[0]
        return True

    def _queues(self) -> tuple[deque[_Queued], ...]:
        return (
            self._calls,
            self._ordered,
            self._reads,
            self._writes,
            self._errands,
            self._ahead,
            self._unready,
            self._in_turn,
        )

    def _kinds(self) -> list[tuple[str, tuple[deque[_Queued], ...]]]:
        """Returns all threads by name, with the queues from which each takes: one of each kind first."""
        # One thread takes no reads: a store that always has some waiting would never save.
        kinds: list[tuple[str, tuple[deque[_Queued], ...], int]] = [
            ("call", (self._calls,), _CALL_THREADS),
            ("ordered", (self._ordered,), 1),
            ("read", (self._reads,), self._settings.read_threads),
            ("write", (self._writes,), 1),
            ("errand", (self._errands,), _ERRAND_THREADS),
            ("ahead", (self._ahead,), AHEAD_THREADS),
            ("unready", (self._unready,), 1),
            ("in-turn", (self._in_turn,), 1),
            ("read-write", (self._reads, self._writes), self._settings.write_threads - 1),
        ]
        return [
            (f"{kind}-{number}", queues)
            for number in range(max(count for _, _, count in kinds))
            for kind, queues, count in kinds
            if number < count
        ]

    def _run(self, queues: tuple[deque[_Queued], ...]) -> None:
        while True:
            with self._ready:
                source = self._next(queues)
                while source is None:
                    # Not before everything has ended: one job may bring another.
                    if self._closed:
                        return
                    self._ready.wait()
                    source = self._next(queues)
                item = source.popleft()
                self._active += 1
                if self._ahead and not self._reads:
                    self._ready.notify_all()
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

    def _next(self, queues: Sequence[deque[_Queued]]) -> deque[_Queued] | None:
        """Returns the first queue with a job that may begin now; the caller holds the lock."""
        return next(
            (queue for queue in queues if queue and (queue is not self._ahead or not self._reads)), None
        )


@dataclass(slots=True)
class _Parts(Generic[_T]):
    """The parts of one call. `ended` guards every field, and is notified when no part runs any more."""

    todo: deque[tuple[int, Callable[[], _T]]]
    results: list[_T | None]
    running: int = 0
    failure: BaseException | None = None
    ended: threading.Condition = field(default_factory=threading.Condition)

    def work(self) -> None:
        """Does parts until none is left or one has failed."""
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

    The caller does parts too, so a call proceeds even if every helper is busy or the crew is closed. The
    queue needs no bound: a helper that comes too late finds nothing to do.
    """

    def __init__(self, helpers: int, name: str = "kvstore") -> None:
        self._helpers = helpers
        self._name = name
        self._ready = threading.Condition()
        self._calls: deque[_Parts[object]] = deque()
        self._threads: list[threading.Thread] = []
        self._closing = False

    def together(self, parts: Sequence[Callable[[], _T]]) -> list[_T]:
        """Runs all parts, as many at a time as there are helpers, and returns their results in order.

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
        """Ends the helpers. Idempotent; later calls run on their caller's thread alone."""
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
                    break  # the process can't have more threads: those that have started must do
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
