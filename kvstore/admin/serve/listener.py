"""A small HTTP server: GET and HEAD of a fixed set of paths, which functions answer from memory.

It is bounded in every direction: HEAD_S for a request, from its first byte to its last, and as long for a
handshake of TLS before it; WRITE_S for an answer, whichever side is slow; CONNECTIONS connections, of which
the oldest that has not asked yet makes room for a new one; THREADS threads that make answers. One thread more
waits for all connections, and answers probes itself, so that neither who is slow nor who asks for much keeps
a probe waiting. No path of a request ever names a file.

What is served is not meant for every web site: a page of another site can't read it (no CORS), can't frame
it, and can't reach it by a name of its own. Who may ask is kvstore.admin.serve.door's.
"""

from __future__ import annotations

import asyncio
import http.client
import io
import ipaddress
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from email.utils import formatdate
from functools import partial
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kvstore.admin.serve.door import Door, Guests
from kvstore.errors import ConfigError

log = logging.getLogger(__name__)

CONNECTIONS = 128
THREADS = 2
HEAD_S = 2.0
HEAD_BYTES = 16384
WRITE_S = 10.0
#: How long a wrong password waits for its answer: with CONNECTIONS, so many guesses a second at most.
WRONG_S = 1.0
_CLOSE_S = 1.0
#: Pause after an accept that failed, as it does without descriptors.
_ACCEPT_AGAIN_S = 0.1
_BACKLOG = 128

_HEADERS = {
    "Server": "kvstore",
    "Cache-Control": "no-store",
    "Connection": "close",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """The parts of a request that a response may depend on."""

    query: Mapping[str, str]
    accept: str


@dataclass(frozen=True, slots=True)
class Response:
    """What is sent to the client."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


Route = Callable[[HttpRequest], Response]
Routes = Mapping[str, Route]


def sentence(text: str, status: int = 200) -> Response:
    """Returns a response of one line."""
    return Response(f"{text}\n".encode("utf-8", "replace"), status=status)


class _Visit:
    """One connection. For the listener's thread."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.transport: asyncio.Transport | None = None
        #: Whether nothing is being done for it: it has not asked yet, or asked with a wrong password.
        self.idle = True

    def end(self) -> None:
        """Closes it, whatever is still to be sent. Idempotent."""
        if self.transport is None:
            self.connection.close()
        else:
            self.transport.abort()


class Listener:
    """Listens and answers from the moment it is created; `close` ends it."""

    def __init__(
        self,
        host: str,
        port: int,
        routes: Routes,
        probes: Routes | None = None,
        access: Guests | None = None,
    ) -> None:
        """Listens at `host`:`port`; port 0 is any free one. Raises ConfigError if it can't listen there, or
        can't read what `access` names.

        `probes` are answered to everybody, in the thread that listens: they don't wait. Where not everybody
        may ask for the rest, they say good or bad alone.
        """
        self._routes, self._probes = routes, probes or {}
        self.door = Door(access or Guests())
        self._socket = _listening(host, port)
        #: The address and the port at which it listens.
        self.address: tuple[str, int] = self._socket.getsockname()[:2]
        self._visits: dict[asyncio.Task[None], _Visit] = {}
        self._closing = asyncio.Event()
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="http")
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_complain)
        self._thread = threading.Thread(target=self._run, name="http", daemon=True)
        self._thread.start()

    @property
    def local(self) -> bool:
        """Whether only this machine reaches it."""
        return ipaddress.ip_address(self.address[0].partition("%")[0]).is_loopback

    @property
    def url(self) -> str:
        """The URL at which a browser on this machine finds it."""
        host, port = self.address
        if ipaddress.ip_address(host.partition("%")[0]).is_unspecified:
            host = "localhost"
        scheme = "https" if self.door.encrypts else "http"
        return f"{scheme}://[{host}]:{port}/" if ":" in host else f"{scheme}://{host}:{port}/"

    def close(self) -> None:
        """Stops at once, whatever is being answered. Idempotent."""
        with suppress(RuntimeError):  # it is closed already
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(_CLOSE_S)
        self._pool.shutdown(wait=False, cancel_futures=True)

    # The thread that waits for all connections.

    def _run(self) -> None:
        # The runner's end is that of all connections.
        with self._socket, asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        accepting = asyncio.create_task(self._accept())
        await self._closing.wait()
        accepting.cancel()

    async def _accept(self) -> None:
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._socket)
            except OSError as exc:
                await asyncio.sleep(0 if isinstance(exc, ConnectionAbortedError) else _ACCEPT_AGAIN_S)
                continue
            if len(self._visits) >= CONNECTIONS:
                self._make_room()
            visit = _Visit(connection)
            task = asyncio.create_task(self._converse(visit))
            self._visits[task] = visit
            task.add_done_callback(partial(self._left, visit))
            # All others have a turn before the next one.
            await asyncio.sleep(0)

    def _make_room(self) -> None:
        oldest = next((task for task, visit in self._visits.items() if visit.idle), next(iter(self._visits)))
        self.door.note("crowded")
        del self._visits[oldest]
        oldest.cancel()

    def _left(self, visit: _Visit, task: asyncio.Task[None]) -> None:
        self._visits.pop(task, None)
        visit.end()
        if not task.cancelled() and (exc := task.exception()) is not None:
            log.error("a request failed", exc_info=exc)

    async def _converse(self, visit: _Visit) -> None:
        # The client has gone, is too slow, or doesn't speak TLS.
        with suppress(OSError, TimeoutError, asyncio.IncompleteReadError):
            reader, writer = await self._opened(visit)
            try:
                async with asyncio.timeout(HEAD_S):
                    head = await _head(reader)
                certificate = bool(writer.get_extra_info("peercert"))
                answer = await self._answer(head, visit, certificate=certificate)
                async with asyncio.timeout(WRITE_S):
                    writer.write(_written(answer, self.door.challenge, body=not head.startswith(b"HEAD ")))
                    await writer.drain()
                    writer.close()
                    await writer.wait_closed()
            finally:
                visit.end()

    async def _opened(self, visit: _Visit) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        reader = asyncio.StreamReader(HEAD_BYTES, self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        context = self.door.tls()
        limits = (
            {} if context is None else {"ssl_handshake_timeout": HEAD_S, "ssl_shutdown_timeout": _CLOSE_S}
        )
        transport, _ = await self._loop.connect_accepted_socket(
            lambda: protocol, visit.connection, ssl=context, **limits
        )
        visit.transport = transport
        # An answer is sent when it has left this process.
        transport.set_write_buffer_limits(0)
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)

    async def _answer(self, head: bytes, visit: _Visit, *, certificate: bool) -> Response:
        try:
            method, path, headers = _parsed(head)
            known = self.door.knows(headers.get("Host", ""))
            url = urlsplit(path)
            query = dict(parse_qsl(url.query, keep_blank_values=True, max_num_fields=16))
        except (ValueError, http.client.HTTPException):
            return sentence("that is not a request that this server understands", 400)
        if method not in ("GET", "HEAD"):
            return sentence("only GET and HEAD", 405)
        if not known:
            self.door.note("host")
            return sentence(
                "not by that name: ask by address or as localhost, or start it with --host NAME", 421
            )
        request = HttpRequest(query, headers.get("Accept", ""))
        if (probe := self._probes.get(url.path)) is not None:
            answer = _made(url.path, probe, request)
            return answer if self.door.open else _BARE[answer.status == 200]
        refusal = self.door.turns_away(headers.get("Authorization", ""), certificate=certificate)
        if refusal is not None:
            self.door.note(refusal)
            if refusal == "password":
                await asyncio.sleep(WRONG_S)
            return sentence("this server asks for a password, or for a client's certificate", 401)
        if (route := self._routes.get(url.path)) is None:
            return sentence(
                f"there is nothing here; there is {', '.join([*self._routes, *self._probes])}", 404
            )
        visit.idle = False
        return await self._loop.run_in_executor(self._pool, _made, url.path, route, request)


def _complain(_loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # That a client goes in the middle of TLS is no news.
    if not isinstance(exc := context.get("exception"), OSError):
        log.error("a connection failed: %s", context["message"], exc_info=exc)


def _listening(host: str, port: int) -> socket.socket:
    listening = None
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setblocking(False)
        listening.bind(address)
        listening.listen(_BACKLOG)
    except OSError as exc:
        if listening is not None:
            listening.close()
        why = exc.strerror or str(exc)
        raise ConfigError(f"can't listen on {host}:{port}: {why}; --listen HOST:PORT is another") from exc
    return listening


_BARE = {True: sentence("ok"), False: sentence("not ok", 503)}


async def _head(reader: asyncio.StreamReader) -> bytes:
    """Reads a request up to its body, or none of it if that is too long. Raises asyncio.IncompleteReadError
    where the client has gone."""
    try:
        return await reader.readuntil(b"\r\n\r\n")
    except asyncio.LimitOverrunError:
        return b""


def _parsed(head: bytes) -> tuple[str, str, Message]:
    """Returns a request's method, its target and its headers. Raises ValueError and HTTPException."""
    lines = io.BytesIO(head)
    method, target, version = lines.readline().decode("latin-1").split()
    if not version.startswith("HTTP/1."):
        raise ValueError(version)
    if target.startswith("//"):
        # A path, and no name of a host.
        target = f"/{target.lstrip('/')}"
    return method, target, http.client.parse_headers(lines)


def _made(path: str, route: Route, request: HttpRequest) -> Response:
    try:
        return route(request)
    except Exception:
        log.exception("%s failed", path)
        return sentence("this server failed; its log says where", 500)


def _written(answer: Response, challenge: str | None, *, body: bool) -> bytes:
    headers = {**_HEADERS, "Date": formatdate(usegmt=True), "Content-Type": answer.content_type}
    headers["Content-Length"] = str(len(answer.body))
    if answer.status == 405:
        headers["Allow"] = "GET, HEAD"
    if answer.status == 401 and challenge is not None:
        headers["WWW-Authenticate"] = challenge
    lines = [f"HTTP/1.1 {answer.status} {http.HTTPStatus(answer.status).phrase}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    head = "\r\n".join([*lines, "", ""]).encode("latin-1")
    return head + answer.body if body else head
