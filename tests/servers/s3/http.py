"""HTTP/1.1 as a proxy sees it: heads that it reads and passes on as they came, bodies in pieces."""

from __future__ import annotations

import re
import select
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Self

#: Enough to lose little time per piece, and little memory per connection.
PIECE_BYTES = 1 << 18
_HEAD_LIMIT_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Head:
    """The first line and the headers of a request or an answer."""

    raw: bytes
    #: The three words of the first line.
    words: tuple[str, str, str]
    #: With names in lower case; of a repeated one, the last.
    headers: dict[str, str]

    @classmethod
    def parse(cls, raw: bytes) -> Self:
        first, *lines = raw.decode("latin-1").split("\r\n")
        words = [*first.split(" ", 2), "", ""]
        pairs = (line.partition(":") for line in lines if line)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        return cls(raw, (words[0], words[1], words[2]), headers)

    @property
    def status(self) -> int:
        return int(self.words[1])

    @property
    def length(self) -> int | None:
        """What Content-Length says."""
        value = self.headers.get("content-length")
        return None if value is None else int(value)

    @property
    def chunked(self) -> bool:
        return self.headers.get("transfer-encoding", "").lower() == "chunked"

    @property
    def has_body(self) -> bool:
        """Of a request: whether one follows."""
        return self.chunked or bool(self.length)

    @property
    def closes(self) -> bool:
        """Whether the connection ends after it."""
        return "close" in self.headers.get("connection", "").lower() or "HTTP/1.0" in self.words

    def shortened(self, length: int) -> bytes:
        """As it would be of an answer with a body of `length` bytes."""
        raw = re.sub(rb"(?im)^(content-length: *)\d+", rb"\g<1>%d" % length, self.raw)
        if found := re.search(rb"(?im)^content-range: *bytes (\d+)-\d+", raw):
            last = int(found[1]) + length - 1
            raw = re.sub(rb"(?im)^(content-range: *bytes \d+-)\d+", rb"\g<1>%d" % last, raw)
        return raw


class Stream:
    """One end of a connection. Pieces of bodies are of one buffer: good, and writable, until the next."""

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(PIECE_BYTES))
        self._ahead = bytearray()

    def send(self, content: bytes | memoryview) -> None:
        self.socket.sendall(content)

    def head(self) -> Head | None:
        """The next one; None if the connection ends first."""
        raw = self._until(b"\r\n\r\n")
        return None if raw is None else Head.parse(raw)

    def body(self, head: Head) -> Iterator[memoryview]:
        """All of it, framing included. A connection that ends before it does is a ConnectionError."""
        if head.chunked:
            return self._chunks()
        if head.length is not None:
            return self._pieces(head.length)
        return self._rest()

    def has_news(self) -> bool:
        """Whether something arrived that nobody asked for: mostly, that the other end closed."""
        poll = select.poll()
        poll.register(self.socket, select.POLLIN | select.POLLRDHUP)
        return bool(self._ahead) or bool(poll.poll(0))

    def first_of(self, other: Stream) -> bool:
        """Waits for either to have something to read; whether this one has."""
        if self._ahead or other._ahead:
            return bool(self._ahead)
        ready, _, _ = select.select([self.socket, other.socket], [], [])
        return self.socket in ready

    def left_within(self, seconds: float) -> bool:
        """Waits up to `seconds` for the other end to go away; whether it did."""
        poll = select.poll()
        poll.register(self.socket, select.POLLRDHUP)
        return bool(poll.poll(seconds * 1000))

    def _until(self, mark: bytes) -> bytes | None:
        while (end := self._ahead.find(mark)) < 0:
            if len(self._ahead) > _HEAD_LIMIT_BYTES:
                raise ConnectionError("no end of a head")
            got = self.socket.recv(_HEAD_LIMIT_BYTES)
            if not got:
                return None
            self._ahead += got
        end += len(mark)
        found = bytes(self._ahead[:end])
        del self._ahead[:end]
        return found

    def _pieces(self, count: int) -> Iterator[memoryview]:
        if early := min(count, len(self._ahead), PIECE_BYTES):
            self._buffer[:early] = self._ahead[:early]
            del self._ahead[:early]
            yield self._buffer[:early]
            count -= early
        while count:
            got = self.socket.recv_into(self._buffer, min(count, PIECE_BYTES))
            if not got:
                raise ConnectionError("the body ended early")
            yield self._buffer[:got]
            count -= got

    def _chunks(self) -> Iterator[memoryview]:
        size = -1
        while size:
            line = self._until(b"\r\n")
            if line is None:
                raise ConnectionError("the body ended early")
            yield memoryview(line)
            size = int(line.split(b";")[0], 16)
            if size:
                yield from self._pieces(size + 2)
        # After the last chunk: trailing headers and an empty line.
        while line != b"\r\n":
            line = self._until(b"\r\n")
            if line is None:
                raise ConnectionError("the body ended early")
            yield memoryview(line)

    def _rest(self) -> Iterator[memoryview]:
        if self._ahead:
            rest = memoryview(bytes(self._ahead))
            self._ahead.clear()
            yield rest
        while got := self.socket.recv_into(self._buffer):
            yield self._buffer[:got]
