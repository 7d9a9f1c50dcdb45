"""A server on loopback that speaks just enough HTTP to answer an S3 client whatever a test wants it to."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlencode

from kvstore.payloads.s3.store import S3Payloads
from schemas.settings import S3Settings
from schemas.urls import s3_location
from tests.servers.s3.http import Head, Stream
from tests.waiting import PATIENCE_S

#: From a request's head and its body to the pieces of the answer, head included.
Answer = Callable[[Head, bytes], Iterable[bytes]]

_DATE = "Wed, 21 Oct 2015 07:28:00 GMT"


class HostileServer:
    """Answers every request by `answer`, and keeps all of them in `requests`. Any number of connections."""

    def __init__(self, answer: Answer, host: str = "127.0.0.1", port: int = 0) -> None:
        self.answer = answer
        self.host = host
        self.requests: list[Head] = []
        self._listener = socket.create_server((host, port))
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._ended = threading.Event()
        self._spawn(self._listen)

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self._listener.getsockname()[1]}"

    def open(self, **s3: Any) -> S3Payloads:
        """The leaf alone, with short deadlines unless told otherwise."""
        query = urlencode({"endpoint": self.endpoint, "region": "us-east-1"}, safe=":/")
        given = {"access_key_id": "quick-tests", "secret_access_key": "not-checked"} | s3
        return S3Payloads(s3_location(f"s3://bucket/pre?{query}"), S3Settings.model_validate(given))

    def pause(self, seconds: float) -> None:
        """Waits within an answer, and no longer than the server lives."""
        if self._ended.wait(seconds):
            raise ConnectionError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        with self._lock:
            for each in self._sockets:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for thread in self._threads:
            thread.join(PATIENCE_S)

    def _spawn(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _listen(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._sockets.add(connection)
            self._spawn(self._serve, connection)

    def _serve(self, connection: socket.socket) -> None:
        stream = Stream(connection)
        try:
            while (head := stream.head()) is not None:
                body = b"".join(bytes(piece) for piece in stream.body(head)) if head.has_body else b""
                with self._lock:
                    self.requests.append(head)
                for piece in self.answer(head, body):
                    stream.send(piece)
        except OSError:
            pass  # the client went away, or the test is over
        finally:
            with self._lock:
                self._sockets.discard(connection)
            connection.close()


def answer(status: str, body: bytes = b"", length: int | None = None, **headers: str) -> Iterator[bytes]:
    """One whole answer; `length` is what it claims, where that isn't the truth. `x_amz_a` is `x-amz-a`."""
    yield head(status, len(body) if length is None else length, **headers)
    yield body


def head(status: str, length: int, **headers: str) -> bytes:
    """Its first lines."""
    given = {"etag": '"tag"', "last-modified": _DATE, "content-length": str(length)}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    return "\r\n".join([f"HTTP/1.1 {status}", *map(": ".join, given.items()), "", ""]).encode()


def listing(entries: str = "", more: str = "") -> bytes:
    """The body of a page of a listing. `more` follows the entries."""
    return (
        '<?xml version="1.0"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
        f"<Name>bucket</Name>{more}{entries}</ListBucketResult>"
    ).encode()


def entry(key: str, size: str = "<Size>1</Size>", date: str = "2026-01-01T00:00:00.000Z") -> str:
    """One object of a listing."""
    modified = f"<LastModified>{date}</LastModified>" if date else ""
    return f"<Contents><Key>{key}</Key>{modified}{size}</Contents>"
