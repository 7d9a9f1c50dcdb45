"""What a Redis tells of its memory, and that it may be refused without harm."""

from __future__ import annotations

import pytest
import redis

from kvstore.build import load_settings, open_index
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sqlite.index import SqliteIndex
from tests.index.contract.chains import namespace
from tests.index.redis.cluster import RedisClusterServers
from tests.servers.redis import RedisServer

pytestmark = pytest.mark.servers


def opened(url: str) -> ShardedIndex | SqliteIndex:
    return open_index(load_settings({"payloads": "file:///nowhere", "index": url}, {}))


def memory_of(url: str) -> tuple[int, int] | None:
    with opened(url) as index:
        return index.memory()


def test_what_it_uses_of_what_it_may_use(private_redis: RedisServer) -> None:
    first = memory_of(private_redis.url)
    assert first is not None
    assert first[0] > 100_000
    assert first[1] == 0
    private_redis.command("SET", "something", b"x" * 5_000_000)
    private_redis.command("CONFIG", "SET", "maxmemory", "123456789")
    then = memory_of(private_redis.url)
    assert then is not None
    assert 5_000_000 <= then[0] - first[0] < 7_000_000
    assert then[1] == 123456789


def test_a_user_who_may_not_ask_is_told_nothing(private_redis: RedisServer) -> None:
    private_redis.command("ACL", "SETUSER", "poor", "on", ">pass", "~*", "+@all", "-info")
    url = private_redis.url.replace("redis://", "redis://poor:pass@")
    assert memory_of(url) is None


def test_of_a_cluster_the_node_that_is_the_fullest(redis_cluster: RedisClusterServers) -> None:
    fullest = redis_cluster.urls[2]
    with redis.Redis.from_url(fullest, protocol=2) as client:
        client.config_set("maxmemory", 50_000_000)
        try:
            with opened(redis_cluster.urls[0]) as index:
                # The first question that another node has to answer shows that it is a Cluster.
                index.register(namespace("a model"), expected_blocks=10)
                index.accounts()
                told = index.memory()
            assert told is not None
            assert told[1] == 50_000_000
        finally:
            client.config_set("maxmemory", 0)
