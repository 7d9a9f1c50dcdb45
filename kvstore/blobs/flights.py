"""Flights: whole payloads on their way from the shared store, each fetched once for all threads that want it.

The thread that starts a flight leads it: it fetches, then lands it. Threads that join later wait for the
landing and take their ranges out of its buffer. A flight stays joinable until its leader ends it (the payload
is in the folder, or will not be), so there is no moment at which a payload is neither here nor there.

Buffers are large (32 MiB) and reused: memory that is used for the first time is filled at 2 GB/s, memory that
was used before at 10 to 25. Those given out and those kept for the next flight stay within one bound, and
half of it is the most that is kept.

Locking: one lock guards the table and every flight's fields, except `outcome`, `buffer`, `got` and `error`,
which the leader writes before `landed` is set and nobody afterwards.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from enum import Enum

import numpy as np

from kvstore.errors import KVStoreError

#: Parts from here on are copied without the interpreter's lock.
_LARGE = 256 << 10
#: Buffers are made a little larger than asked, so that they fit more of the payloads to come.
_ROUND = 1 << 20


class Outcome(Enum):
    """How a flight ended."""

    BYTES = "bytes"  # in the buffer
    MISSING = "missing"  # the shared store has no such payload
    FAILED = "failed"  # the shared store raised
    ELSEWHERE = "elsewhere"  # in the folder perhaps; else everybody fetches their own


class Buffers:
    """A bounded free list of large buffers. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        # The lock guards the fields below it.
        self._lock = threading.Lock()
        self._out = 0
        self._free: list[memoryview] = []

    def take(self, nbytes: int) -> memoryview | None:
        """A buffer of at least `nbytes`, holding anything; None if that would exceed the bound.

        The only one may be larger than the bound: a payload that never fits would never get anywhere.
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
            # What is kept makes room for what is needed, the oldest first.
            while self._free and self._out + size + sum(map(len, self._free)) > self._limit:
                del self._free[0]
            self._out += size
        return np.empty(size, np.uint8).data

    def give_back(self, buffer: memoryview) -> None:
        """Nobody reads or writes it any more."""
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
        #: Set behind `landed`: the payload is in the folder, or will not be.
        self.ended = threading.Event()
        self.outcome = Outcome.ELSEWHERE
        self.buffer: memoryview | None = None
        #: How many bytes of the buffer are the payload's.
        self.got = 0
        self.error: KVStoreError | None = None
        #: Whether its leader has the lock that tells other processes that the folder is about to be filled.
        self.filling = False
        #: Somebody deleted or replaced the payload, or found it bad: it must not get into the folder.
        self.cancelled = False
        #: Threads and jobs that may use the buffer.
        self.users = 1

    def bytes(self) -> memoryview:
        """The payload, once it has landed with its bytes."""
        if self.buffer is None:
            raise RuntimeError(f"flight of {self.name} has no buffer")
        return self.buffer[: self.got]

    def copy(self, offset: int, into: Sequence[memoryview]) -> int:
        """Fill the buffers from the payload's byte `offset` on; returns how many bytes there were."""
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
        """The flight of `name`, and whether the caller leads it. None if one of another size is under way.

        Everybody leaves it in the end; the leader lands it and ends it as well.
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
        """Join the flight of `name` if its bytes are here already."""
        with self._lock:
            flight = self._flights.get(name)
            if flight is None or not flight.landed.is_set() or flight.outcome is not Outcome.BYTES:
                return None
            flight.users += 1
            return flight

    def stay(self, flight: Flight) -> None:
        """One more user, who will leave."""
        with self._lock:
            flight.users += 1

    def leave(self, flight: Flight) -> None:
        """The caller uses the flight's buffer no more."""
        with self._lock:
            flight.users -= 1
            buffer = flight.buffer if not flight.users else None
        if buffer is not None:
            self._buffers.give_back(buffer)

    def end(self, flight: Flight) -> None:
        """Nobody can join any more."""
        with self._lock:
            if self._flights.get(flight.name) is flight:
                del self._flights[flight.name]
        flight.ended.set()

    def cancel(self, name: str) -> bool:
        """End the flight of `name` and keep its bytes out of the folder; whether there was one."""
        with self._lock:
            flight = self._flights.pop(name, None)
            if flight is not None:
                flight.cancelled = True
        return flight is not None

    def is_cancelled(self, flight: Flight) -> bool:
        """Whether its bytes are to be kept out of the folder."""
        with self._lock:
            return flight.cancelled


def _copy(source: memoryview, target: memoryview) -> None:
    if source.nbytes < _LARGE:
        target[: source.nbytes] = source
    else:
        np.copyto(np.frombuffer(target, np.uint8, source.nbytes), np.frombuffer(source, np.uint8))
