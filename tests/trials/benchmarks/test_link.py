"""The narrow network is as slow as it says, also for several connections, and changes under way."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.waiting import PATIENCE_S, until
from trials.benchmarks.link import Link

MIB = 1 << 20


@pytest.fixture
def server() -> Iterator[int]:
    """A server that answers each byte with a MiB. Its port."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(client: socket.socket) -> None:
        with client:
            while client.recv(1):
                client.sendall(bytes(MIB))

    def accept() -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(client,), daemon=True).start()

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join(PATIENCE_S)


def ask(connection: socket.socket) -> float:
    """Seconds from a question to the last byte of its answer."""
    began = time.monotonic()
    connection.sendall(b"?")
    left = MIB
    while left:
        left -= len(connection.recv(left))
    return time.monotonic() - began


def connect(link: Link) -> socket.socket:
    return socket.create_connection(("127.0.0.1", link.port), PATIENCE_S)


def test_connections_share_its_bytes_and_each_question_comes_late_once(server: int) -> None:
    with Link(server) as link, connect(link) as one, connect(link) as other:
        link.bytes_per_s = 4 * MIB
        began = time.monotonic()
        helper = threading.Thread(target=ask, args=(other,))
        helper.start()
        ask(one)
        helper.join(PATIENCE_S)
        # Never faster: 2 MiB take half a second, less what a sleep that is late may catch up.
        assert time.monotonic() - began > 0.45
        link.bytes_per_s, link.latency_s = None, 0.2
        assert ask(one) >= 0.2
        assert ask(one) >= 0.2
        assert link.passed == 4 * MIB


def test_another_speed_counts_for_what_is_under_way(server: int) -> None:
    with Link(server) as link, connect(link) as one:
        link.bytes_per_s = MIB / 40
        helper = threading.Thread(target=ask, args=(one,))
        helper.start()
        until(lambda: link.passed)
        link.bytes_per_s = None
        helper.join(PATIENCE_S)
        assert not helper.is_alive()
