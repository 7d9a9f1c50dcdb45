"""What anybody who reaches the port of `cache-admin serve` may try, against the real process: connections
that are idle, slow, dripping, or never read. Each probe is answered while they last."""

from __future__ import annotations

import http.client
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

import pytest

from tests.admin.serve.process import ServeProcess
from tests.waiting import until

pytestmark = pytest.mark.slow

#: Less than a connection was given before probes could not be starved (10 s); far more than a probe takes.
PROBE_S = 8.0
PROBES = 10
_DRIP_S = 0.1


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("serve")
    with ServeProcess(folder, ["--payloads", f"file://{folder}/cache"]) as process:
        process.until(lambda: process.get("/readyz")[0] == 200)
        yield process


class Attack:
    """Keeps `count` connections open from a thread of its own: whichever is closed is opened again. Each
    sends `first`, then a byte of `drip` every tenth of a second, and reads nothing."""

    def __init__(self, url: str, count: int, first: bytes, drip: bytes) -> None:
        place = urlsplit(url)
        self._place = place.hostname, place.port
        self._count, self._first, self._drip = count, first, drip
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.opened = 0

    def _open(self) -> socket.socket:
        attacker = socket.socket()
        attacker.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        attacker.settimeout(PROBE_S)
        attacker.connect(self._place)
        attacker.sendall(self._first)
        attacker.setblocking(False)
        self.opened += 1
        return attacker

    def _run(self) -> None:
        held: list[socket.socket] = []
        try:
            while not self._stop.wait(_DRIP_S):
                with suppress(OSError):
                    while len(held) < self._count:
                        held.append(self._open())
                held = [attacker for attacker in held if self._goes_on(attacker)]
        finally:
            for attacker in held:
                attacker.close()

    def _goes_on(self, attacker: socket.socket) -> bool:
        try:
            if self._drip:
                attacker.send(self._drip)
            with selectors.DefaultSelector() as selector:
                selector.register(attacker, selectors.EVENT_READ)
                closed = bool(selector.select(0)) and not attacker.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        except OSError:
            closed = True
        if closed:
            attacker.close()
        return not closed

    @contextmanager
    def running(self) -> Iterator[None]:
        """Attacks meanwhile; all connections have been opened when it begins."""
        self._thread.start()
        try:
            until(lambda: self.opened >= self._count)
            yield
        finally:
            self._stop.set()
            self._thread.join()


def ask(url: str, path: str) -> str:
    """What a probe is told: a status, or why there is none."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port, timeout=PROBE_S)
    try:
        connection.request("GET", path)
        return str(connection.getresponse().status)
    except (OSError, http.client.HTTPException) as exc:
        return repr(exc)
    finally:
        connection.close()


ATTACKS: dict[str, Callable[[str], Attack]] = {
    "8 idle": lambda url: Attack(url, 8, b"", b""),
    "64 slow": lambda url: Attack(url, 64, b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", b"a"),
    "200 drip": lambda url: Attack(url, 200, b"G", b"E"),
    "200 idle": lambda url: Attack(url, 200, b"", b""),
    "64 that don't read": lambda url: Attack(
        url, 64, b"GET /charts.js HTTP/1.1\r\nHost: localhost\r\n\r\n", b""
    ),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_every_probe_is_answered_while_it_lasts(serve: ServeProcess, attack: str) -> None:
    with ATTACKS[attack](serve.url).running():
        told = [ask(serve.url, path) for _ in range(PROBES // 2) for path in ("/healthz", "/readyz")]
    assert told == ["200"] * PROBES


def test_what_is_asked_for_at_length_does_not_keep_probes_waiting(serve: ServeProcess) -> None:
    """Requests that are right, and more than can be answered at once."""
    stop = threading.Event()

    def ask_again() -> None:
        while not stop.is_set():
            ask(serve.url, "/api/status?window_s=86400")

    askers = [threading.Thread(target=ask_again) for _ in range(16)]
    for asker in askers:
        asker.start()
    try:
        told = [ask(serve.url, path) for _ in range(PROBES // 2) for path in ("/healthz", "/readyz")]
    finally:
        stop.set()
        for asker in askers:
            asker.join()
    assert told == ["200"] * PROBES


@pytest.mark.parametrize("byte", [b"", b"G"], ids=["idle", "drip"])
def test_a_connection_has_two_seconds_for_its_request(serve: ServeProcess, byte: bytes) -> None:
    """Whole, and not from one byte to the next: it ends while bytes still come."""
    place = urlsplit(serve.url)
    with socket.create_connection((place.hostname, place.port), PROBE_S) as slow:
        began = time.monotonic()
        with pytest.raises(OSError):
            while time.monotonic() - began < PROBE_S:
                slow.sendall(byte)
                with suppress(TimeoutError):
                    slow.settimeout(_DRIP_S)
                    if not slow.recv(1):
                        raise ConnectionResetError
