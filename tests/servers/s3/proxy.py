"""An HTTP proxy in front of an S3 server that breaks what it is told to break.

It passes requests on as they came, the Host header included, so that signatures stay valid: a client that
is given the proxy's endpoint signs for it, and servers compute with what they receive. Each connection of a
client has a thread and a connection to the server of its own; bodies flow through in pieces.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from types import TracebackType
from typing import Self
from urllib.parse import unquote, urlsplit

from tests.servers.s3.faults import ANSWERS, FAULTS, Exchange, Rule
from tests.servers.s3.http import Head, Stream
from tests.waiting import PATIENCE_S


class S3Proxy:
    """Listens on one port from its construction until `close`, except after `refuse`."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        assert parts.hostname is not None and parts.port is not None
        self.upstream = (parts.hostname, parts.port)
        self._lock = threading.Lock()
        # All below: under the lock.
        self._rules: list[Rule] = []
        self._log: list[Exchange] = []
        self._injected: Counter[str] = Counter()
        self._sockets: set[socket.socket] = set()
        self._threads: set[threading.Thread] = set()
        self._random = random.Random(0)
        #: Set by `heal`, which leaves a new one.
        self._healing = threading.Event()
        self._listener: socket.socket | None = None
        self.port = 0
        self._listen()

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> list[Exchange]:
        """The requests since the start or the last `forget`, in the order of their arrival."""
        with self._lock:
            return list(self._log)

    @property
    def counts(self) -> Counter[str]:
        """Requests by method, those included that the server never saw."""
        return Counter(each.method for each in self.log)

    @property
    def bytes_in(self) -> Counter[str]:
        """Bytes of the requests' bodies, by method."""
        return self._sum(lambda each: each.bytes_in)

    @property
    def bytes_out(self) -> Counter[str]:
        """Bytes of the answers' bodies, by method."""
        return self._sum(lambda each: each.bytes_out)

    @property
    def injected(self) -> Counter[str]:
        """How often each fault happened since the start or the last `forget`."""
        with self._lock:
            return Counter(self._injected)

    def forget(self) -> None:
        """Empties the log and the counts."""
        with self._lock:
            self._log.clear()
            self._injected.clear()

    def inject(
        self,
        fault: str,
        *,
        methods: Collection[str] | None = None,
        key: str = "",
        times: int | None = None,
        skip: int = 0,
        probability: float = 1.0,
        seconds: float = 0.0,
        bytes_per_s: float = 1e6,
        beyond_per_s: float = 0.0,
    ) -> None:
        """From now on, and besides what was injected before, `fault` happens to requests of `methods`
        (None: of any) with `key` in their decoded path and query: not to the first `skip` of those, and
        `times` times (None: for ever). It spares `beyond_per_s` of them a second.

        A request has one fault at most, that of the oldest rule that applies. One of a body does not happen,
        and is not counted, where there is none, or none of a length known in advance.
        """
        if fault not in FAULTS:
            raise ValueError(f"no such fault: {fault}")
        assert not isinstance(methods, str), "a collection of methods"
        chosen = None if methods is None else frozenset(methods)
        with self._lock:
            self._rules.append(
                Rule(fault, chosen, key, times, skip, probability, seconds, bytes_per_s, beyond_per_s)
            )

    def refuse(self) -> None:
        """As if nobody listened: connections that are open end, new ones are refused."""
        with self._lock:
            self._injected["refuse"] += 1
            listener, self._listener = self._listener, None
            self._shut_all(listener)
        if listener is not None:
            listener.close()

    def heal(self) -> None:
        """No fault from now on; what hangs ends with a connection reset, what is slow hurries on."""
        with self._lock:
            self._rules.clear()
            healing, self._healing = self._healing, threading.Event()
        healing.set()
        if self._listener is None:
            self._listen()

    def close(self) -> None:
        """Ends every connection; returns once no thread is left."""
        self.refuse()
        with self._lock:
            self._healing.set()
            threads = list(self._threads)
        for thread in threads:
            thread.join(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # What connections call, each from its thread.

    def arrived(self, request: Head) -> Exchange:
        """Its line in the log."""
        method, target, _ = request.words
        path, _, query = target.partition("?")
        exchange = Exchange(method, unquote(path), unquote(query), request.headers.get("range"))
        with self._lock:
            self._log.append(exchange)
        return exchange

    def choose(self, exchange: Exchange, stage: str) -> Rule | None:
        """The rule that applies at this stage, if any: counted."""
        target = f"{exchange.path}?{exchange.query}"
        with self._lock:
            if exchange.fault is not None:
                return None
            for rule in self._rules:
                if stage not in FAULTS[rule.fault] or rule.key not in target or rule.times == 0:
                    continue
                if rule.methods is not None and exchange.method not in rule.methods:
                    continue
                if rule.skip:
                    rule.skip -= 1
                    continue
                if rule.probability < 1 and self._random.random() >= rule.probability:
                    continue
                if rule.beyond_per_s and rule.spares(time.monotonic()):
                    continue
                if rule.times is not None:
                    rule.times -= 1
                exchange.fault = rule.fault
                self._injected[rule.fault] += 1
                return rule
        return None

    def healing(self) -> threading.Event:
        """Set once `heal` or `close` is called after this."""
        with self._lock:
            return self._healing

    def opened(self, connection: socket.socket) -> None:
        """Says whose end `refuse` and `close` have to bring about."""
        with self._lock:
            self._sockets.add(connection)

    def closing(self, connection: socket.socket) -> None:
        """Before it is closed: after that, its number may be another one's."""
        with self._lock:
            self._sockets.discard(connection)

    def _sum(self, bytes_of: Callable[[Exchange], int]) -> Counter[str]:
        total: Counter[str] = Counter()
        for exchange in self.log:
            total[exchange.method] += bytes_of(exchange)
        return total

    def _listen(self) -> None:
        # It reuses the port although connections of before linger there.
        listener = socket.create_server(("127.0.0.1", self.port), backlog=256)
        self.port = listener.getsockname()[1]
        with self._lock:
            self._listener = listener
        self._run(lambda: self._accept(listener))

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                with self._lock:
                    refused = self._listener is not listener
                if refused:
                    client.close()
                    return
                self.opened(client)
                self._run(Connection(self, client).run)

    def _run(self, target: Callable[[], None]) -> None:
        def run() -> None:
            try:
                target()
            finally:
                with self._lock:
                    self._threads.discard(thread)

        thread = threading.Thread(target=run, name="s3-proxy", daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    def _shut_all(self, listener: socket.socket | None) -> None:
        for each in [*self._sockets, *([listener] if listener else [])]:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


class _Reset(Exception):
    """The client's connection is to end at once, with an RST."""


class Connection:
    """A client's connection and the one to the server that goes with it. One thread's."""

    def __init__(self, proxy: S3Proxy, client: socket.socket) -> None:
        self._proxy = proxy
        self._client = Stream(client)
        self._server: Stream | None = None

    def run(self) -> None:
        """Passes requests on until either side has enough."""
        try:
            while self._exchange():
                pass
        except _Reset:
            # Lingering for no time at all is how a reset is asked for.
            self._client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        except OSError:
            pass
        finally:
            self._drop_server()
            self._proxy.closing(self._client.socket)
            self._client.socket.close()

    def _exchange(self) -> bool:
        """Whether another one may follow."""
        request = self._client.head()
        if request is None:
            return False
        exchange = self._proxy.arrived(request)
        if rule := self._proxy.choose(exchange, "request"):
            if rule.fault != "delay":
                return self._answer(rule, request, exchange)
            self._wait(rule.seconds)
        server = self._connected()
        server.send(request.raw)
        answer = self._interim() if "expect" in request.headers else None
        all_sent = not request.has_body
        if answer is None:
            all_sent = self._upload(request, exchange)
            answer = self._final()
        if self._proxy.choose(exchange, "answer"):
            raise _Reset
        return self._download(request, answer, exchange) and all_sent

    def _answer(self, rule: Rule, request: Head, exchange: Exchange) -> bool:
        if rule.fault == "hang":
            self._wait(None)
        if rule.fault in ("hang", "reset_before"):
            raise _Reset
        line, kind, content = ANSWERS[rule.fault]
        if kind == "application/xml":
            content = (
                '<?xml version="1.0" encoding="UTF-8"?>'
                f"<Error><Code>{content}</Code><Message>injected</Message><RequestId>0</RequestId></Error>"
            )
        # A client that waits for leave to send its body is not given any, so the body cannot be skipped.
        keeps = "expect" not in request.headers
        if keeps and request.has_body:
            for piece in self._client.body(request):
                exchange.bytes_in += len(piece)
        body = b"" if request.words[0] == "HEAD" else content.encode()
        exchange.status = int(line[:3])
        exchange.bytes_out += len(body)
        self._client.send(
            f"HTTP/1.1 {line}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
            f"Connection: {'keep-alive' if keeps else 'close'}\r\n\r\n".encode()
            + body
        )
        return keeps and not request.closes

    def _connected(self) -> Stream:
        if self._server is not None and self._server.has_news():
            self._drop_server()
        if self._server is None:
            try:
                connection = socket.create_connection(self._proxy.upstream)
            except OSError:
                raise _Reset from None
            self._proxy.opened(connection)
            self._server = Stream(connection)
        return self._server

    def _drop_server(self) -> None:
        if self._server is not None:
            self._proxy.closing(self._server.socket)
            self._server.socket.close()
            self._server = None

    def _interim(self) -> Head | None:
        """What the server says before it has the body; None if it wants it, or the client sends it anyhow."""
        assert self._server is not None
        if not self._server.first_of(self._client):
            return None
        answer = self._next_head()
        if answer.status != 100:
            return answer
        self._client.send(answer.raw)
        return None

    def _final(self) -> Head:
        while (answer := self._next_head()).status < 200:
            self._client.send(answer.raw)
        return answer

    def _next_head(self) -> Head:
        assert self._server is not None
        try:
            answer = self._server.head()
        except OSError:
            answer = None
        if answer is None:
            raise _Reset
        return answer

    def _upload(self, request: Head, exchange: Exchange) -> bool:
        """False if the server closed before it had all: it may have answered all the same."""
        if not request.has_body:
            return True
        assert self._server is not None
        rule = self._proxy.choose(exchange, "upload")
        for piece in self._spoiled(rule, self._client.body(request), request.length):
            exchange.bytes_in += len(piece)
            try:
                self._server.send(piece)
            except OSError:
                return False
        return True

    def _download(self, request: Head, answer: Head, exchange: Exchange) -> bool:
        """Whether the connection can go on."""
        assert self._server is not None
        bodiless = request.words[0] == "HEAD" or answer.status in (204, 304) or answer.length == 0
        rule = None
        if request.words[0] == "GET" and answer.status in (200, 206) and answer.length:
            rule = self._proxy.choose(exchange, "download")
        exchange.status = answer.status
        cut = rule is not None and rule.fault in ("short", "truncate")
        half = (answer.length or 0) // 2
        self._client.send(answer.shortened(half) if rule and rule.fault == "short" else answer.raw)
        if not bodiless:
            body = self._spoiled(rule, self._server.body(answer), answer.length)
            for piece in body:
                exchange.bytes_out += len(piece)
                self._client.send(piece)
        if cut or answer.closes:
            # With the rest of the body, if it was cut.
            self._drop_server()
        framed = bodiless or answer.chunked or answer.length is not None
        truncated = rule is not None and rule.fault == "truncate"
        return framed and not truncated and not request.closes and not answer.closes

    def _spoiled(
        self, rule: Rule | None, body: Iterator[memoryview], length: int | None
    ) -> Iterator[memoryview]:
        """The body as the rule would have it; of a chunked one, half is its first piece."""
        if rule is None:
            yield from body
        elif rule.fault == "slow":
            yield from self._paced(body, rule.bytes_per_s)
        elif rule.fault == "flip":
            at = (length or 0) // 2
            for piece in body:
                if 0 <= at < len(piece):
                    piece[at] ^= 1
                at -= len(piece)
                yield piece
        else:
            left = 1 if length is None else length // 2
            for piece in body:
                yield piece[: left if length is not None else None]
                left -= len(piece)
                if left <= 0:
                    break
            if rule.fault == "hang_body":
                self._wait(None)
            if rule.fault in ("hang_body", "reset"):
                raise _Reset

    def _paced(self, body: Iterator[memoryview], bytes_per_s: float) -> Iterator[memoryview]:
        healing = self._proxy.healing()
        step = max(1, int(bytes_per_s / 50))
        for piece in body:
            while piece:
                if not healing.is_set():
                    self._wait(min(step, len(piece)) / bytes_per_s)
                part = piece if healing.is_set() else piece[:step]
                yield part
                piece = piece[len(part) :]

    def _wait(self, seconds: float | None) -> None:
        """For that long (None: for ever), or until all is healed, or until the client goes away."""
        healing = self._proxy.healing()
        until = None if seconds is None else time.monotonic() + seconds
        while not healing.is_set():
            left = 0.02 if until is None else min(0.02, until - time.monotonic())
            if left <= 0:
                return
            if self._client.left_within(left):
                raise _Reset
