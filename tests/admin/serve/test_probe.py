"""A probe of what is no `cache-admin serve`: not ready, in a sentence, within the time that a probe has."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest

from kvstore.admin.serve import probe as probing
from kvstore.admin.serve.probe import probe
from tests.waiting import PATIENCE_S

Answer = Callable[[socket.socket], None]


@contextmanager
def listener(answer: Answer) -> Iterator[int]:
    """The port of what answers one connection so."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                answer(connection)

        thread = threading.Thread(target=serve)
        thread.start()
        yield int(server.getsockname()[1])
        thread.join()


def says(words: bytes) -> Answer:
    return lambda connection: connection.sendall(words)


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (b"-ERR unknown command 'GET'\r\n", "does not speak HTTP"),
        (b"\x15\x03\x01\x00\x02\x02\x46", "does not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n", "does not speak HTTP"),
        (b"HTTP/1.0 200 OK\r\nX: " + b"x" * 70000 + b"\r\n\r\n", "does not speak HTTP"),
        (b"HTTP/1.0 503 Service Unavailable\r\n\r\nnot yet", "not yet"),
        (b"HTTP/1.0 204 No Content\r\n\r\n", "204 No Content"),
        (b"", "no answer"),
    ],
)
def test_what_is_no_server_of_ours_is_not_ready(words: bytes, found: str) -> None:
    with listener(says(words)) as port:
        report = probe("127.0.0.1", port)
    assert not report.ready
    assert found in report.found


def test_a_redirection_is_no_answer() -> None:
    with ExitStack() as stack:
        # Nobody comes here: one connection, its own, ends it.
        ready = stack.enter_context(listener(says(b"HTTP/1.0 200 OK\r\n\r\nready")))
        words = f"HTTP/1.0 302 Found\r\nLocation: http://127.0.0.1:{ready}/readyz\r\n\r\n"
        port = stack.enter_context(listener(says(words.encode())))
        assert (report := probe("127.0.0.1", port)).found == "302 Found"
        assert not report.ready
        assert probe("127.0.0.1", ready).ready


@pytest.mark.slow
def test_a_byte_now_and_then_is_no_answer_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probing, "_TIMEOUT_S", 0.3)
    over = threading.Event()

    def drip(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")
        with suppress(OSError):
            for _ in range(10 * int(PATIENCE_S)):
                connection.sendall(b"x")
                if over.wait(0.1):
                    break

    with listener(drip) as port:
        began = time.monotonic()
        report = probe("127.0.0.1", port)
        assert time.monotonic() - began < PATIENCE_S / 2
        over.set()
    assert (report.ready, report.found) == (False, "no answer: timed out")
