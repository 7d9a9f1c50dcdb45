"""vLLM's CPU tier, and the jobs that may touch it.

The CPU tier's rows belong to a job from its submission until it is reported as ended; then vLLM may give them
to another request. A read from a store can hang for longer than that. So no backend ever sees vLLM's memory:
bytes are read from a store into staging, or copied to staging before they are written to a store. The copy
between staging and a row takes a moment and can't hang. It happens only if its job is still live:

    transfer thread      enter(jobs) -> copy -> leave(jobs); `enter` refuses if one of the jobs is over
    scheduler's thread   `take` ends a job at its deadline; if a copy is under way, a later `take` does
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np


class Primary:
    """vLLM's CPU tier as rows of bytes, one per chunk.

    It holds no export of the view between two calls, because vLLM releases the view when it shuts down.
    """

    def __init__(self, view: memoryview) -> None:
        shape = view.shape
        if shape is None or len(shape) != 2 or view.itemsize != 1 or not view.c_contiguous:
            raise ValueError("the CPU tier's memory is not rows of bytes")
        self._view = view
        self.rows, self.row_bytes = shape

    def read(self, chunks: Sequence[int], into: Sequence[memoryview]) -> None:
        """Copy rows to `into[0]`, `into[1]`, ..."""
        rows = np.asarray(self._view).view(np.uint8)
        for chunk, view in zip(chunks, into, strict=True):
            np.copyto(np.frombuffer(view, np.uint8), rows[chunk])

    def write(self, chunks: Sequence[int], source: Sequence[memoryview]) -> None:
        """Copy `source[0]`, `source[1]`, ... to rows."""
        rows = np.asarray(self._view).view(np.uint8)
        for chunk, view in zip(chunks, source, strict=True):
            np.copyto(rows[chunk], np.frombuffer(view, np.uint8))


@dataclass(slots=True, eq=False)
class Job:
    """A load or save that vLLM has submitted. Fields after `began` are guarded by the lock of its `Jobs`."""

    number: int
    is_load: bool
    keys: Collection[bytes]
    #: Monotonic time at which it is over, whatever is still under way.
    end: float
    began: float
    #: Keys that have neither arrived nor failed.
    pending: set[bytes]
    #: Keys that were loaded, or saved as far as this engine has to.
    done: list[bytes] = field(default_factory=list)
    #: Keys of a save that the store has now, as far as this engine knows.
    stored: list[bytes] = field(default_factory=list)
    #: Number of threads that copy to or from its rows at this moment.
    copying: int = 0
    #: Whether its rows may not be touched any more.
    over: bool = False
    #: Seconds from its submission to the last report; if it was late, to its end.
    took_s: float = 0.0


class Jobs:
    """Keeps all live jobs. The scheduler's thread starts and takes them; transfer threads report."""

    def __init__(self, deadline_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._deadline_s = deadline_s
        self._clock = clock
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._live: dict[int, Job] = {}

    def start(self, number: int, keys: Collection[bytes], *, is_load: bool) -> Job:
        """Begin a job: its rows are the tier's from now on, until `take` returns it."""
        now = self._clock()
        job = Job(number, is_load, keys, now + self._deadline_s, now, set(keys))
        with self._lock:
            self._live[number] = job
        return job

    def enter(self, jobs: Iterable[Job]) -> bool:
        """Returns whether the rows of these jobs may be touched now. After True, `leave` must follow soon."""
        jobs = list(jobs)
        with self._lock:
            if any(job.over for job in jobs):
                return False
            for job in jobs:
                job.copying += 1
            return True

    def leave(self, jobs: Iterable[Job]) -> None:
        """End the copying that `enter` has allowed."""
        with self._lock:
            for job in jobs:
                job.copying -= 1
            self._idle.notify_all()

    def give_up(self, number: int, keys: Collection[bytes], *, is_load: bool) -> None:
        """Fail what has not ended of a job, or all of it if it was never started."""
        job = self._live.get(number) or self.start(number, keys, is_load=is_load)
        with self._lock:
            job.end = 0.0

    def report(self, job: Job, keys: Collection[bytes], *, done: bool, stored: bool = False) -> None:
        """Record that these keys of the job have ended. Once the job is over this changes nothing."""
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
        """Returns the jobs that have ended since the last call, and for each whether its deadline ended it.

        Their rows are vLLM's again.
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
        """Fail what has not ended: once this has returned, no thread touches a row of any job.

        `take` returns them all. Waits for copies under way, which takes a moment. Raises TimeoutError if they
        have not ended by the deadline of a job.
        """
        with self._lock:
            for job in self._live.values():
                job.over = True
                job.end = 0.0
            if not self._idle.wait_for(
                lambda: not any(job.copying for job in self._live.values()), self._deadline_s
            ):
                raise TimeoutError(
                    f"kvstore: copies between the CPU tier and the store have not ended within "
                    f"{self._deadline_s:g} s, and may still write to its rows"
                )
