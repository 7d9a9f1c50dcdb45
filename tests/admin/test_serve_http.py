"""The HTTP server of `cache-admin serve`: what it answers, what it refuses, and that nobody can occupy it."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

import pytest

from kvstore.admin import listening
from kvstore.admin.listening import Answer, Asked, Listener, sentence
from kvstore.errors import ConfigError

_ASKED: list[Asked] = []


def _fail(_: Asked) -> Answer:
    raise RuntimeError("a secret of the inside")


def _remember(asked: Asked) -> Answer:
    _ASKED.append(asked)
    return sentence("good")


ROUTES: dict[str, Callable[[Asked], Answer]] = {
    "/": lambda _: Answer(b"<p>page", "text/html; charset=utf-8"),
    "/ask": _remember,
    "/fail": _fail,
    "/large": lambda _: Answer(b"x" * 50_000_000),
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Listener]:
    _ASKED.clear()
    monkeypatch.setattr(listening, "_POLL_S", 0.02)  # ends sooner
    with closing(Listener("127.0.0.1", 0, ROUTES)) as listener:
        yield listener


def connect(server: Listener) -> socket.socket:
    return socket.create_connection(server.server_address[:2], 10.0)


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
    assert _ASKED == [Asked({"window_s": "60", "x": "2"}, "text/plain")]


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
def test_on_loopback_only_local_names_are_answered(server: Listener, host: str, status: int) -> None:
    assert get(server, "/", host=host)[0] == status


def test_where_everybody_may_ask_any_name_will_do() -> None:
    with closing(Listener("0.0.0.0", 0, ROUTES)) as server:
        assert server.url == f"http://localhost:{server.server_address[1]}/"
        with socket.create_connection(("127.0.0.1", server.server_address[1]), 10.0) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\nHost: kvstore.cache.svc\r\n\r\n")
            assert connection.recv(15) == b"HTTP/1.1 200 OK"


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
    port = server.server_address[1]
    with pytest.raises(ConfigError, match=f"127.0.0.1:{port}.*--listen"):
        Listener("127.0.0.1", port, ROUTES)


@pytest.mark.parametrize("trickle", [b"", b"GET / HT", b"GET / HTTP/1.1\r\nX: "])
def test_who_is_slow_is_cut_off_and_others_are_answered(
    server: Listener, monkeypatch: pytest.MonkeyPatch, trickle: bytes
) -> None:
    monkeypatch.setattr(listening, "CONNECTION_S", 0.8)
    with ExitStack() as stack:
        slow = [stack.enter_context(connect(server)) for _ in range(listening.THREADS)]
        began = time.monotonic()
        stopped = threading.Event()

        def drip() -> None:
            # A byte now and then: no single wait of the server's is long.
            while not stopped.wait(0.1):
                for connection in slow:
                    try:
                        connection.sendall(trickle[:1])
                    except OSError:
                        return

        for connection in slow:
            connection.sendall(trickle)
        dripping = threading.Thread(target=drip)
        dripping.start()
        try:
            assert get(server, "/") == (200, b"<p>page")
            waited = time.monotonic() - began
        finally:
            stopped.set()
            dripping.join()
    # Not before there was a free thread, and soon after that.
    assert 0.5 < waited < 3.0


def test_who_does_not_read_is_cut_off(server: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "CONNECTION_S", 0.5)
    with ExitStack() as stack:
        for _ in range(listening.THREADS):
            connection = stack.enter_context(connect(server))
            connection.sendall(b"GET /large HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert get(server, "/")[0] == 200


def test_more_connections_than_it_has_room_for_are_turned_away(server: Listener) -> None:
    room = listening.THREADS + listening.WAITING
    with ExitStack() as stack:
        held = [stack.enter_context(connect(server)) for _ in range(room + 8)]
        turned_away = 0
        for connection in reversed(held):
            connection.settimeout(0.3)
            try:
                turned_away += connection.recv(1) == b""
            except TimeoutError:
                break
        # Those that are being accepted at this moment may go either way.
        assert 4 <= turned_away <= 10
    assert get(server, "/")[0] == 200


def test_it_ends_at_once_with_someone_connected(server: Listener) -> None:
    with connect(server) as idle:
        idle.sendall(b"GET ")
        began = time.monotonic()
        server.close()
        assert time.monotonic() - began < 3.0
        with pytest.raises(OSError):
            connect(server)
