"""A Redis that answers a byte at a time, or without end: no call outlives its deadline, none fills memory."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import pytest
import redis

from kvstore.build import load_settings, open_store
from kvstore.errors import DeadlineExceeded, KVStoreError, TransientError
from kvstore.index.redis import timed
from kvstore.index.redis.index import RedisIndex
from kvstore.keys import namespace_id
from schemas.settings import RedisSettings
from tests.index.contract.chains import chain, namespace, put_all, served
from tests.index.redis.cluster import RedisClusterServers
from tests.index.redis.proxy import LossyProxy
from tests.index.redis.scripted_sentinel import MASTER, ScriptedSentinel
from tests.servers.redis import RedisServer
from tests.store.world import chain as hashes
from tests.store.world import match, open_space
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.servers

_T = TypeVar("_T")
#: Seconds from byte to byte: the answer of a match of six segments takes two minutes.
DRIP_S = 0.2
#: Far more than the deadline, far less than that.
FAR_S = 30.0
TIMEOUT_S = 0.5
SHORT = RedisSettings(timeout_s=TIMEOUT_S, connect_timeout_s=TIMEOUT_S)
CHAIN = chain(12)


@dataclass
class Slow:
    """A Redis behind proxies that can let replies drip."""

    url: str
    proxies: list[LossyProxy]

    def drip(self, drip_s: float) -> None:
        for proxy in self.proxies:
            proxy.drip_s = drip_s


@pytest.fixture(params=["single", "sentinel", "cluster"])
def slow(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Slow]:
    with contextlib.ExitStack() as stack:
        if request.param == "cluster":
            servers = stack.enter_context(RedisClusterServers(tmp_path, masters=1))
            proxy = stack.enter_context(LossyProxy(servers.ports[0]))
            servers.set("cluster-announce-port", str(proxy.port))
            # Several hosts: it is a Cluster from the first call on.
            yield Slow(f"redis://127.0.0.1:{proxy.port},localhost:{proxy.port}/0", [proxy])
            return
        server = stack.enter_context(RedisServer(tmp_path))
        proxy = stack.enter_context(LossyProxy(server.port))
        if request.param == "single":
            yield Slow(f"redis://127.0.0.1:{proxy.port}/0", [proxy])
            return
        sentinel = stack.enter_context(ScriptedSentinel(proxy.port))
        front = stack.enter_context(LossyProxy(sentinel.port))
        yield Slow(f"redis+sentinel://127.0.0.1:{front.port}/{MASTER}/0", [proxy, front])


def usually(call: Callable[[], _T]) -> _T:
    """A busy machine may need more than one deadline for a first connection."""
    found: list[_T] = []

    def tried() -> bool:
        with contextlib.suppress(TransientError):
            found.append(call())
        return bool(found)

    until(tried)
    return found[0]


def test_no_call_outlives_its_deadline(slow: Slow) -> None:
    with RedisIndex.from_settings(slow.url, SHORT) as index:
        name = usually(lambda: index.register(namespace(), expected_blocks=100))
        usually(lambda: put_all(index, name, CHAIN, [2] * 6))
        assert usually(lambda: served(index.match(name, CHAIN))) == 12
        slow.drip(DRIP_S)
        for call in (lambda: index.match(name, CHAIN), index.accounts, lambda: index.get(name, [bytes(8)])):
            began = time.monotonic()
            with pytest.raises(DeadlineExceeded):
                call()
            assert time.monotonic() - began < FAR_S
        # Whoever comes now meets it while connecting: logging in, asking for the master or for the nodes.
        with RedisIndex.from_settings(slow.url, SHORT) as late:
            began = time.monotonic()
            with pytest.raises(TransientError):
                late.match(name, CHAIN)
            assert time.monotonic() - began < FAR_S
            slow.drip(0.0)
            assert usually(lambda: served(late.match(name, CHAIN))) == 12
        assert usually(lambda: served(index.match(name, CHAIN))) == 12


#: What a server says that can't do it now, or never, or not here, or not to us.
REFUSALS = (
    "MOVED 3999 127.0.0.1:1", "MOVED 0 :0", "MOVED 99999 [::1]:1", "MOVED", "ASK 3999 127.0.0.1:1", "ASK 1 x",
    "READONLY You can't write against a read only replica.", "NOSCRIPT No matching script.", "TRYAGAIN",
    "OOM command not allowed when used memory > 'maxmemory'.", "BUSY Redis is busy running a script.",
    "LOADING Redis is loading the dataset", "MASTERDOWN Link with MASTER is down", "MISCONF", "ERR x",
    "CLUSTERDOWN The cluster is down", "CROSSSLOT Keys in request don't hash to the same slot", "UNKILLABLE",
    "NOREPLICAS Not enough good replicas to write.", "NOAUTH Authentication required.", "WRONGPASS invalid",
    "NOPERM this user has no permissions to run the 'evalsha' command",
)  # fmt: skip


def test_a_refusal_for_ever_is_a_miss_in_time(slow: Slow) -> None:
    with RedisIndex.from_settings(slow.url, SHORT) as index:
        name = usually(lambda: index.register(namespace(), expected_blocks=100))
        usually(lambda: put_all(index, name, CHAIN, [2] * 6))
        for refusal in REFUSALS:
            for proxy in slow.proxies:
                proxy.garbage = f"-{refusal}\r\n".encode()
            for call in (lambda: index.match(name, CHAIN), lambda: put_all(index, name, chain(3), [3])):
                began = time.monotonic()
                with pytest.raises(KVStoreError):
                    call()
                assert time.monotonic() - began < FAR_S, refusal
            for proxy in slow.proxies:
                proxy.garbage = None
        assert usually(lambda: served(index.match(name, CHAIN))) == 12


def test_a_breaker_opens_and_requests_behind_do_not_wait(slow: Slow, tmp_path: Path) -> None:
    """As many requests as wait in an engine's queue, on the threads that it has for calls."""
    settings = {
        "index": slow.url,
        "payloads": f"file://{tmp_path / 'payloads'}",
        "redis": {"timeout_s": TIMEOUT_S, "connect_timeout_s": TIMEOUT_S},
    }
    with open_store(load_settings(settings, environ={})) as store:
        space = open_space(store)
        usually(space.register)
        asked = hashes(*range(12))
        assert usually(lambda: store.index.match(space.id, bytes(16))) == []
        slow.drip(DRIP_S)
        reasons: Counter[str] = Counter()
        began = time.monotonic()
        for _ in range(24):
            assert store.transfers.call(lambda: reasons.update([match(space, asked).reason]))
        assert store.transfers.drain(FAR_S)
        assert time.monotonic() - began < FAR_S
        # Three threads: two calls are under way when the last failure opens the breaker.
        assert 1 <= reasons["deadline"] <= store.settings.breaker.failures + 2
        assert reasons["breaker_open"] == 24 - reasons["deadline"]
        assert store.health.index_down
        slow.drip(0.0)


class Flood:
    """Answers the first request without end, and counts what it could send."""

    def __init__(self, head: bytes, piece: bytes) -> None:
        self.sent = 0
        self._head, self._piece = head, piece
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._listener.close()
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            with client, contextlib.suppress(OSError):
                client.recv(1 << 16)
                client.sendall(self._head)
                while True:
                    self.sent += client.send(self._piece)


@pytest.mark.parametrize(
    ("head", "piece"),
    [
        pytest.param(b"*900000\r\n", b"$64\r\n%b\r\n" % bytes(64) * 900, id="a list without end"),
        pytest.param(b"$1073741824\r\n", bytes(1 << 16), id="a string without end"),
    ],
)
def test_an_answer_without_end_is_given_up(head: bytes, piece: bytes) -> None:
    patient = RedisSettings(timeout_s=PATIENCE_S)
    with Flood(head, piece) as flood:
        with RedisIndex.from_settings(f"redis://127.0.0.1:{flood.port}/0", patient) as index:
            with pytest.raises(TransientError, match="32 MiB"):
                index.match(namespace_id(namespace()), chain(8))
        assert timed.MOST_BYTES <= flood.sent < 2 * timed.MOST_BYTES


def test_what_has_come_is_taken_after_a_pause(redis_server: RedisServer) -> None:
    """A process that was stopped for longer than its deadline finds the answer there."""
    with redis.Redis(port=redis_server.port) as client:
        connection = client.connection_pool.get_connection()
        plain = connection._sock
        assert plain is not None
        slept = timed.TimedSocket(plain, 0.01)
        slept.sendall(b"PING\r\n")
        until(lambda: plain.recv(7, socket.MSG_PEEK) == b"+PONG\r\n")
        time.sleep(0.02)
        assert slept.recv(7) == b"+PONG\r\n"
        with pytest.raises(TimeoutError):
            slept.recv(7)
