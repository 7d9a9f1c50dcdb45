"""The HTTP server of `cache-admin serve`: what it answers, what it refuses, and that nobody can occupy it."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from kvstore.admin.serve import listener as listening
from kvstore.admin.serve.door import Guests
from kvstore.admin.serve.listener import HttpRequest, Listener, Response, sentence
from kvstore.errors import ConfigError
from tests.waiting import PATIENCE_S, until

_ASKED: list[HttpRequest] = []


def _fail(_: HttpRequest) -> Response:
    raise RuntimeError("a secret of the inside")


def _remember(asked: HttpRequest) -> Response:
    _ASKED.append(asked)
    return sentence("good")


ROUTES: dict[str, Callable[[HttpRequest], Response]] = {
    "/": lambda _: Response(b"<p>page", "text/html; charset=utf-8"),
    "/ask": _remember,
    "/fail": _fail,
    "/large": lambda _: Response(b"x" * 50_000_000),
}


@pytest.fixture
def server() -> Iterator[Listener]:
    _ASKED.clear()
    with closing(Listener("127.0.0.1", 0, ROUTES)) as listener:
        yield listener


def connect(server: Listener) -> socket.socket:
    return socket.create_connection(server.address, 10.0)


def talk(server: Listener, request: bytes) -> tuple[int, dict[str, str], bytes]:
    """Status, headers and body; the server must close the connection by itself."""
    with connect(server) as connection:
        connection.sendall(request)
        received = b""
        while more := connection.recv(1 << 16):
            received += more
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, body


def get(server: Listener, path: str, *, method: str = "GET", host: str = "localhost") -> tuple[int, bytes]:
    status, _, body = talk(server, f"{method} {path} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
    return status, body


def test_get_and_head_answer_the_same_but_for_the_body(server: Listener) -> None:
    status, headers, body = talk(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (status, body) == (200, b"<p>page")
    head_status, head, nothing = talk(server, b"HEAD / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert (head_status, nothing) == (200, b"")
    assert {**head, "Date": ""} == {**headers, "Date": ""}
    assert headers["Content-Length"] == "7"
    assert headers["Connection"] == "close"
    assert "Python" not in headers["Server"]


def test_the_query_is_read_and_is_no_part_of_the_path(server: Listener) -> None:
    request = b"GET /ask?window_s=60&x=%3Cb%3E&x=2 HTTP/1.1\r\nHost: localhost\r\nAccept: text/plain\r\n\r\n"
    assert talk(server, request)[0] == 200
    assert _ASKED == [HttpRequest({"window_s": "60", "x": "2"}, "text/plain")]
    assert get(server, "//ask")[0] == 200


@pytest.mark.parametrize("path", ["/", "/nothing", "/fail"])
def test_every_answer_forbids_scripts_of_others(server: Listener, path: str) -> None:
    _, headers, _ = talk(server, f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "frame-ancestors 'none'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "/../../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/page.js/../serving.py",
        "/index.html",
        "/page/",
        "/ask/",
        "/ASK",
        "http://[",
        "file:///etc/passwd",
        "*",
    ],
)
def test_no_path_names_a_file(server: Listener, path: str) -> None:
    status, body = get(server, path)
    assert status in (400, 404)
    assert b"root:" not in body


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "PATCH", "CONNECT", "get"])
def test_nothing_but_get_and_head(server: Listener, method: str) -> None:
    status, headers, _ = talk(server, f"{method} /ask HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
    assert (status, headers["Allow"]) == (405, "GET, HEAD")
    assert not _ASKED


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(256)) + b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 70_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 200 + b"\r\n",
        b"GET / HTTP/1.1\r\nHost: [\r\n\r\n",
    ],
    ids=["empty", "tls", "no path", "version", "long path", "long header", "many headers", "host"],
)
def test_what_is_not_a_request_hurts_nobody(server: Listener, request_bytes: bytes) -> None:
    with connect(server) as connection:
        connection.sendall(request_bytes)
        connection.shutdown(socket.SHUT_WR)
        answer = b""
        try:
            while more := connection.recv(1 << 16):
                answer += more
        except ConnectionResetError:
            pass  # it closed without reading all of it
    assert answer == b"" or answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 505", b"that is not"))
    assert get(server, "/")[0] == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("localhost:9464", 200), ("127.0.0.1:80", 200), ("[::1]:80", 200), ("", 200),
        ("kvstore.localhost", 200), ("evil.example", 421), ("evil.example:9464", 421),
        ("127.0.0.1.evil.example", 421), ("localhost.evil.example", 421),
    ],
)  # fmt: skip
@pytest.mark.parametrize("listen", ["127.0.0.1", "0.0.0.0"])
def test_wherever_it_listens_a_web_site_can_give_it_no_name(listen: str, host: str, status: int) -> None:
    """DNS rebinding: a site's own name leads here, and the browser takes what is here for the site's."""
    with closing(Listener(listen, 0, ROUTES)) as server:
        assert get(server, "/", host=host)[0] == status


def test_names_that_were_given_are_answered() -> None:
    names = ("kvstore.cache.svc", "Cache.Example")
    with closing(Listener("0.0.0.0", 0, ROUTES, access=Guests(hosts=names))) as server:
        assert server.url == f"http://localhost:{server.address[1]}/"
        for host in ("kvstore.cache.svc:9464", "cache.example", "cache.example.", "CACHE.EXAMPLE:80"):
            assert get(server, "/", host=host)[0] == 200, host
        assert get(server, "/", host="other.cache.svc")[0] == 421
        assert server.door.refused()["host"] == 1


def test_a_route_that_fails_says_so_without_its_inside(
    server: Listener, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        status, body = get(server, "/fail")
    assert status == 500
    assert b"secret" not in body
    assert "a secret of the inside" in caplog.text
    assert get(server, "/")[0] == 200


def test_a_place_that_is_taken_is_a_sentence(server: Listener) -> None:
    port = server.address[1]
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*--listen"):
        Listener("127.0.0.1", port, ROUTES)


def ended(connection: socket.socket) -> bool:
    """Whether the server has closed it; waits until it has."""
    connection.settimeout(PATIENCE_S)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionResetError:
        pass
    return True


def test_who_does_not_read_is_cut_off(server: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as soon, connect(server) as connection:
        soon.setattr(listening, "WRITE_S", 0.3)
        connection.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert ended(connection)
    assert get(server, "/")[0] == 200


def test_the_oldest_that_has_not_asked_makes_room(server: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "HEAD_S", PATIENCE_S)
    with ExitStack() as stack:
        held = [stack.enter_context(connect(server)) for _ in range(listening.CONNECTIONS + 8)]
        until(lambda: server.door.refused()["crowded"] == 8)
        assert all(ended(connection) for connection in held[:8])
        # Those that came later are still there to ask.
        held[8].sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        held[8].settimeout(PATIENCE_S)
        assert held[8].recv(12) == b"HTTP/1.1 200"
        assert get(server, "/")[0] == 200


def test_it_ends_at_once_with_someone_connected(server: Listener) -> None:
    with connect(server) as idle:
        idle.sendall(b"GET ")
        # This one is accepted after the other.
        assert get(server, "/")[0] == 200
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < PATIENCE_S / 2
        with pytest.raises(OSError):
            connect(server)
