"""The contract at N = 8, whole on a Cluster; and at N = 1 and N = 8 in one Redis, as far as engines ask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import redis

from kvstore.index.redis.index import RedisIndex
from kvstore.index.sessions import Allowance
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sharding.leaf import ShardLeaf
from kvstore.index.sharding.names import shard_names
from kvstore.keys import NO_SALT, NamespaceId, session_id
from tests.index.contract.admission import NoteConformance
from tests.index.contract.chains import CREATED_S, LATER_S, chain
from tests.index.contract.index import IndexConformance
from tests.index.contract.sessions import ONE, later
from tests.index.contract.sessions import save as save_for
from tests.index.contract.whole import FullIndexConformance
from tests.index.redis.cluster import RedisClusterServers
from tests.servers.redis import PATIENT


class InRedis:
    """Subclasses say in which Redis, in how many shards, and how much of the contract."""

    url: str
    shards = 8

    def leaf(self, **settings: Any) -> ShardLeaf:
        return RedisIndex.from_settings(self.url, PATIENT, **settings)

    def reopen(self) -> ShardedIndex:
        return self.configured()

    def configured(self, **settings: Any) -> ShardedIndex:
        return ShardedIndex(self.leaf(**settings), shards=self.shards)


@pytest.mark.servers
class TestEightShardsInRedis(InRedis, IndexConformance, NoteConformance):
    @pytest.fixture
    def index(self, redis_url: str) -> Iterator[ShardedIndex]:
        self.url = redis_url
        with self.reopen() as index:
            yield index


@pytest.mark.servers
class TestOneShardInRedis(TestEightShardsInRedis):
    shards = 1


@pytest.mark.servers
class TestEightShardsOnACluster(InRedis, FullIndexConformance):
    @pytest.fixture
    def index(self, redis_cluster: RedisClusterServers) -> Iterator[ShardedIndex]:
        self.url = redis_cluster.urls[0]
        with self.reopen() as index:
            yield index

    def miscount(self, name: NamespaceId, nbytes: int) -> None:
        """In the shard that holds most: what another holds may be less than what is taken off."""
        metas = [f"kvs:{{{one}}}:meta" for one in shard_names(name, self.shards)]
        with redis.RedisCluster.from_url(self.url, protocol=2) as client:
            most = max(metas, key=lambda meta: int(client.hget(meta, "bytes") or 0))
            client.hincrby(most, "bytes", nbytes)

    def test_who_retains_everything_is_stopped_at_his_share(
        self, index: Any, catalogue: Any, name: NamespaceId
    ) -> None:
        """A shard has its part of the share."""
        share = Allowance(5 * ONE * self.shards, 1 << 60, 1 << 60)
        for seed in range(20 * self.shards):
            session = session_id(NO_SALT, str(seed))
            own = save_for(index, name, chain(8, seed=str(seed)), session)
            index.session(name, session, own, CREATED_S, later(600), allowance=share)
        assert catalogue.retained(name) == {NO_SALT: 5 * ONE * self.shards}
        assert len(catalogue.order(name, 10_000)) == 80 * self.shards
        most = 75 * self.shards
        gone = catalogue.cull(name, keep_bytes=0, delete_after_s=LATER_S, limit=most, rule="capacity")
        assert len(gone) == most
        assert catalogue.retained(name) == {NO_SALT: 5 * ONE * self.shards}
