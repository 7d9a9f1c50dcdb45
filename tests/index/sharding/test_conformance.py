"""The contract at N = 1 and N = 8. One shard in Redis is what the stores of all other tests have, and its
leaf has the contract's tests for itself."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import redis

from kvstore.conformance.index.chains import CREATED_S, LATER_S, chain
from kvstore.conformance.index.sessions import ONE, later
from kvstore.conformance.index.sessions import save as save_for
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sessions import Allowance
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sharding.leaf import ShardLeaf
from kvstore.index.sharding.names import shard_names
from kvstore.keys import NO_SALT, NamespaceId, session_id
from kvstore.testing import FullIndexConformance
from schemas.settings import JournalSettings
from tests.index.redis.cluster import RedisClusterServers
from tests.servers.redis import PATIENT


class Sharded(FullIndexConformance):
    """Subclasses say what leaf, and how many shards."""

    shards = 8

    def leaf(self, *, journal: JournalSettings, cost_aware: bool, by: str) -> ShardLeaf:
        raise NotImplementedError

    def reopen(self) -> ShardedIndex:
        return self.configured()

    def configured(
        self, *, journal: JournalSettings | None = None, cost_aware: bool = True, by: str = ""
    ) -> ShardedIndex:
        leaf = self.leaf(journal=journal or JournalSettings(), cost_aware=cost_aware, by=by)
        return ShardedIndex(leaf, shards=self.shards)

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


@pytest.mark.servers
class TestEightShardsInRedis(Sharded):
    @pytest.fixture
    def index(self, redis_url: str) -> Iterator[ShardedIndex]:
        self.url = redis_url
        with self.reopen() as index:
            yield index

    def leaf(self, *, journal: JournalSettings, cost_aware: bool, by: str) -> ShardLeaf:
        return RedisIndex.from_settings(self.url, PATIENT, journal=journal, cost_aware=cost_aware, by=by)

    def miscount(self, name: NamespaceId, nbytes: int) -> None:
        with redis.Redis.from_url(self.url, protocol=2) as client:
            miscount(client, shard_names(name, self.shards), nbytes)


@pytest.mark.servers
class TestOneShardInRedis(TestEightShardsInRedis):
    shards = 1


@pytest.mark.servers
class TestEightShardsOnACluster(TestEightShardsInRedis):
    @pytest.fixture
    def index(self, redis_cluster: RedisClusterServers) -> Iterator[ShardedIndex]:
        self.url = redis_cluster.urls[0]
        with self.reopen() as index:
            yield index

    def miscount(self, name: NamespaceId, nbytes: int) -> None:
        with redis.RedisCluster.from_url(self.url, protocol=2) as client:
            miscount(client, shard_names(name, self.shards), nbytes)


def miscount(client: Any, names: Sequence[NamespaceId], nbytes: int) -> None:
    """In the shard that holds most: what another holds may be less than what is taken off."""
    metas = [f"kvs:{{{name}}}:meta" for name in names]
    client.hincrby(max(metas, key=lambda meta: int(client.hget(meta, "bytes") or 0)), "bytes", nbytes)
