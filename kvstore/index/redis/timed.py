"""Ends calls to Redis in time, and bounds what they are answered.

A socket's timeout is that of one recv: a reply that comes a byte at a time never meets it, and one without
end fills the memory until it does. So each connection's socket gives every recv and send only what is left
of the call, and counts what the call has received.

A call that runs `in_time` has a deadline for all that it does: waiting for the pool, logging in, sending,
reading, and doing so once more. Whatever else uses such a socket (asking Sentinels, or a Cluster for its
nodes) has one for each answer, from the request on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import redis

#: Most bytes that are read for one request. The largest honest answer, a page of a listing whose segments
#: have 1,024 slots of different sizes and 8 ranks, has half as many.
MOST_BYTES = 32 << 20
#: Seconds for what has arrived already when the time is over: the process may have been stopped meanwhile.
_LAST_S = 0.001


class _Call(threading.local):
    """When the call that this thread makes is to end; None: it makes none."""

    end_s: float | None = None
    connects: bool = False


_call = _Call()


@contextmanager
def in_time(timeout_s: float) -> Iterator[None]:
    """Gives all that this thread does on timed sockets `timeout_s` seconds altogether."""
    _call.end_s, _call.connects = time.monotonic() + timeout_s, False
    try:
        yield
    finally:
        _call.end_s = None


def connecting(more_s: float) -> float:
    """Gives this thread's call `more_s` seconds more, once, because it has to connect.

    Returns how many seconds are left of it then, at most; infinity outside of a call.
    """
    if _call.end_s is None:
        return inf
    if not _call.connects:
        _call.connects = True
        _call.end_s += more_s
    return max(_LAST_S, _call.end_s - time.monotonic())


class TimedSocket:
    """A connected socket, for one thread at a time. What isn't here is the socket's own."""

    def __init__(self, inner: Any, timeout_s: float) -> None:
        self._inner = inner
        self._timeout_s = timeout_s
        self._end_s = inf
        self._received = 0
        self._late = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def sendall(self, data: Any) -> None:
        """Begins a request. Raises OSError, also if nothing is left of the call."""
        self._received, self._late = 0, False
        self._end_s = time.monotonic() + self._timeout_s
        self._inner.settimeout(self._left())
        self._inner.sendall(data)

    def recv_into(self, buffer: Any, *args: Any) -> int:
        """Reads a part of the answer. Raises OSError, and redis.InvalidResponse for an answer too large."""
        self._inner.settimeout(self._left())
        return self._counted(self._inner.recv_into(buffer, *args))

    def recv(self, size: int, *args: Any) -> bytes:
        """Reads as `recv_into` does."""
        self._inner.settimeout(self._left())
        found: bytes = self._inner.recv(size, *args)
        self._counted(len(found))
        return found

    def _left(self) -> float:
        end_s = self._end_s if _call.end_s is None else min(self._end_s, _call.end_s)
        left_s = end_s - time.monotonic()
        if left_s > 0:
            return left_s
        if self._late:
            raise TimeoutError("the answer takes too long")
        self._late = True
        return _LAST_S

    def _counted(self, size: int) -> int:
        self._received += size
        if self._received > MOST_BYTES:
            raise redis.InvalidResponse(f"an answer of more than {MOST_BYTES >> 20} MiB")
        return size
