"""Flights: whole payloads on their way from the shared store, each fetched once for all threads that want it.

The thread that starts a flight leads it: it fetches the payload, then lands the flight. Threads that join
later wait for the landing and copy their ranges out of its buffer. A flight can be joined until its leader
ends it (the payload is in the folder, or will not be), so at every moment a reader finds it in one of the
two.

Buffers are large (32 MiB) and reused: memory that is used for the first time is filled at 2 GB/s, memory that
was used before at 10 to 25. Buffers in use and buffers kept for the next flight stay within one bound, and
at most half of it is kept.

Locking: one lock guards the table and every flight's fields, except `outcome`, `buffer`, `got` and `error`,
which only the leader writes, before it sets `landed`.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import Enum

import numpy as np

from kvstore.errors import KVStoreError

#: Bytes from which on a part is copied without the interpreter's lock.
_LARGE = 256 << 10
#: Buffers are rounded up to a multiple of this, so that they fit more of the payloads to come.
_ROUND = 1 << 20


class FlightEnd(Enum):
    """How a flight ended."""

    BYTES = "bytes"  # in the buffer
    MISSING = "missing"  # the shared store has no such payload
    FAILED = "failed"  # the shared store raised
    ELSEWHERE = "elsewhere"  # perhaps in the folder; if not, each reader reads its own range


class Buffers:
    """A bounded free list of large buffers. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        # The lock guards the fields below it.
        self._lock = threading.Lock()
        self._out = 0
        self._free: list[memoryview] = []

    def take(self, nbytes: int) -> memoryview | None:
        """Returns a buffer of at least `nbytes`, with any content; None if that would exceed the bound.

        A single buffer may be larger than the bound: otherwise a payload that large would never be fetched.
        """
        size = -(-max(nbytes, 1) // _ROUND) * _ROUND
        with self._lock:
            fitting = [one for one in self._free if nbytes <= one.nbytes <= 2 * size]
            if fitting:
                found = min(fitting, key=len)
                self._free = [one for one in self._free if one is not found]
                self._out += found.nbytes
                return found
            if self._out and self._out + size > self._limit:
                return None
            # Kept buffers make room for the new one, the oldest first.
            while self._free and self._out + size + sum(map(len, self._free)) > self._limit:
                del self._free[0]
            self._out += size
        return np.empty(size, np.uint8).data

    def give_back(self, buffer: memoryview) -> None:
        """Takes back a buffer that is neither read nor written any more."""
        with self._lock:
            self._out -= buffer.nbytes
            self._free.append(buffer)
            while sum(map(len, self._free)) > self._limit // 2:
                del self._free[0]


class Flight:
    """One payload on its way."""

    def __init__(self, name: str, size: int) -> None:
        self.name = name
        self.size = size
        self.landed = threading.Event()
        #: Set after `landed`: the payload is in the folder, or will not be.
        self.ended = threading.Event()
        self.outcome = FlightEnd.ELSEWHERE
        self.buffer: memoryview | None = None
        #: Number of the buffer's bytes that are the payload's.
        self.got = 0
        self.error: KVStoreError | None = None
        #: Whether its leader holds FILLING, which tells other processes that it is about to fill the folder.
        self.filling = False
        #: The payload was deleted, replaced or found bad: it must not get into the folder.
        self.cancelled = False
        #: Threads and jobs that may use the buffer.
        self.users = 1

    def bytes(self) -> memoryview:
        """Returns the payload of a flight that has landed as BYTES."""
        if self.buffer is None:
            raise RuntimeError(f"flight of {self.name} has no buffer")
        return self.buffer[: self.got]

    def copy(self, offset: int, into: Sequence[memoryview]) -> int:
        """Fills the buffers from the payload's byte `offset` on. Returns how many bytes there were."""
        rest = self.bytes()[offset:]
        total = 0
        for view in into:
            part = rest[total : total + view.nbytes]
            if part.nbytes:
                _copy(part, view.cast("B") if view.format != "B" or view.ndim != 1 else view)
                total += part.nbytes
        return total


class Flights:
    """The flights of this process, by payload name."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        self._lock = threading.Lock()
        self._flights: dict[str, Flight] = {}

    def join(self, name: str, size: int) -> tuple[Flight, bool] | None:
        """Returns the flight of `name`, and whether the caller leads it; None if one of another size is under
        way.

        Everyone who joins must leave; the leader must also land and end the flight.
        """
        with self._lock:
            flight = self._flights.get(name)
            if flight is None:
                flight = self._flights[name] = Flight(name, size)
                return flight, True
            if flight.size != size:
                return None
            flight.users += 1
            return flight, False

    def arrived(self, name: str) -> Flight | None:
        """Joins the flight of `name` if its bytes are here already. Returns None otherwise."""
        with self._lock:
            flight = self._flights.get(name)
            if flight is None or not flight.landed.is_set() or flight.outcome is not FlightEnd.BYTES:
                return None
            flight.users += 1
            return flight

    def stay(self, flight: Flight) -> None:
        """Counts one more user of the flight, who must leave as well."""
        with self._lock:
            flight.users += 1

    def leave(self, flight: Flight) -> None:
        """Tells that the caller uses the flight's buffer no more; the last user gives it back."""
        with self._lock:
            flight.users -= 1
            buffer = flight.buffer if not flight.users else None
        if buffer is not None:
            self._buffers.give_back(buffer)

    def end(self, flight: Flight) -> None:
        """Takes the flight out of the table: no thread can join it any more."""
        with self._lock:
            if self._flights.get(flight.name) is flight:
                del self._flights[flight.name]
        flight.ended.set()

    def cancel(self, name: str) -> bool:
        """Takes the flight of `name` out of the table, and keeps its bytes out of the folder. Returns whether
        there was one."""
        with self._lock:
            flight = self._flights.pop(name, None)
            if flight is not None:
                flight.cancelled = True
        return flight is not None

    def is_cancelled(self, flight: Flight) -> bool:
        """Returns whether the flight's bytes must be kept out of the folder."""
        with self._lock:
            return flight.cancelled


def _copy(source: memoryview, target: memoryview) -> None:
    if source.nbytes < _LARGE:
        target[: source.nbytes] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8, source.nbytes), np.frombuffer(source, np.uint8))
