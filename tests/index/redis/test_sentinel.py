"""The index at a master that Sentinels name: who is followed, when, and in what time.

The Sentinels of most tests are scripted, so that they can hang, lie and be late; the servers are real.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import redis
from pydantic import SecretStr

from kvstore.admin.backends import Cache
from kvstore.admin.doctor.machine import check_redis
from kvstore.build import load_settings, open_store
from kvstore.errors import DeadlineExceeded, KVStoreError, PermissionDenied, TransientError
from kvstore.index.maintenance import Usage
from kvstore.index.redis import sentinel as redis_sentinel
from kvstore.index.redis.index import RedisIndex
from kvstore.index.redis.sentinel import Sentinels
from kvstore.index.scripted.scripts import Script
from kvstore.keys import NamespaceId
from kvstore.store.space import Space
from kvstore.threads import deadline as aside
from schemas.settings import JournalSettings, RedisSettings
from tests.index.contract.admission import NoteConformance
from tests.index.contract.chains import chain, namespace, put, served
from tests.index.contract.index import IndexConformance
from tests.index.redis.scripted_sentinel import MASTER, ScriptedSentinel
from tests.index.redis.sentinels import SentinelServers
from tests.servers.redis import PATIENT, RedisServer, patient
from tests.store import world
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.servers

#: A call's deadline; to wait for one Sentinel that hangs takes minutes.
SHORT = RedisSettings(timeout_s=1.0, connect_timeout_s=PATIENCE_S)
NAME = NamespaceId("")


class Fleet:
    """Two servers that replicate as told, and three Sentinels that say who is the master."""

    def __init__(self, servers: list[RedisServer], sentinels: list[ScriptedSentinel]) -> None:
        self.servers, self.sentinels = servers, sentinels
        self.name(servers[0])

    def name(self, master: RedisServer) -> None:
        """All Sentinels name this one."""
        for one in self.sentinels:
            one.master = master.port

    def demote(self, server: RedisServer) -> None:
        """Now a replica of the other one, which is a master."""
        (other,) = (one for one in self.servers if one is not server)
        assert other.command("REPLICAOF", "NO", "ONE") == b"+OK"
        assert server.command("REPLICAOF", "127.0.0.1", str(other.port)).startswith(b"+OK")

    def open(self, settings: RedisSettings = PATIENT, master: str = MASTER) -> RedisIndex:
        hosts = ",".join(f"127.0.0.1:{one.port}" for one in self.sentinels)
        return RedisIndex.from_settings(f"redis+sentinel://{hosts}/{master}/0", settings)


@pytest.fixture(scope="module")
def _servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[RedisServer]]:
    folder = tmp_path_factory.mktemp("pair")
    options = ("--repl-diskless-sync-delay", "0")
    with RedisServer(folder / "a", *options) as a, RedisServer(folder / "b", *options) as b:
        yield [a, b]


@pytest.fixture
def fleet(_servers: list[RedisServer]) -> Iterator[Fleet]:
    for server in _servers:
        server.start()
        server.command("REPLICAOF", "NO", "ONE")
        server.command("CONFIG", "SET", "requirepass", "")
        server.flush()
    with ExitStack() as stack:
        yield Fleet(_servers, [stack.enter_context(ScriptedSentinel()) for _ in range(3)])


def failing(call: Callable[[], object]) -> tuple[KVStoreError, float]:
    """The error, and after how many seconds."""
    began = time.monotonic()
    with pytest.raises(KVStoreError) as caught:
        call()
    return caught.value, time.monotonic() - began


def at_once(count: int, call: Callable[[], object]) -> list[KVStoreError]:
    """What it raises, in as many threads that begin together."""
    start = threading.Barrier(count)
    errors: list[KVStoreError] = []

    def one() -> None:
        start.wait(PATIENCE_S)
        try:
            call()
        except KVStoreError as exc:
            errors.append(exc)

    threads = [threading.Thread(target=one) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def works(call: Callable[[], object]) -> bool:
    try:
        call()
    except KVStoreError:
        return False
    return True


def clients(server: RedisServer) -> int:
    """Connections of clients other than this question's and a replica's."""
    return server.command("CLIENT", "LIST", "TYPE", "normal").count(b"cmd=evalsha")


# Following


def test_a_demoted_master_gets_no_writes_and_costs_no_error(fleet: Fleet) -> None:
    first, second = fleet.servers
    with fleet.open() as index:
        name = index.register(namespace(), expected_blocks=100)
        put(index, name, chain(3, seed="a"))
        # Connections stay open, as when an operator exchanges the roles by hand.
        fleet.demote(first)
        fleet.name(second)
        index.register(namespace(), expected_blocks=100)
        put(index, name, chain(3, seed="b"))
        assert served(index.match(name, chain(3, seed="b"))) == 3
    with redis.Redis(port=second.port, protocol=2) as raw:
        assert raw.exists(f"kvs:{{{name}}}:segs")
        assert raw.info("replication")["role"] == "master"


def test_a_lost_connection_costs_no_error_if_there_is_a_new_master(fleet: Fleet) -> None:
    with fleet.open() as index:
        index.ping()
        fleet.name(fleet.servers[1])
        fleet.servers[0].kill()
        for _ in range(3):
            index.ping()
        assert index.usage(NAME) == Usage(0, 0, 0)


def test_idle_connections_of_the_former_master_are_not_used(fleet: Fleet) -> None:
    first, second = fleet.servers
    with fleet.open() as index:
        assert at_once(8, index.ping) == []
        fleet.name(second)
        fleet.demote(first)
        index.ping()
        first.pause()
        try:
            # Each of them would wait for an answer until its deadline.
            assert at_once(8, index.ping) == []
        finally:
            first.resume()


def test_news_are_noticed_without_a_failure(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_sentinel, "_LOOK_S", 0.05)
    second = fleet.servers[1]
    with fleet.open() as index:
        index.ping()
        # The old master is cut off from its Sentinels: it still takes writes, which will be lost.
        fleet.name(second)
        until(lambda: (index.ping(), clients(second))[1] > 0)
        assert index._client.sentinels.known == ("127.0.0.1", second.port)


def test_a_replica_that_sentinels_name_takes_no_writes(fleet: Fleet) -> None:
    first, second = fleet.servers
    fleet.demote(second)
    fleet.name(second)
    with fleet.open(PATIENT) as index:
        error, took_s = failing(index.ping)
        assert isinstance(error, TransientError)
        assert took_s < PATIENCE_S / 2
        fleet.name(first)
        index.ping()


def test_a_script_of_an_old_server_that_was_demoted_is_sent_again(fleet: Fleet) -> None:
    """Redis before 7.0 says in the middle of its words what redis-py looks for at their beginning."""
    second = fleet.servers[1]
    words = "ERR running script: -READONLY You can't write against a read only replica."
    script = Script("old", f"return redis.error_reply([[{words}]])", "0" * 40)
    with fleet.open() as index:
        index.ping()
        fleet.name(second)
        failing(lambda: index._client.run(script, "kvs:old"))
        assert index._client.sentinels.known == ("127.0.0.1", second.port)


# Sentinels in trouble


@pytest.mark.parametrize("down", [0, 1])
@pytest.mark.parametrize("how", ["refuse", "hang"])
def test_one_sentinel_is_enough(fleet: Fleet, how: str, down: int) -> None:
    others = [one for number, one in enumerate(fleet.sentinels) if number != 2 * down]
    with fleet.open() as index:
        for one in others:
            one.hangs = how == "hang"
            if how == "refuse":
                one.stop()
            client = index._client.sentinels._clients["127.0.0.1", one.port]
            client.connection_pool.connection_kwargs["socket_timeout"] = 0.3
        index.ping()
        # From now on it is asked before those that didn't answer, even if they would.
        for one in others:
            one.hangs = False
        assert at_once(8, index.ping) == []
        assert [one.asked for one in others] == [0, 0]


def test_what_is_no_sentinel_is_passed_over(fleet: Fleet) -> None:
    fleet.sentinels[0].error, fleet.sentinels[1].answer = "ERR unknown command 'SENTINEL'", b"+OK\r\n"
    with fleet.open() as index:
        index.ping()
        fleet.sentinels[2].stop()
        index._client._first.connection_pool.disconnect()
        index.ping()
        fleet.servers[0].kill()
    with fleet.open() as index:
        error, _ = failing(index.ping)
        assert "unknown command" in str(error) and "not as Sentinels do" in str(error)


def test_a_question_that_outlasts_a_call_is_not_asked_again() -> None:
    go_on, asked = threading.Event(), [0]

    class Slow:
        def sentinel_masters(self) -> dict[str, Any]:
            asked[0] += 1
            go_on.wait(30)
            return {MASTER: {"ip": "h", "port": 1, "is_sdown": False, "is_odown": False}}

    client: Any = Slow()
    sentinels = Sentinels({("a", 1): client}, MASTER, timeout_s=0.01)
    for _ in range(3):
        with pytest.raises(redis.TimeoutError, match="the Sentinels of kv-master don't answer in time"):
            sentinels.master()
    go_on.set()
    until(lambda: sentinels.known == ("h", 1))
    assert asked == [1]


def test_all_sentinels_may_go_while_the_masterworks(fleet: Fleet) -> None:
    with fleet.open(PATIENT) as index:
        name = index.register(namespace(), expected_blocks=100)
        for one in fleet.sentinels:
            one.stop()
        put(index, name, chain(3))
        # Without any connection: the master that was known last says that it still is.
        for _ in range(3):
            fleet.servers[0].command("CLIENT", "KILL", "TYPE", "normal")
            assert served(index.match(name, chain(3))) == 3
        assert at_once(8, index.ping) == []
        fleet.servers[0].kill()
        error, took_s = failing(index.ping)
        assert "refused" in str(error)
        assert took_s < PATIENCE_S / 2


def test_no_sentinel_at_all(fleet: Fleet) -> None:
    for one in fleet.sentinels:
        one.stop()
    with fleet.open() as index:
        error, _ = failing(index.ping)
        assert type(error) is TransientError
        for one in fleet.sentinels:
            assert f"127.0.0.1:{one.port}" in str(error)


def test_sentinels_that_hang_cost_no_more_than_one_deadline(fleet: Fleet) -> None:
    for one in fleet.sentinels:
        one.hangs = True
    with fleet.open(SHORT) as index:
        for _ in range(2):
            error, took_s = failing(index.ping)
            assert isinstance(error, TransientError)
            assert took_s < PATIENCE_S / 2
        began = time.monotonic()
        assert len(at_once(100, index.ping)) == 100
        assert time.monotonic() - began < PATIENCE_S / 2


def test_everything_hangs_within_one_deadline(fleet: Fleet) -> None:
    """Finding the master, the handshake and the reply share it; without that it would be three of them."""
    fleet.sentinels[0].hangs = fleet.sentinels[1].hangs = True
    settings = RedisSettings(timeout_s=1.5, connect_timeout_s=0.3, password=SecretStr("x"))

    def in_time() -> bool:
        with fleet.open(settings) as index:
            error, took_s = failing(index.ping)
        return isinstance(error, DeadlineExceeded) and 1.4 < took_s < 4.0

    fleet.servers[0].pause()
    try:
        until(in_time)  # a machine that stands still for a moment costs a try
    finally:
        fleet.servers[0].resume()


def test_a_masters_name_that_is_not_found_in_time(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    real, found = socket.getaddrinfo, threading.Event()

    def slowly(host: str, *args: Any, **options: Any) -> Any:
        if host == "master.invalid":
            found.wait(PATIENCE_S)
            host = "127.0.0.1"
        return real(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    for one in fleet.sentinels:
        one.host = "master.invalid"

    def in_time() -> bool:
        with fleet.open(RedisSettings(timeout_s=0.5, connect_timeout_s=0.3)) as index:
            error, took_s = failing(index.ping)
        assert took_s < PATIENCE_S / 2
        return isinstance(error, DeadlineExceeded)

    until(in_time)  # a Sentinel may stand still for a moment, and then names no master
    found.set()


def test_without_threads_what_is_known_goes_on_being_used(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As at the limit of a container's, or when the interpreter ends."""

    def refused(**_: object) -> object:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(redis_sentinel, "_LOOK_S", 0.0)
    with fleet.open() as index, fleet.open(PATIENT) as stranger:
        index.ping()
        monkeypatch.setattr(aside, "threading", SimpleNamespace(Thread=refused))
        index.ping()
        error, took_s = failing(stranger.ping)
        assert "can't start new thread" in str(error)
        assert took_s < PATIENCE_S / 2


def test_a_master_that_is_down_is_not_tried(fleet: Fleet) -> None:
    for one in fleet.sentinels:
        one.flags = "master,s_down,o_down"
    with fleet.open() as index:
        error, _ = failing(index.ping)
        assert f"no master kv-master; Sentinel 127.0.0.1:{fleet.sentinels[0].port}, " in str(error)
        assert f": 127.0.0.1:{fleet.servers[0].port} is down" in str(error)
        fleet.sentinels[0].flags = fleet.sentinels[1].flags = fleet.sentinels[2].flags = "master"
        until(lambda: works(index.ping))


def test_a_wrong_master_name(fleet: Fleet) -> None:
    with fleet.open(master="mymaster") as index:
        error, _ = failing(index.ping)
        assert type(error) is TransientError
        assert "it knows no master 'mymaster'; it knows kv-master" in str(error)
        assert "redis+sentinel://HOST:26379/MASTER/0" in str(error)


def test_credentials_of_sentinels_are_their_own(fleet: Fleet) -> None:
    for one in fleet.sentinels:
        one.password = "sentinel-secret"
    fleet.servers[0].command("CONFIG", "SET", "requirepass", "master-secret")
    wrong = [
        patient(password=SecretStr("master-secret")),
        patient(password=SecretStr("master-secret"), sentinel_password=SecretStr("wrong-secret")),
        patient(password=SecretStr("wrong-secret"), sentinel_password=SecretStr("sentinel-secret")),
    ]
    for settings in wrong:
        with fleet.open(settings) as index:
            error, _ = failing(index.ping)
            assert isinstance(error, PermissionDenied)
            assert ("redis.sentinel_password" in str(error)) == (settings is not wrong[2])
            assert "-secret" not in f"{error!r} {error.__cause__!r} {index!r} {index._client.sentinels!r}"
    right = patient(password=SecretStr("master-secret"), sentinel_password=SecretStr("sentinel-secret"))
    with fleet.open(right) as index:
        index.ping()
    with redis.Redis(port=fleet.servers[0].port, password="master-secret", protocol=2) as raw:
        raw.config_set("requirepass", "")


def test_doctor_says_whom_the_sentinels_name(fleet: Fleet, tmp_path: Path) -> None:
    hosts = ",".join(f"127.0.0.1:{one.port}" for one in fleet.sentinels)
    tree = {"payloads": f"file://{tmp_path}", "index": f"redis+sentinel://{hosts}/{MASTER}/0"}

    def checks(connect_timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        redis = {"timeout_s": PATIENCE_S, "connect_timeout_s": connect_timeout_s}
        with Cache(load_settings(tree | {"redis": redis}, {})) as cache:
            return {check.name: check for check in check_redis(cache, time.time)}

    master = f"127.0.0.1:{fleet.servers[0].port}, by the word of"
    found = checks()
    assert (found["index master"].state, found["index master"].advice) == ("ok", "")
    assert found["index master"].found == f"{master} 3 of 3 Sentinels"
    assert {"index clock", "index memory", "index version"} <= set(found)
    fleet.sentinels[0].stop()
    fleet.sentinels[1].hangs = True

    def seen() -> Any:
        check = checks(0.2).get("index master")
        # The third one, and the master, may stand still for a moment, too.
        return check if check is not None and check.found.startswith(master) else None

    check = until(seen)
    assert check.state == "warning"
    assert check.found.startswith(f"{master} 1 of 3 Sentinels; 127.0.0.1:")
    assert f"127.0.0.1:{fleet.sentinels[0].port}: Error 111" in check.found
    assert f"127.0.0.1:{fleet.sentinels[1].port}: Timeout" in check.found
    assert "quorum" in check.advice


# Real Sentinels


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SentinelServers]:
    with SentinelServers(tmp_path_factory.mktemp("sentinels")) as servers:
        yield servers


class TestRedisIndexBehindSentinels(IndexConformance, NoteConformance):
    @pytest.fixture
    def index(self, real: SentinelServers) -> Iterator[RedisIndex]:
        real.master().flush()
        self.servers = real
        with self.reopen() as index:
            yield index

    def reopen(self) -> RedisIndex:
        return self.configured()

    def configured(
        self, *, journal: JournalSettings | None = None, cost_aware: bool = True, by: str = ""
    ) -> RedisIndex:
        return RedisIndex.from_settings(
            self.servers.url,
            PATIENT,
            journal=journal or JournalSettings(),
            cost_aware=cost_aware,
            by=by,
        )


def test_a_failover_under_load_costs_misses_and_nothing_else(real: SentinelServers, tmp_path: Path) -> None:
    """The master is killed while threads save and load. What they get is right or nothing; no call takes
    longer than its deadline; and once the replica is promoted all of it works again."""
    real.master().flush()
    tree = {
        "payloads": f"file://{tmp_path}",
        "index": real.url,
        "redis": {"timeout_s": 10.0, "connect_timeout_s": 10.0},
    }
    tree["breaker"] = {"backoff_s": 0.1, "max_backoff_s": 0.4}
    stop, slowest, wrong, saved_at = threading.Event(), [0.0], [0], [0.0, 0.0]

    def work(space: Space, worker: int) -> None:
        turn = 0
        while not stop.is_set():
            turn += 1
            blocks = world.chain(worker, turn % 50, turn)
            began = time.monotonic()
            try:
                stored = space.save(world.slots(blocks)).stored
                found = world.match(space, blocks)
                got = world.fetch(space, blocks, found)
                wrong[0] += got != [world.content(one) for one in blocks[: found.blocks]]
                if stored and found.blocks == len(blocks):
                    saved_at[worker] = time.monotonic()
            except KVStoreError:
                time.sleep(0.01)
            slowest[0] = max(slowest[0], time.monotonic() - began)

    with open_store(tree) as store:
        space = world.open_space(store)
        threads = [threading.Thread(target=work, args=(space, number)) for number in range(2)]
        for thread in threads:
            thread.start()
        try:
            until(lambda: min(saved_at) > 0)
            former = real.master()
            former.kill()
            killed = time.monotonic()
            until(lambda: min(saved_at) > killed + 0.2)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert wrong == [0]
        # A save makes several calls, a claim, a commit and what tidies up after it.
        assert slowest[0] < PATIENCE_S / 2
        assert real.master() is not former
        # The one that was killed comes back empty, as a master; it gets nothing, and is made a replica.
        former.start()
        blocks = world.chain(7, 7, 7)
        space.save(world.slots(blocks))
        assert world.fetch(space, blocks, world.match(space, blocks)) == [
            world.content(one) for one in blocks
        ]
