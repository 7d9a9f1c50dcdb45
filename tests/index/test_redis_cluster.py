"""The contract on a Redis Cluster: no script crosses slots, and a plain URL of one node is enough."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from kvstore.conformance.chains import chain, namespace, put_all, served
from kvstore.index.redis import RedisIndex
from kvstore.keys import NamespaceId
from kvstore.testing import IndexConformance, MaintenanceConformance
from schemas.settings import JournalSettings, RedisSettings
from tests.index.cluster import RedisClusterServers

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
