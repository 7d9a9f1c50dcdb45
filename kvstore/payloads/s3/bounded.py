"""Puts a bound on what one answer may cost boto3: its time, head and body together, and its size.

botocore's own read timeout is that of a single recv, so a server that sends a byte now and then is waited for
without end. Here the time left is what each recv of an answer may take.
"""

from __future__ import annotations

import io
import time
from contextlib import suppress
from functools import partial
from http.client import HTTPResponse
from typing import Any

from botocore.awsrequest import (
    AWSHTTPConnection,
    AWSHTTPConnectionPool,
    AWSHTTPSConnection,
    AWSHTTPSConnectionPool,
)

#: Most bytes of one answer. A page of a listing, a thousand keys of a kilobyte each, has a tenth of it.
_MOST_BYTES = 32 << 20


def bound_answers(client: Any) -> None:
    """Makes every answer to `client` end within its `read_timeout`, or fail as if that had run out."""
    # botocore offers no other way to the sockets. A test makes the attack, so that a move shows.
    session = client._endpoint.http_session
    session._pool_classes_by_scheme = {"http": _Pool, "https": _TLSPool}
    session._manager.pool_classes_by_scheme = session._pool_classes_by_scheme


class _Raw(io.RawIOBase):
    """The bytes of an answer as they come from a socket."""

    def __init__(self, socket: Any, timeout_s: float) -> None:
        self._socket = socket
        self._timeout_s = timeout_s
        self._bytes: Any = socket.makefile("rb", buffering=0)
        self._until = time.monotonic() + timeout_s
        self._left = _MOST_BYTES

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the answer takes too long")
        self._socket.settimeout(left_s)
        count: int | None = self._bytes.readinto(buffer)
        self._left -= count or 0
        if self._left < 0:
            raise OSError("the answer is too long")
        return count

    def close(self) -> None:
        if not self.closed:
            self._bytes.close()
            # The connection may carry another request.
            with suppress(OSError):
                self._socket.settimeout(self._timeout_s)
        super().close()


class _Source:
    """What http.client takes for a socket when it reads an answer."""

    def __init__(self, socket: Any, timeout_s: float) -> None:
        self._raw = _Raw(socket, timeout_s)

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self._raw)


def _answer(timeout_s: float, socket: Any, *args: Any, **kwargs: Any) -> HTTPResponse:
    return HTTPResponse(_Source(socket, timeout_s), *args, **kwargs)  # type: ignore[arg-type]


class _Connection(AWSHTTPConnection):  # type: ignore[misc]
    def getresponse(self) -> Any:
        self.response_class = partial(_answer, self.timeout)
        return super().getresponse()


class _TLSConnection(AWSHTTPSConnection):  # type: ignore[misc]
    def getresponse(self) -> Any:
        self.response_class = partial(_answer, self.timeout)
        return super().getresponse()


class _Pool(AWSHTTPConnectionPool):  # type: ignore[misc]
    ConnectionCls = _Connection


class _TLSPool(AWSHTTPSConnectionPool):  # type: ignore[misc]
    ConnectionCls = _TLSConnection
