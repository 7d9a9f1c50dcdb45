"""The contract on a Redis Cluster: no script crosses slots, and a plain URL of one node is enough."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from pydantic import SecretStr
from redis.exceptions import RedisClusterException

from kvstore.build import load_settings
from kvstore.errors import DeadlineExceeded, PermissionDenied, TransientError
from kvstore.index.redis import connections as redis_opening
from kvstore.index.redis.index import RedisIndex
from kvstore.metrics import Counters
from kvstore.payloads.memory import MemoryPayloads
from kvstore.store.housekeeping import Housekeeping
from schemas.settings import RedisSettings
from tests.index.contract.admission import NoteConformance
from tests.index.contract.chains import CREATED_S, chain, namespace, put_all, served
from tests.index.contract.index import IndexConformance
from tests.index.redis.cluster import RedisClusterServers
from tests.servers.redis import PATIENT, RedisServer, _free_port, patient
from tests.waiting import PATIENCE_S, done

pytestmark = pytest.mark.servers


class TestRedisIndexOnACluster(IndexConformance, NoteConformance):
    @pytest.fixture
    def index(self, redis_cluster: RedisClusterServers) -> Iterator[RedisIndex]:
        self.servers = redis_cluster
        with self.reopen() as index:
            yield index

    def reopen(self) -> RedisIndex:
        return RedisIndex.from_settings(
            self.servers.urls[0], RedisSettings(timeout_s=30.0, connect_timeout_s=10.0)
        )


def test_namespaces_spread_over_the_masters(redis_cluster: RedisClusterServers) -> None:
    with RedisIndex.from_settings(
        redis_cluster.urls[1], RedisSettings(timeout_s=30.0, connect_timeout_s=10.0)
    ) as index:
        digests = chain(100)
        names = [index.register(namespace(f"model {i}"), expected_blocks=10_000) for i in range(12)]
        for name in names:
            put_all(index, name, digests, [64, 36])
        assert all(served(index.match(name, digests)) == 100 for name in names)
        assert set(index.namespaces()) == set(names)
        assert index.warnings() == []
    # Whichever node is asked first, and whatever the first question is.
    for url in redis_cluster.urls:
        with RedisIndex.from_settings(url, RedisSettings(timeout_s=30.0, connect_timeout_s=10.0)) as index:
            accounts = index.accounts()
            assert [one.namespace for one in accounts] == sorted(names)
            assert {one.usage.blocks for one in accounts} == {100}
    assert all(size > 100 for size in redis_cluster.sizes())


def test_a_node_that_is_down_keeps_nobody_else_from_upkeep(tmp_path: Path) -> None:
    with (
        RedisClusterServers(tmp_path / "cluster") as cluster,
        RedisIndex.from_settings(cluster.urls[0], PATIENT) as index,
    ):
        cluster.set("cluster-require-full-coverage", "no")
        names = [index.register(namespace(f"model {i}"), expected_blocks=100) for i in range(12)]
        for name in names:
            put_all(index, name, chain(40), [4] * 10)
        keys = {name: f"{{{name}}}" for name in names} | {key: key for key in ("kvs:ns", "kvs:quotas")}
        ports = {name: index._client._current.get_node_from_key(key).port for name, key in keys.items()}
        down = next(port for port in cluster.ports if port not in (ports["kvs:ns"], ports["kvs:quotas"]))
        there = [name for name in names if ports[name] != down]
        assert 0 < len(there) < 12
        whole = index.accounts()
        cluster.kill(down)

        found, failure = index.reachable()
        assert [one.namespace for one in found] == sorted(there)
        assert isinstance(failure, TransientError)
        with pytest.raises(TransientError):
            index.accounts()
        # All of them hold three times what they may; those that are there give all that they have too much.
        nbytes = sum(one.usage.nbytes for one in whole)
        most = nbytes // 12 * len(there) // 3
        tree = load_settings({"payloads": "memory://x", "index": "memory://x", "capacity_bytes": most}, {})
        housekeeping = Housekeeping(index, MemoryPayloads("cluster"), tree, Counters(), lambda: CREATED_S)
        evicted, _ = housekeeping.evict()
        assert evicted > 5 * len(there)
        assert isinstance(housekeeping.unreachable, TransientError)
        left = sum(one.usage.nbytes for one in index.reachable()[0])
        assert left <= tree.capacity_bytes
        assert sum(served(index.match(name, chain(40))) for name in there) <= 40 * len(there) // 3

        # As when every pod of a Cluster has got another address, and the name in the URL leads to them.
        for port in cluster.ports:
            cluster.kill(port)
        for _ in range(2):
            with pytest.raises(TransientError):
                index.ping()
        successor = RedisServer(tmp_path / "successor")
        successor.port = cluster.ports[0]
        with successor:
            index.ping()
            index.register(namespace(), expected_blocks=100)


def test_one_seed_of_several_is_enough(redis_cluster: RedisClusterServers) -> None:
    dead = f"127.0.0.1:{_free_port()}"
    hosts = ",".join([dead, *(f"127.0.0.1:{port}" for port in redis_cluster.ports[1:])])
    with RedisIndex.from_settings(f"redis://{hosts}/0", PATIENT) as index:
        assert repr(index) == f"RedisIndex({hosts}/0)"
        names = [index.register(namespace(f"model {i}"), expected_blocks=100) for i in range(6)]
        assert set(index.namespaces()) == set(names)
    with RedisIndex.from_settings(f"redis://{dead},127.0.0.1:1/0", PATIENT) as index:
        began = time.monotonic()
        with pytest.raises(TransientError, match="refused"):
            index.ping()
        assert time.monotonic() - began < PATIENCE_S / 2
    # Of what they say it is the last one's word that counts.
    hosts = hosts.removeprefix(f"{dead},")
    redis_cluster.set("requirepass", "right-secret")
    try:
        wrong = patient(password=SecretStr("wrong-secret"))
        with RedisIndex.from_settings(f"redis://{hosts}/0", wrong) as index:
            with pytest.raises(PermissionDenied) as caught:
                index.ping()
            assert "secret" not in str(caught.value)
        with RedisIndex.from_settings(f"redis://:right-secret@{hosts}/0", PATIENT) as index:
            index.ping()
    finally:
        for port in redis_cluster.ports:
            with redis.Redis(port=port, password="right-secret", protocol=2) as raw:
                raw.config_set("requirepass", "")


@pytest.fixture
def mute_seeds() -> Iterator[str]:
    """The URL of a hundred seeds that take connections and answer nothing: to wait for each takes minutes."""
    with ExitStack() as stack:
        seeds = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(100)]
        yield "redis://{}/0".format(",".join(f"127.0.0.1:{seed.getsockname()[1]}" for seed in seeds))


def _seconds(call: Callable[[], object]) -> float:
    began = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="don't answer in time"):
        call()
    return time.monotonic() - began


def test_seeds_that_hang_cost_each_call_its_own_deadline(mute_seeds: str) -> None:
    with RedisIndex.from_settings(mute_seeds, RedisSettings(timeout_s=1.0)) as index:
        assert _seconds(index.ping) < PATIENCE_S / 2
        with ThreadPoolExecutor(100) as threads:
            took = [threads.submit(_seconds, index.ping) for _ in range(100)]
            assert max(one.result() for one in took) < PATIENCE_S / 2


def test_a_process_that_forks_while_seeds_are_asked_does_not_wait_for_ever(mute_seeds: str) -> None:
    with RedisIndex.from_settings(mute_seeds, RedisSettings(timeout_s=1.0)) as index:
        assert _seconds(index.ping) < PATIENCE_S / 2  # and the seeds are still being asked
        child = os.fork()
        if child == 0:
            signal.alarm(int(PATIENCE_S))
            status = 1
            try:
                status = 0 if _seconds(index.ping) < PATIENCE_S / 2 else 1
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_one_that_was_slow_to_be_found_is_there_for_the_next_call(
    redis_cluster: RedisClusterServers, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = ",".join(f"127.0.0.1:{port}" for port in redis_cluster.ports)
    made = []
    found = threading.Event()

    def slow(*args: Any, **options: Any) -> Any:
        made.append(args)
        found.wait(PATIENCE_S)
        return redis.RedisCluster(*args, **options)

    monkeypatch.setattr(redis_opening, "RedisCluster", slow)
    with RedisIndex.from_settings(f"redis://{hosts}/0", RedisSettings(timeout_s=1.0)) as index:
        assert _seconds(index.ping) < PATIENCE_S / 2
        found.set()
        done(index.ping)
        assert len(made) == 1


def test_a_client_that_failed_is_left_once(redis_cluster: RedisClusterServers) -> None:
    """Of several calls that it has failed none may leave what was made since."""
    hosts = ",".join(f"127.0.0.1:{port}" for port in redis_cluster.ports)
    with RedisIndex.from_settings(f"redis://{hosts}/0", PATIENT) as index:
        index.ping()
        client = index._client
        former = client._current
        both = threading.Barrier(2)

        def fails(used: Any) -> Any:
            if used is former:
                both.wait(PATIENCE_S)
                raise RedisClusterException("no node is left")
            return used.execute_command("PING")

        with ThreadPoolExecutor(2) as threads:
            failed = [threads.submit(client._attempt, "test", fails) for _ in range(2)]
            assert all(isinstance(one.exception(), TransientError) for one in failed)
        index.ping()
        present = client._current
        assert present is not former
        client._start_over(former)
        assert client._current is present
