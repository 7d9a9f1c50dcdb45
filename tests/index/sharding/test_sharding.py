"""What several shards are for: load spreads over slots, and one that is down costs its own hits only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.crc import key_slot

from kvstore.breaker import Breaker
from kvstore.errors import BreakerOpen, NamespaceUnknown, PermissionDenied, TransientError
from kvstore.index.port import CommitState
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sharding.breakers import ShardBreakers
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sharding.layouts import LOOK_S
from kvstore.index.sharding.names import (
    SLOTS,
    base_of,
    is_name,
    layout_of,
    new_layout,
    of_chain,
    place_of,
    shard_names,
    shards_in,
    slot_of,
)
from kvstore.index.sharding.requests import ShardedRequests
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.keys import NO_SALT, NamespaceId, SegmentId, namespace_id, new_segment_id
from schemas.settings import BreakerSettings
from tests.index.contract.chains import CREATED_S, LATER_S, chain, items, namespace, put, record, served
from tests.index.memory import Memory
from tests.index.redis.cluster import RedisClusterServers
from tests.servers.redis import PATIENT

ID = NamespaceId("0123456789abcdef")


# Names


def test_names_are_pinned() -> None:
    """They stand in Redis. Another spelling would be another place."""
    assert shard_names(ID, 1) == (ID,)
    assert shard_names(ID, 4) == (
        "0123456789abcdef.4.0.3",
        "0123456789abcdef.4.1.1",
        "0123456789abcdef.4.2.3",
        "0123456789abcdef.4.3.1",
    )
    assert shard_names(ID, "1.7") == ("0123456789abcdef.1.0.0.7",)
    assert shard_names(ID, "2.12") == ("0123456789abcdef.2.0.0.12", "0123456789abcdef.2.1.1.12")
    for layout in ("1", "4", "256", "1.7", "2.12", new_layout(3)):
        assert {layout_of(name) for name in shard_names(ID, layout)} == {layout}
        assert all(is_name(name) for name in shard_names(ID, layout))
        assert shards_in(layout) == len(shard_names(ID, layout))
    for text in ("", "0", "257", "8.", ".8", "x", "8.1234567890", "8.1.1"):
        with pytest.raises(ValueError, match="no layout"):
            shards_in(text)


@pytest.mark.parametrize("shards", [2, 3, 8, 256])
def test_shards_lie_in_equal_ranges_of_slots(shards: int) -> None:
    names = shard_names(ID, shards)
    assert len(set(names)) == shards
    for number, name in enumerate(names):
        assert key_slot(f"kvs:{{{name}}}:meta".encode()) == slot_of(name)
        assert slot_of(name) * shards // SLOTS == number
        assert (base_of(name), place_of(name)) == (ID, (shards, number))


def test_chains_spread_evenly() -> None:
    names = shard_names(ID, 8)
    found = Counter(of_chain(names, chain(1, seed=str(seed))) for seed in range(4000))
    assert set(found) == set(names)
    assert all(400 < count < 600 for count in found.values())


# How many


@pytest.fixture
def leaf() -> SqliteIndex:
    return Memory().open()


def test_the_first_registration_says_how_many(leaf: SqliteIndex) -> None:
    asked = [ShardedIndex(leaf, shards=shards) for shards in (1, 8, 4)]
    for first, other in ((1, 8), (8, 1), (4, 8)):
        index, later = (next(one for one in asked if one._asked == shards) for shards in (first, other))
        name = index.register(namespace(f"begun with {first}"), expected_blocks=100)
        assert later.register(namespace(f"begun with {first}"), expected_blocks=100) == name
        put(index, name, chain(5))
        assert served(later.match(name, chain(5))) == 5
        (account,) = [one for one in later.accounts() if one.namespace == name]
        assert (account.shards, account.usage.blocks) == (first, 5)
        assert (leaf.usage(name).blocks == 5) == (first == 1)


def test_another_number_is_noticed(leaf: SqliteIndex) -> None:
    now = [0.0]
    engine = ShardedRequests(leaf, shards=8, monotonic=lambda: now[0])
    name = engine.register(namespace(), expected_blocks=100)
    operator = ShardedIndex(leaf, shards=1)
    assert operator.erase(name, 1000) == "erased"
    assert leaf.accounts() == []
    operator.register(namespace(), expected_blocks=100)
    put(operator, name, chain(3))
    # A writer is told at once, a reader finds out.
    with pytest.raises(NamespaceUnknown):
        put(engine, name, chain(3, seed="another"))
    assert engine.match(name, chain(3)) == []
    now[0] += LOOK_S
    assert served(engine.match(name, chain(3))) == 3


def test_what_nobody_would_find_is_refused(leaf: SqliteIndex) -> None:
    """A release that knew no tags gave ids at random."""
    for shards, state in ((1, CommitState.VISIBLE), (8, CommitState.REFUSED)):
        index = ShardedIndex(leaf, shards=shards)
        name = index.register(namespace(f"in {shards}"), expected_blocks=100)
        segment = bytearray(new_segment_id(chain(2)))
        segment[-1] ^= 0xFF
        stray = SegmentId(bytes(segment))
        assert index.commit(name, stray, chain(2), record(2), rank=0, ranks=1) is state


def test_what_is_forbidden_before_is_forbidden_in_each_shard(leaf: SqliteIndex) -> None:
    index = ShardedIndex(leaf, shards=8)
    name = namespace_id(namespace())
    until = index.forbid(name, NO_SALT)
    assert index.register(namespace(), expected_blocks=100) == name
    for seed in range(40):
        digests = chain(1, seed=str(seed))
        made = record(1, created_s=int(until))
        state = index.commit(name, new_segment_id(digests), digests, made, rank=0, ranks=1)
        assert state is CommitState.REFUSED
    assert index.forbidden(name) == {NO_SALT: until}


def test_items_are_found_by_themselves(leaf: SqliteIndex) -> None:
    index = ShardedIndex(leaf, shards=8)
    name = index.register(items(), expected_blocks=100)
    known = [chain(1, seed=str(seed)) for seed in range(50)]
    segments = [put(index, name, one) for one in known]
    found = index.find(name, b"".join([*known, chain(1, seed="none")]))
    assert [run and (run.start, run.segment) for run in found] == [*enumerate(segments), None]


# Redis


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        yield client


@pytest.mark.servers
def test_one_shard_is_todays_schema(redis_url: str, raw: Any) -> None:
    kept = []
    for index in (
        RedisIndex.from_settings(redis_url, PATIENT, clock=lambda: CREATED_S),
        ShardedIndex(RedisIndex.from_settings(redis_url, PATIENT, clock=lambda: CREATED_S)),
    ):
        with index:
            raw.flushall()
            segment = SegmentId(b"segment" + chain(2)[13:14])
            name = index.register(namespace(), expected_blocks=100)
            index.commit(name, segment, chain(2), record(2), rank=0, ranks=1)
            kept.append({key: raw.dump(key) for key in raw.keys() if b"events" not in key})
    assert kept[0] == kept[1]


@pytest.mark.servers
def test_a_namespace_in_shards_is_a_newer_schema_to_a_release_without(redis_url: str, raw: Any) -> None:
    with ShardedIndex(
        RedisIndex.from_settings(redis_url, PATIENT, clock=lambda: CREATED_S), shards=2
    ) as index:
        name = index.register(namespace(), expected_blocks=100)
        meta = raw.hgetall(f"kvs:{{{name}}}:meta")
        assert set(meta) == {b"schema", b"json", b"kind", b"tenant", b"created", b"seen", b"shards"}
        assert (meta[b"schema"], meta[b"shards"]) == (b"3", b"2")
        for shard in shard_names(name, 2):
            assert raw.hget(f"kvs:{{{shard}}}:meta", "schema") == b"2"
        assert {one.decode() for one in raw.smembers("kvs:ns")} == {name, *shard_names(name, 2)}
        # What such a release does: it has neither bucket_bits, nor a schema that may be touched.
        with pytest.raises(NamespaceUnknown):
            index.leaf.claim(name, chain(1), new_segment_id(chain(1)), 1.0)
        assert index.erase(name, 1000) == "erased"
        assert raw.keys("kvs:{*") == [] and raw.smembers("kvs:ns") == set()
        raw.hset(f"kvs:{{{name}}}:meta", "schema", 4)
        with pytest.raises(PermissionDenied, match="newer release"):
            index.register(namespace(), expected_blocks=100)


# A node that is down


@pytest.mark.servers
def test_a_shard_that_is_down_costs_its_own_hits_only(tmp_path: Path) -> None:
    breakers = ShardBreakers(
        lambda name: Breaker(name, BreakerSettings(failures=2, backoff_s=3600.0, max_backoff_s=3600.0))
    )
    with (
        RedisClusterServers(tmp_path / "cluster") as cluster,
        ShardedIndex(RedisIndex.from_settings(cluster.urls[0], PATIENT), shards=8) as index,
    ):
        cluster.set("cluster-require-full-coverage", "no")
        leaf: Any = index.leaf
        engine = ShardedRequests(leaf, shards=8, guard=breakers.guard)
        name = engine.register(namespace(), expected_blocks=1000)
        chains = [chain(4, seed=str(seed)) for seed in range(48)]
        for one in chains:
            put(engine, name, one)
            assert served(engine.match(name, one)) == 4
        names = shard_names(name, 8)
        whole_store = (name, "kvs:ns", "kvs:quotas")
        find = leaf._client._current.get_node_from_key
        nodes = {one: find(f"{{{one}}}").port for one in (*whole_store, *names)}
        assert len({nodes[one] for one in names}) == 3
        down = next(port for port in cluster.ports if port not in [nodes[one] for one in whole_store])
        lost = [one for one in chains if nodes[of_chain(names, one)] == down]
        left = [one for one in chains if one not in lost]
        assert 0 < len(lost) < 48
        whole = index.accounts()[0].usage.blocks
        cluster.kill(down)

        for _ in range(2):
            for one in lost:
                with pytest.raises((TransientError, BreakerOpen)):
                    engine.match(name, one)
        with pytest.raises(BreakerOpen):
            engine.match(name, lost[0])
        assert breakers.is_closed
        for one in left:
            assert served(engine.match(name, one)) == 4
            put(engine, name, chain(2, seed=one.hex(), after=one), 4)
        # Nor is anybody kept from registering, or from upkeep.
        assert engine.register(namespace(), expected_blocks=1000) == name
        (account,), failure = index.reachable()
        assert isinstance(failure, TransientError)
        assert account.usage.blocks == 6 * len(left) < whole + 2 * len(left)
        gone = index.cull(name, keep_bytes=0, delete_after_s=LATER_S, limit=10, rule="capacity")
        assert len(gone) == 10
        assert index.evict(name, gone, delete_after_s=LATER_S, rule="admin") == 0
