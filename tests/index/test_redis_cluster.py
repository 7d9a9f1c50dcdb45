"""The contract on a Redis Cluster: no script crosses slots, and a plain URL of one node is enough."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from pydantic import SecretStr

from kvstore.blobs.memory import MemoryPayloads
from kvstore.build import load_settings
from kvstore.conformance.chains import CREATED_S, chain, namespace, put_all, served
from kvstore.errors import PermissionDenied, TransientError
from kvstore.index.redis import RedisIndex
from kvstore.keys import NamespaceId
from kvstore.metrics import Counters
from kvstore.tending import Tending
from kvstore.testing import IndexConformance, MaintenanceConformance
from schemas.settings import JournalSettings, RedisSettings
from tests.index.cluster import RedisClusterServers
from tests.servers import RedisServer, _free_port

pytestmark = pytest.mark.servers


class TestRedisIndexOnACluster(IndexConformance, MaintenanceConformance):
    @pytest.fixture
    def index(self, redis_cluster: RedisClusterServers) -> Iterator[RedisIndex]:
        self.servers = redis_cluster
        with self.reopen() as index:
            yield index

    def reopen(self) -> RedisIndex:
        return self.configured()

    def configured(self, *, journal: JournalSettings | None = None, cost_aware: bool = True) -> RedisIndex:
        return RedisIndex.from_settings(
            self.servers.urls[0],
            RedisSettings(timeout_s=5.0),
            journal=journal or JournalSettings(),
            cost_aware=cost_aware,
        )

    def miscount(self, name: NamespaceId, nbytes: int) -> None:
        with redis.RedisCluster.from_url(self.servers.urls[0], protocol=2) as client:
            client.hincrby(f"kvs:{{{name}}}:meta", "bytes", nbytes)


def test_namespaces_spread_over_the_masters(redis_cluster: RedisClusterServers) -> None:
    with RedisIndex.from_settings(redis_cluster.urls[1], RedisSettings(timeout_s=5.0)) as index:
        digests = chain(100)
        names = [index.register(namespace(f"model {i}"), expected_blocks=10_000) for i in range(12)]
        for name in names:
            put_all(index, name, digests, [64, 36])
        assert all(served(index.match(name, digests)) == 100 for name in names)
        assert set(index.namespaces()) == set(names)
        assert index.warnings() == []
    # Whichever node is asked first, and whatever the first question is.
    for url in redis_cluster.urls:
        with RedisIndex.from_settings(url, RedisSettings(timeout_s=5.0)) as index:
            accounts = index.accounts()
            assert [one.namespace for one in accounts] == sorted(names)
            assert {one.usage.blocks for one in accounts} == {100}
    assert all(size > 100 for size in redis_cluster.sizes())


def test_a_node_that_is_down_keeps_nobody_else_from_upkeep(tmp_path: Path) -> None:
    settings = RedisSettings(timeout_s=1.0, connect_timeout_s=0.3)
    with (
        RedisClusterServers(tmp_path / "cluster") as cluster,
        RedisIndex.from_settings(cluster.urls[0], settings) as index,
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
        tending = Tending(index, MemoryPayloads("cluster"), tree, Counters(), lambda: CREATED_S)
        evicted, _ = tending.evict()
        assert evicted > 5 * len(there)
        assert isinstance(tending.unreachable, TransientError)
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
    with RedisIndex.from_settings(f"redis://{hosts}/0", RedisSettings()) as index:
        assert repr(index) == f"RedisIndex({hosts}/0)"
        names = [index.register(namespace(f"model {i}"), expected_blocks=100) for i in range(6)]
        assert set(index.namespaces()) == set(names)
    with RedisIndex.from_settings(f"redis://{dead},127.0.0.1:1/0", RedisSettings()) as index:
        began = time.monotonic()
        with pytest.raises(TransientError, match="refused"):
            index.ping()
        assert time.monotonic() - began < 0.5
    # Of what they say it is the last one's word that counts.
    hosts = hosts.removeprefix(f"{dead},")
    redis_cluster.set("requirepass", "right-secret")
    try:
        wrong = RedisSettings(password=SecretStr("wrong-secret"))
        with RedisIndex.from_settings(f"redis://{hosts}/0", wrong) as index:
            with pytest.raises(PermissionDenied) as caught:
                index.ping()
            assert "secret" not in str(caught.value)
        with RedisIndex.from_settings(f"redis://:right-secret@{hosts}/0", RedisSettings()) as index:
            index.ping()
    finally:
        for port in redis_cluster.ports:
            with redis.Redis(port=port, password="right-secret", protocol=2) as raw:
                raw.config_set("requirepass", "")
