"""The memory of the offloading tier: vLLM's CPU tier, jobs that may touch it, and the tier's own staging.

The CPU tier's rows belong to a job from its submission until it is reported as ended; then vLLM may give them
to another request. A read from a store can hang for longer than that. So no backend ever sees vLLM's memory:
bytes are read from a store into staging, or copied to staging before they are written to one, and the copy
between staging and a row, which takes a moment and can't hang, happens only if its job is still live:

    thread     enter(jobs) -> copy -> leave(jobs)      refused if one of them is over
    scheduler  ended by deadline, unless a copy is under way: then at the next look
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvstore.errors import CapacityExceeded

#: uint8 [rows, row bytes].
Buffer = npt.NDArray[np.uint8]


class Primary:
    """vLLM's CPU tier as rows of bytes, one per chunk. Holds no export of the view between two calls,
    because vLLM releases the view when it shuts down."""

    def __init__(self, view: memoryview) -> None:
        shape = view.shape
        if shape is None or len(shape) != 2 or view.itemsize != 1 or not view.c_contiguous:
            raise ValueError("the CPU tier's memory is not rows of bytes")
        self._view = view
        self.rows, self.row_bytes = shape

    def read(self, chunks: Sequence[int], into: Buffer) -> None:
        """Copy rows to `into[0]`, `into[1]`, ..."""
        rows = np.asarray(self._view).view(np.uint8)
        for at, chunk in enumerate(chunks):
            np.copyto(into[at], rows[chunk])

    def write(self, chunks: Sequence[int], source: Buffer) -> None:
        """Copy `source[0]`, `source[1]`, ... to rows."""
        rows = np.asarray(self._view).view(np.uint8)
        for at, chunk in enumerate(chunks):
            np.copyto(rows[chunk], source[at])


class Staging:
    """Buffers of `rows` rows each, made when first needed, `size_bytes` of them at most.

    Raises ValueError if not even one row fits.
    """

    def __init__(self, size_bytes: int, row_bytes: int, rows: int) -> None:
        if size_bytes < row_bytes:
            raise ValueError(f"staging_bytes = {size_bytes} is less than one chunk ({row_bytes} bytes)")
        self.rows = max(1, min(rows, size_bytes // row_bytes))
        self._row_bytes = row_bytes
        self._unmade = size_bytes // (self.rows * row_bytes)
        self._free: list[Buffer] = []
        self._ready = threading.Condition()

    def acquire(self, end: float) -> Buffer:
        """A buffer, waiting for one until `end` (monotonic). Raises CapacityExceeded."""
        with self._ready:
            while not self._free:
                if self._unmade:
                    self._unmade -= 1
                    break
                left = end - time.monotonic()
                if left <= 0:
                    raise CapacityExceeded("no staging memory became free in time")
                self._ready.wait(left)
            else:
                return self._free.pop()
        try:
            return np.empty((self.rows, self._row_bytes), dtype=np.uint8)
        except MemoryError as exc:
            with self._ready:
                self._unmade += 1
            raise CapacityExceeded(f"no memory for {self.rows * self._row_bytes} bytes of staging") from exc

    def release(self, buffer: Buffer) -> None:
        """Give back what `acquire` gave."""
        with self._ready:
            self._free.append(buffer)
            self._ready.notify()


def views(buffer: Buffer, count: int) -> list[memoryview]:
    """The first `count` rows as byte buffers."""
    return [memoryview(buffer[row]) for row in range(count)]


@dataclass(slots=True, eq=False)
class Job:
    """One job of vLLM's. Fields after `began` are guarded by the lock of its `Jobs`."""

    number: int
    is_load: bool
    keys: Collection[bytes]
    #: Monotonic time at which it is over, whatever is still under way.
    end: float
    began: float
    #: Keys that have neither arrived nor failed.
    pending: set[bytes]
    #: Keys of which nothing is left to do.
    done: list[bytes] = field(default_factory=list)
    #: Of a save: those of them that the store has now, as far as this engine knows.
    stored: list[bytes] = field(default_factory=list)
    #: Threads that copy to or from its rows at this moment.
    copying: int = 0
    over: bool = False
    #: From submission to the last report, or to its deadline.
    took_s: float = 0.0


class Jobs:
    """All live jobs. The scheduler's thread starts and takes them; transfer threads report."""

    def __init__(self, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._live: dict[int, Job] = {}

    def start(self, number: int, keys: Collection[bytes], *, is_load: bool) -> Job:
        """From now on the job's rows are ours, until `take` returns it."""
        now = self._clock()
        job = Job(number, is_load, keys, now + self._deadline_s, now, set(keys))
        with self._lock:
            self._live[number] = job
        return job

    def enter(self, jobs: Iterable[Job]) -> bool:
        """May the rows of these jobs be touched now? After True, `leave` must follow soon."""
        jobs = list(jobs)
        with self._lock:
            if any(job.over for job in jobs):
                return False
            for job in jobs:
                job.copying += 1
            return True

    def leave(self, jobs: Iterable[Job]) -> None:
        """The copying is over."""
        with self._lock:
            for job in jobs:
                job.copying -= 1
            self._idle.notify_all()

    def give_up(self, number: int, keys: Collection[bytes], *, is_load: bool) -> None:
        """What has not ended of a job has failed, or all of it if it was never started."""
        job = self._live.get(number) or self.start(number, keys, is_load=is_load)
        with self._lock:
            job.end = 0.0

    def report(self, job: Job, keys: Collection[bytes], *, done: bool, stored: bool = False) -> None:
        """These keys of the job have ended. After the job is over it changes nothing."""
        with self._lock:
            if job.over:
                return
            job.took_s = self._clock() - job.began
            job.pending.difference_update(keys)
            if done:
                job.done += keys
            if stored:
                job.stored += keys

    def take(self) -> list[tuple[Job, bool]]:
        """Jobs that have ended since the last call, and for each whether it was its deadline.

        Their rows are not ours any more.
        """
        if not self._live:
            return []
        now = self._clock()
        with self._lock:
            ended = [job for job in self._live.values() if not job.pending or now >= job.end]
            ended = [job for job in ended if not job.copying]
            for job in ended:
                job.over = True
                if job.pending:
                    job.took_s = now - job.began
                del self._live[job.number]
        return [(job, bool(job.pending)) for job in ended]

    def end_all(self) -> None:
        """What has not ended fails: after this returns no thread touches a row of any job.

        `take` returns them all. Waits for copies under way, which takes a moment.
        """
        with self._lock:
            for job in self._live.values():
                job.over = True
                job.end = 0.0
            while any(job.copying for job in self._live.values()):
                self._idle.wait()
