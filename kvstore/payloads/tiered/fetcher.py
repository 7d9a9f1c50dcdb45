"""Fetcher: fetches what the folder lacks from the shared store, once for all threads and processes.

A read that wants at least half of a payload fetches all of it: the reader's range is copied out of the
buffer, and the buffer is written to the folder in the background. A smaller read goes to the shared store
as it is, and the whole payload is fetched in the background, unless a fetch of it is under way.

Threads share flights (flights.py). Processes agree by two locks on the payload's name: FETCHING while it is
fetched, FILLING from then until it is in the folder. A process that finds one taken waits, `wait_s` for the
first and FILL_WAIT_S for the second (the background queue may be long), then looks in the folder, and at
last reads for itself. No wait is without a bound, and the kernel frees the locks of a process that dies.

Memory: one buffer per flight, until the folder is filled; where the bound is reached a read takes only its
own range. If the reader wants the whole payload, reading into its buffers and copying from there would
cost the same one copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from copy import copy

from kvstore.errors import KVStoreError
from kvstore.payloads.port import PayloadStore
from kvstore.payloads.tiered.flights import Buffers, Flight, FlightEnd, Flights
from kvstore.payloads.tiered.folder import BoundedFolder, Count, Later
from kvstore.payloads.tiered.locks import FETCHING, FILLING, number_of

#: How long a reader waits for another process to write what that one has fetched, in seconds.
FILL_WAIT_S = 0.5
#: Pauses between looks at another process's lock, in seconds.
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.001, 0.02


class Fetcher:
    """Fetches from `slow` into `folder`. Reads raise what `slow` raises, and nothing else."""

    def __init__(
        self,
        folder: BoundedFolder,
        slow: PayloadStore,
        buffers: Buffers,
        later: Later,
        *,
        count: Count,
        wait_s: float,
        scarce: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._folder = folder
        self._slow = slow
        self._buffers = buffers
        self._later = later
        self._count = count
        self._wait_s = wait_s
        #: Tells whether reads of `slow` are scarce: then nothing is fetched that no caller waits for.
        self._scarce = scarce
        self._clock = clock
        self._sleep = sleep
        self._locks = folder.ledger.locks
        self._flights = Flights(buffers)
        # The lock guards the field below it: names whose fill is queued.
        self._lock = threading.Lock()
        self._queued: set[str] = set()

    def range(self, name: str, offset: int, into: Sequence[memoryview], size: int | None) -> int | None:
        """Reads from the shared store, and does nothing else."""
        got = self._slow.read(name, offset, into, size=size)
        if got is not None:
            self._count("hits_slow", 1)
        return got

    def part(self, name: str, offset: int, into: Sequence[memoryview], size: int) -> int | None:
        """Reads a small part, and has the whole payload fetched in the background."""
        flight = self._flights.arrived(name)
        if flight is not None:
            try:
                return flight.copy(offset, into)
            finally:
                self._flights.leave(flight)
        got = self.range(name, offset, into, size)
        if got:
            self._queue(name, size)
        return got

    def whole(self, name: str, offset: int, into: Sequence[memoryview], size: int) -> int | None:
        """Reads a large part, or all, out of the whole payload, which this thread or another fetches."""
        joined = self._flights.join(name, size)
        if joined is None:
            return self.range(name, offset, into, size)
        flight, leads = joined
        try:
            if leads:
                self._lead(flight, wait=True, fill_later=True)
            elif not flight.landed.is_set():
                self._count("waits", 1)
                if not flight.landed.wait(self._wait_s):
                    return self.range(name, offset, into, size)
            if flight.outcome is FlightEnd.BYTES:
                return flight.copy(offset, into)
            if flight.outcome is FlightEnd.MISSING:
                return None
            if flight.error is not None:
                # A copy, because a traceback belongs to one thread.
                raise copy(flight.error) from flight.error
        finally:
            self._flights.leave(flight)
        got = self._folder.read(name, offset, into, size)
        return self.range(name, offset, into, size) if got is None else got

    def fill(self, name: str, size: int, *, wait: bool) -> bool:
        """Brings a payload to the folder. Returns whether it is there then. Raises what `slow` raises.

        With `wait`, waits up to `wait_s` for another thread or process that is fetching it.
        """
        if self._folder.has(name, size):
            return True
        joined = self._flights.join(name, size) if self._folder.may_keep(size) else None
        if joined is None:
            return False
        flight, leads = joined
        try:
            if leads:
                self._lead(flight, wait=wait, fill_later=False)
                if flight.error is not None:
                    raise copy(flight.error) from flight.error
            elif wait:
                flight.ended.wait(self._wait_s)
        finally:
            self._flights.leave(flight)
        return self._folder.has(name, size)

    def cancel(self, name: str) -> bool:
        """Keeps a fetch of `name` that is under way out of the folder. Returns whether there was one."""
        return self._flights.cancel(name)

    def _queue(self, name: str, size: int) -> None:
        with self._lock:
            if name in self._queued:
                return
            self._queued.add(name)

        def fill() -> None:
            try:
                if self._scarce():
                    self._count("fills_skipped", 1)
                else:
                    self.fill(name, size, wait=False)
            except KVStoreError:
                # No caller waits for it, and the next reader meets the failure by itself.
                self._count("fills_skipped", 1)
            finally:
                self._unqueue(name)

        if not self._later(size, fill):
            self._unqueue(name)
            self._count("fills_skipped", 1)

    def _unqueue(self, name: str) -> None:
        with self._lock:
            self._queued.discard(name)

    # Steps of a flight's leader

    def _lead(self, flight: Flight, *, wait: bool, fill_later: bool) -> None:
        """Fetches and lands the flight, has the folder filled, and ends the flight."""
        ends = True
        try:
            self._fetch(flight, wait=wait)
            if flight.outcome is FlightEnd.BYTES and flight.got == flight.size:
                if fill_later:
                    ends = not self._fill_later(flight)
                else:
                    self._fill(flight)
        finally:
            if ends:
                self._end(flight)

    def _fetch(self, flight: Flight, *, wait: bool) -> None:
        """Lands the flight, as ELSEWHERE if the lock or memory can't be had, or the folder has it by now."""
        locked = False
        try:
            locked = self._lock_name(flight.name, wait=wait)
            if not locked or self._folder.has(flight.name, flight.size):
                return
            flight.buffer = self._buffers.take(flight.size)
            if flight.buffer is None:
                self._count("fills_skipped", 1)
                return
            got = self._slow.read(flight.name, 0, [flight.buffer[: flight.size]], size=flight.size)
            if got is None:
                flight.outcome = FlightEnd.MISSING
                return
            self._count("hits_slow", 1)
            flight.got = got
            flight.outcome = FlightEnd.BYTES
            # Before the other lock is released: a process that waits must see one of the two.
            flight.filling = self._try(FILLING + number_of(flight.name))
        except KVStoreError as exc:
            flight.error, flight.outcome = exc, FlightEnd.FAILED
        finally:
            flight.landed.set()
            if locked:
                self._locks.release(FETCHING + number_of(flight.name))

    def _fill_later(self, flight: Flight) -> bool:
        def fill() -> None:
            try:
                self._fill(flight)
            finally:
                self._end(flight)
                self._flights.leave(flight)

        self._flights.stay(flight)
        if self._later(flight.size, fill):
            return True
        self._flights.leave(flight)
        self._count("fills_skipped", 1)
        return False

    def _fill(self, flight: Flight) -> None:
        if not self._flights.is_cancelled(flight) and self._folder.keep(
            flight.name, [flight.bytes()], flight.got
        ):
            self._count("fills", 1)
            if self._flights.is_cancelled(flight):
                # The payload may have been deleted before the file was there.
                self._folder.drop([flight.name])

    def _end(self, flight: Flight) -> None:
        if flight.filling:
            self._locks.release(FILLING + number_of(flight.name))
        self._flights.end(flight)

    def _lock_name(self, name: str, *, wait: bool) -> bool:
        """Takes FETCHING while FILLING is free. Returns False if another process keeps one of them too
        long."""
        number = number_of(name)
        until = self._clock() + self._wait_s
        pause = 0.0
        while True:
            if self._try(FETCHING + number):
                if not self._is_filling(number):
                    return True
                self._locks.release(FETCHING + number)
                until = min(until, self._clock() + FILL_WAIT_S)
            if not wait or self._clock() >= until:
                return False
            if not pause:
                self._count("waits", 1)
            pause = min(max(_FIRST_PAUSE_S, pause * 1.5), _LAST_PAUSE_S)
            self._sleep(pause)

    def _try(self, number: int) -> bool:
        try:
            return self._locks.acquire(number)
        except KVStoreError as exc:
            self._folder.failed("lock", exc)
            return False

    def _is_filling(self, number: int) -> bool:
        try:
            return self._locks.taken(FILLING + number)
        except KVStoreError as exc:
            self._folder.failed("lock", exc)
            return False
