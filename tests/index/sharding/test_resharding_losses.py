"""Resharding, when Redis is full, or a node loses what it was told last, or does not answer once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from kvstore.errors import CapacityExceeded, TransientError
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sharding.layouts import lease_of
from kvstore.index.sharding.names import shard_names
from kvstore.keys import SaltId
from tests.index.contract.chains import chain, namespace
from tests.index.sharding.moving import ALL, FEW, WAYS, Engine, Stepped, filled, found, resharded

pytestmark = pytest.mark.servers


@pytest.fixture
def unbounded(raw: Any) -> Iterator[None]:
    yield
    raw.config_set("maxmemory", 0)


@pytest.mark.usefixtures("unbounded")
@pytest.mark.parametrize(("before", "after"), WAYS)
@pytest.mark.parametrize("when", ["fill", "adopt", "seal", "enter", "turn", "turned", "aside"])
def test_a_full_redis_is_no_trap(
    leaf: RedisIndex, stepped: Stepped, raw: Any, before: int, after: int, when: str
) -> None:
    """From any step on: it is undone, or comes to its end, while Redis is full still."""
    name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
    keys = raw.dbsize()

    def full() -> None:
        raw.config_set("maxmemory", 1)

    if when == "enter":
        stepped.before("seal", lambda: stepped.before("enter", full))
    else:
        stepped.before(when, full)
    with suppress(CapacityExceeded):
        resharded(stepped.leaf, name, after)
    (account,) = ShardedIndex(leaf).accounts()
    if account.shards == before:
        resharded(leaf, name, before)
        assert raw.dbsize() == keys
    (account,) = ShardedIndex(leaf).accounts()
    assert (account.to, account.left) == (0, 0)
    assert when not in ("turn", "turned", "aside") or account.shards == after
    assert not any(one and one.sealed for one in map(leaf.layout, shard_names(name, account.shards)))
    assert name in leaf.namespaces()
    assert found(ShardedIndex(leaf), name, chains) == ALL


@pytest.mark.usefixtures("unbounded")
@pytest.mark.parametrize(("before", "after"), WAYS)
def test_an_engine_ends_seals_in_a_full_redis(
    leaf: RedisIndex, stepped: Stepped, raw: Any, before: int, after: int
) -> None:
    name, _ = filled(ShardedIndex(leaf, shards=before), FEW)
    with stepped.killed(before="turn"):
        resharded(stepped.leaf, name, after, lease=False)
    raw.config_set("maxmemory", 1)
    with pytest.raises(CapacityExceeded):
        ShardedIndex(leaf).register(namespace(), expected_blocks=1000)
    assert not any(one and one.sealed for one in map(leaf.layout, shard_names(name, before)))


@pytest.mark.parametrize(("before", "after"), WAYS)
@pytest.mark.parametrize("lost", ["seal", "new shard", "segment"])
def test_what_a_node_has_lost_does_not_turn(
    leaf: RedisIndex, stepped: Stepped, raw: Any, before: int, after: int, lost: str
) -> None:
    """It is behind what it said, as after a failover. What is there before stays; the next run mends it."""
    name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
    old, new = shard_names(name, before)[0], shard_names(name, after)[0]

    def lose() -> None:
        if lost == "seal":
            where = f"kvs:{{{old}}}:meta"
            raw.hset(where, mapping={"bucket_bits": raw.hget(where, "aside_bits"), "schema": 2})
            raw.hdel(where, "sealed", "aside_bits")
        elif lost == "segment":
            (role,) = raw.hmget(f"kvs:{{{new}}}:meta", "role")
            segment = next(one for page in leaf.taken(new) for one in page).segment
            assert leaf.withdraw(new, [segment], role.decode().removeprefix("fills ")) == 1
        elif after > 1:
            raw.delete(*raw.keys(f"kvs:{{{new}}}:*"))
        else:
            raw.hdel(f"kvs:{{{new}}}:meta", "role")

    # When all is compared: what looks at `meta` next looks at it for the last time.
    stepped.before("seal", lambda: stepped.before("ZSCAN", lambda: stepped.before("HMGET", lose)))
    with pytest.raises(TransientError, match="run it again"):
        resharded(stepped.leaf, name, after)
    index = ShardedIndex(leaf)
    assert index.accounts()[0].shards == before
    assert found(index, name, chains) == ALL
    resharded(leaf, name, after)
    index = ShardedIndex(leaf)
    assert index.accounts()[0].shards == after
    assert found(index, name, chains) == ALL


@pytest.mark.parametrize(("before", "after"), [(8, 2), (1, 8)])
def test_nothing_is_dropped_where_a_new_shard_is_lost(
    leaf: RedisIndex, stepped: Stepped, raw: Any, before: int, after: int
) -> None:
    """After the turn, before that is noted. Who is told so may run it again."""
    name, _ = filled(ShardedIndex(leaf, shards=before), FEW)
    new = shard_names(name, after)[0]
    stepped.before("turned", lambda: raw.delete(*raw.keys(f"kvs:{{{new}}}:*")) and None)
    with pytest.raises(TransientError, match="bring its node back"):
        resharded(stepped.leaf, name, after)
    (account,) = ShardedIndex(leaf).accounts()
    assert (account.shards, account.left) == (after, before)
    assert sum(leaf.usage(one).segments for one in shard_names(name, before)) == 2 * FEW - 2
    resharded(leaf, name, after)
    assert ShardedIndex(leaf).accounts()[0].left == 0


@pytest.mark.parametrize("shards", [8, 64])
def test_a_seal_is_asked_about_in_few_calls(
    redis_url: str, leaf: RedisIndex, stepped: Stepped, raw: Any, shards: int
) -> None:
    name, _ = filled(ShardedIndex(leaf, shards=shards), FEW)
    other, calls = Stepped(redis_url), 0

    def sealed() -> None:
        nonlocal calls
        first = other.steps
        ShardedIndex(other.leaf).register(namespace(), expected_blocks=1000)
        calls = other.steps - first

    stepped.before("turn", sealed)
    resharded(stepped.leaf, name, 2)
    other.close()
    assert calls == 3


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_who_was_overtaken_ends_no_seals_of_another(
    redis_url: str, leaf: RedisIndex, stepped: Stepped, raw: Any, before: int, after: int
) -> None:
    """One is held up under its seal, and fails just before the other one turns."""
    second = Stepped(redis_url)
    name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
    runs = set[str]()

    def fail() -> None:
        raise TransientError("held up")

    def overtaken() -> None:
        with second.killed(before="turn"):
            resharded(second.leaf, name, after, lease=False)
        runs.update(one.sealed for one in map(leaf.layout, shard_names(name, before)) if one)
        fail()

    stepped.before("turn", overtaken)
    with pytest.raises(TransientError, match="held up"):
        resharded(stepped.leaf, name, after, lease=False)
    second.close()
    (run,) = runs
    layout = leaf.layout(name)
    assert layout is not None and layout.run == run
    assert {one.sealed for one in map(leaf.layout, shard_names(name, before)) if one} == {run}
    resharded(leaf, name, after)
    assert found(ShardedIndex(leaf), name, chains) == ALL


def test_what_is_forbidden_is_told_to_every_shard(leaf: RedisIndex, stepped: Stepped, raw: Any) -> None:
    """One of them does not answer once: the run ends there, and the next one tells it."""
    name, _ = filled(ShardedIndex(leaf, shards=8), FEW)
    late = SaltId(b"late" * 4)

    def fail() -> None:
        raise TransientError("away for a moment")

    def ban() -> None:
        leaf.forbid(name, late)
        stepped.before("forbid", fail)

    stepped.before("turn", ban)
    with pytest.raises(TransientError, match="away for a moment"):
        resharded(stepped.leaf, name, 2)
    resharded(leaf, name, 2)
    assert all(late in leaf.forbidden(one) for one in shard_names(name, 2))


def test_an_engine_is_told_that_it_is_sealed_and_saves_after_that(leaf: RedisIndex, stepped: Stepped) -> None:
    name, _ = filled(ShardedIndex(leaf, shards=8), FEW)
    engine = Engine(leaf, name)

    def sealed() -> None:
        assert leaf.leaseholder(lease_of(name))
        assert engine.save(chain(3, seed="sealed")) is None

    stepped.before("turn", sealed)
    resharded(stepped.leaf, name, 2)
    engine.now += 60
    assert engine.save(chain(3, seed="after"))
