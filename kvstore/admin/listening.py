"""A small HTTP server: GET and HEAD of a fixed set of paths, which functions answer from memory.

Bounded in every direction: THREADS threads, WAITING connections waiting for one, CONNECTION_S from when a
thread takes a connection to its end, whoever is slow. No path of a request ever names a file.

What is served is not secret, but not for every web site either: a page of another site can't read it
(no CORS), can't frame it, and where only this machine is listened to, can't reach it by a name of its own
(DNS rebinding).
"""

from __future__ import annotations

import ipaddress
import logging
import queue
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qsl, urlsplit

from kvstore.errors import ConfigError

log = logging.getLogger(__name__)

THREADS = 8
WAITING = 32
CONNECTION_S = 10.0
_POLL_S = 0.2

_HEADERS = {
    "Cache-Control": "no-store",
    "Connection": "close",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What an answer may depend on."""

    query: Mapping[str, str]
    accept: str


@dataclass(frozen=True, slots=True)
class Answer:
    """What is sent."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200


Routes = Mapping[str, Callable[[Asked], Answer]]


def sentence(text: str, status: int = 200) -> Answer:
    """An answer of one line."""
    return Answer(f"{text}\n".encode("utf-8", "replace"), status=status)


class Listener(socketserver.TCPServer):
    """Answers from the moment it is made; `close` ends it."""

    allow_reuse_address = True
    request_queue_size = WAITING

    def __init__(self, host: str, port: int, routes: Routes) -> None:
        """Raises ConfigError if it can't listen there. Port 0 is any free one."""
        self.routes = routes
        self._waiting: queue.Queue[tuple[socket.socket, object] | None] = queue.Queue(WAITING)
        self._began: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            self.address_family = found[0][0]
            super().__init__(found[0][4], _Request)  # type: ignore[arg-type]
        except OSError as exc:
            why = exc.strerror or str(exc)
            raise ConfigError(f"can't listen on {host}:{port}: {why}; --listen HOST:PORT is another") from exc
        #: Whether it may be asked for by names of this machine only.
        self.only_local = _is_loopback(str(self.server_address[0]))
        self._threads = [threading.Thread(target=self._work, daemon=True) for _ in range(THREADS)]
        self._threads.append(threading.Thread(target=self.serve_forever, args=[_POLL_S], daemon=True))
        for thread in self._threads:
            thread.start()

    @property
    def url(self) -> str:
        """Where a browser on this machine finds it."""
        host, port = str(self.server_address[0]), self.server_address[1]
        if ipaddress.ip_address(host).is_unspecified:
            host = "localhost"
        return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"

    def close(self) -> None:
        """Stop at once; who is being answered has a moment to be answered."""
        self.shutdown()
        self.server_close()
        for _ in range(THREADS):
            with suppress(queue.Full):
                self._waiting.put_nowait(None)
        until = time.monotonic() + 1.0
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))

    # Called by socketserver, in the accepting thread.

    def process_request(self, request: object, client_address: object) -> None:
        assert isinstance(request, socket.socket)  # not a datagram
        try:
            self._waiting.put_nowait((request, client_address))
        except queue.Full:
            self.shutdown_request(request)

    def service_actions(self) -> None:
        # A socket's own timeout is per call: a client that sends a byte now and then would never meet it.
        with self._lock:
            late = [one for one, began in self._began.items() if time.monotonic() - began > CONNECTION_S]
        for request in late:
            with suppress(OSError):
                request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        log.exception("a request failed")

    # The threads that answer.

    def _work(self) -> None:
        while (item := self._waiting.get()) is not None:
            request, client_address = item
            with self._lock:
                self._began[request] = time.monotonic()
            try:
                self.finish_request(request, client_address)
            except OSError:
                pass  # the client has gone, or was too slow
            except Exception:  # noqa: BLE001 - one request's failure is not the server's
                self.handle_error(request, client_address)
            finally:
                with self._lock:
                    del self._began[request]
                self.shutdown_request(request)


class _Request(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = CONNECTION_S
    server: Listener
    #: Neither Python's version nor ours is everybody's business.
    server_version = "kvstore"
    sys_version = ""

    def do_GET(self) -> None:
        self._send(self._answer())

    def do_HEAD(self) -> None:
        self._send(self._answer())

    def _answer(self) -> Answer:
        try:
            local = _is_local(self.headers.get("Host", ""))
            url = urlsplit(self.path)
            query = dict(parse_qsl(url.query, keep_blank_values=True, max_num_fields=16))
        except ValueError:
            return sentence("that is not a path", 400)
        if self.server.only_local and not local:
            return sentence("this server listens to its own machine only: ask for it as localhost", 421)
        route = self.server.routes.get(url.path)
        if route is None:
            paths = ", ".join(self.server.routes)
            return sentence(f"there is nothing here; there is {paths}", 404)
        try:
            return route(Asked(query, self.headers.get("Accept", "")))
        except Exception:
            log.exception("%s failed", url.path)
            return sentence("this server failed; its log says where", 500)

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if answer.status == 405:
            self.send_header("Allow", "GET, HEAD")
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Called by http.server for what isn't a request, and with 501 for a method without a do_..."""
        self.close_connection = True
        if code == 501:
            self._send(sentence("only GET and HEAD", 405))
        else:
            self._send(sentence("that is not a request that this server understands", code))

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: a probe every few seconds would fill a log."""


def _is_local(host: str) -> bool:
    """Whether a Host header is a name that no other site's DNS answers for."""
    name = (urlsplit(f"//{host}").hostname or "") if host else ""
    if name in ("", "localhost") or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host.partition("%")[0]).is_loopback
