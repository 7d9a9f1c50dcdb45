"""Resharding, when somebody else does it too, a shard is down, Redis is full, or loses what it was told."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from kvstore.errors import CapacityExceeded, KVStoreError, TransientError
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sharding.layouts import LOOK_S
from kvstore.index.sharding.names import base_of, layout_of, shard_names
from kvstore.keys import NamespaceId
from tests.index.contract.chains import chain, namespace, put, served
from tests.index.sharding.flaky import FlakyLeaf
from tests.index.sharding.moving import (
    ALL,
    FEW,
    SALT,
    STEPS,
    WAYS,
    Engine,
    Stepped,
    everything,
    filled,
    found,
    resharded,
    some_steps,
    steps_of,
)

pytestmark = pytest.mark.servers

#: What of `meta` tells how a namespace lies.
LAYOUT = ("schema", "shards", "to", "from")


def restored(raw: Any, name: NamespaceId, fields: dict[bytes, bytes]) -> None:
    """Lets a namespace lie as it did, as after a failover to a server that was behind."""
    where = f"kvs:{{{name}}}:meta"
    raw.hdel(where, *LAYOUT)
    raw.hset(where, mapping={one: text for one, text in fields.items() if one.decode() in LAYOUT})


def whole(leaf: RedisIndex, engine: Engine, chains: list[bytes]) -> None:
    """All that there was can be matched, and engines save again."""
    index = ShardedIndex(leaf)
    index.register(namespace(), expected_blocks=1000)
    assert found(index, engine.name, chains) == ALL
    engine.check(index)
    put(index, engine.name, one := chain(2, seed="at last"))
    assert served(index.match(engine.name, one)) == 2


@pytest.mark.parametrize(("before", "after"), WAYS)
@pytest.mark.parametrize("ends", [True, False])
def test_of_two_one_goes_on_and_one_says_so(
    redis_url: str, leaf: RedisIndex, stepped: Stepped, raw: Any, before: int, after: int, *, ends: bool
) -> None:
    """One is held up at any step. Meanwhile another one begins, and comes to its end, or is in the middle of
    it when the first one goes on. Pins stay what they are."""
    second = Stepped(redis_url)
    name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
    count, said = steps_of(stepped, name, after), 0
    for step in some_steps(count, STEPS // 4):
        raw.flushall()
        name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
        engine = Engine(leaf, name)
        pinned = {one.segment for one in engine.tools.segments(name) if one.pinned}
        assert pinned

        def meanwhile() -> None:
            if ends:
                resharded(second.leaf, name, 3)
            else:
                with suppress(KVStoreError), second.killed(step=20 + step % 50, surely=False):
                    resharded(second.leaf, name, 3)
            engine.now += LOOK_S
            engine.save(chain(3, seed="meanwhile"))

        stepped.at(step, meanwhile)
        try:
            resharded(stepped.leaf, name, after)
        except TransientError as exc:
            assert "run it again" in str(exc)
            said += 1
        engine.now += LOOK_S
        assert found(ShardedIndex(leaf), name, chains) == ALL, step
        resharded(leaf, name, after)
        whole(leaf, engine, chains)
        assert {one.segment for one in ShardedIndex(leaf).segments(name) if one.pinned} == pinned, step
    assert said > 0
    second.close()


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_nothing_is_dropped_on_the_word_of_a_turn_that_is_lost(
    leaf: RedisIndex, stepped: Stepped, raw: Any, before: int, after: int
) -> None:
    """It is lost during the wait. What is evicted, pinned and saved in between is told to both."""
    name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
    engine, kept = Engine(leaf, name), dict[bytes, bytes]()

    def lose(seconds: float) -> None:
        engine.now += LOOK_S
        if kept:
            engine.save(chain(3, seed="after the turn"))
            some = engine.segments(chains[:1])
            engine.tools.evict(name, some, delete_after_s=0, rule="bad")
            engine.reap()
            engine.tools.pin(name, engine.segments(chains[1:2]), most_bytes=1 << 40)
            restored(raw, name, kept)

    stepped.before("turn", lambda: kept.update(raw.hgetall(f"kvs:{{{name}}}:meta")))
    with pytest.raises(TransientError, match="run it again"):
        resharded(stepped.leaf, name, after, wait=lose)
    for _ in range(2):
        index = ShardedIndex(leaf)
        assert found(index, name, chains) == [0, *ALL[1:]]
        segments = [run.segment for run in index.match(name, chains[1])]
        assert [one and one.pinned for one in index.get(name, segments)] == [True] * len(segments)
        engine.check(index)
        resharded(leaf, name, after)


@pytest.fixture
def unbounded(raw: Any) -> Iterator[None]:
    yield
    raw.config_set("maxmemory", 0)


@pytest.mark.usefixtures("unbounded")
@pytest.mark.parametrize(("before", "after"), WAYS)
@pytest.mark.parametrize("when", ["begin", "register", "adopt", "enter", "turn", "trash", "erase"])
def test_a_full_redis_is_no_trap(
    leaf: RedisIndex, stepped: Stepped, raw: Any, before: int, after: int, when: str
) -> None:
    """From any step on: it is undone at once, or comes to its end, while Redis is full still."""
    name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
    keys = raw.dbsize()

    def full() -> None:
        raw.config_set("maxmemory", 1)

    if when == "trash":
        stepped.before("end", full)
    elif when == "erase":
        stepped.before("turn", lambda: stepped.before("erase", full))
    else:
        stepped.before(when, full)
    turned = when in ("turn", "trash", "erase")
    with suppress(CapacityExceeded) if turned else pytest.raises(CapacityExceeded):
        resharded(stepped.leaf, name, after)
    (account,) = ShardedIndex(leaf).accounts()
    if not turned:
        assert (account.shards, account.to, raw.dbsize()) == (before, "", keys)
    assert found(ShardedIndex(leaf), name, chains) == ALL
    raw.config_set("maxmemory", 0)
    resharded(leaf, name, after)
    (account,) = ShardedIndex(leaf).accounts()
    assert (account.shards, account.to, account.left) == (after, "", "")
    whole(leaf, Engine(leaf, name), chains)


@pytest.mark.parametrize(("before", "after"), WAYS)
@pytest.mark.parametrize(
    "verb", ["register_shard", "taken", "adopt", "entries", "enter", "evict", "forget", "lay_over"]
)
def test_a_shard_that_is_down_is_waited_for(
    leaf: RedisIndex, raw: Any, before: int, after: int, verb: str
) -> None:
    """Engines go on with what there is, and it is run again."""
    name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
    flaky, calls = FlakyLeaf(leaf), 0

    def between(called: str, where: Any) -> None:
        nonlocal calls
        calls += called == verb
        if called == verb and calls > (verb == "lay_over"):
            raise TransientError(f"{where} is down")

    flaky.between = between
    with pytest.raises(TransientError, match="is down"):
        resharded(flaky, name, after)
    engine = Engine(leaf, name)
    assert found(engine.index, name, chains) == ALL
    engine.tools.evict(name, engine.segments(chains[:1]), delete_after_s=0, rule="bad")
    assert engine.save(chain(3, seed="meanwhile"))
    resharded(leaf, name, after)
    index = ShardedIndex(leaf)
    assert found(index, name, chains) == [0, *ALL[1:]]
    assert found(index, name, list(engine.saved)) == [3]
    names = {one.decode() for one in raw.smembers("kvs:ns")}
    assert names == {name, *shard_names(name, index.accounts()[0].layout)}


def test_another_number_undoes_what_was_begun(leaf: RedisIndex, stepped: Stepped, raw: Any) -> None:
    index = ShardedIndex(leaf, shards=2)
    name, _ = filled(index, FEW)
    kept = everything(index, name)
    for first, then in ((8, 4), (1, 4), (4, 1), (1, 2), (8, 2)):
        with stepped.killed(before="turn"):
            resharded(stepped.leaf, name, first)
        (account,) = index.accounts()
        assert layout_of(shard_names(name, account.to)[0]) == account.to
        assert any("a reshard brings namespace" in text for text in index.warnings())
        resharded(leaf, name, then)
        index = ShardedIndex(leaf)
        assert everything(index, name) == kept
        names = {one.decode() for one in raw.smembers("kvs:ns")}
        assert {base_of(NamespaceId(one)) for one in names} == {name}
        assert len(names - {name}) == index.accounts()[0].shards
        resharded(leaf, name, 2)
        index = ShardedIndex(leaf)


def test_evictions_of_who_has_not_heard_of_it_are_brought_over(leaf: RedisIndex) -> None:
    """It could not reach what tells how the namespace lies. No payload is forgotten."""
    name, chains = filled(ShardedIndex(leaf, shards=8), FEW)
    engine, flaky = Engine(leaf, name), FlakyLeaf(leaf)
    deaf = ShardedIndex(flaky)
    assert found(deaf, name, chains) == ALL
    flaky.down.add(name)
    waited = 0

    def wait(seconds: float) -> None:
        nonlocal waited
        waited += 1
        if waited == 2:
            some = [run.segment for run in deaf.match(name, chains[0])]
            deaf.evict(name, some, delete_after_s=0, rule="bad")

    resharded(leaf, name, 2, wait=wait)
    index = ShardedIndex(leaf)
    assert found(index, name, chains) == [0, *ALL[1:]]
    engine.check(index)


@pytest.mark.parametrize(("before", "after"), [(8, 2), (2, 8)])
@pytest.mark.parametrize("asked", ["before", "after", "another"])
def test_what_says_how_it_lies_is_lost(
    leaf: RedisIndex, stepped: Stepped, raw: Any, before: int, after: int, asked: str
) -> None:
    """At any step, and an engine registers it, whose settings say one number or the other: what is found is
    what was there, and it can be saved again. Payloads of what was evicted may be left to `fsck`. At one
    step, right before the drop, the index is lost: the run has looked, and drops what the engine chose."""
    number = {"before": before, "after": after, "another": 4}[asked]
    name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
    count, lost = steps_of(stepped, name, after), []
    for step in some_steps(count, STEPS // 2):
        raw.flushall()
        name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
        engine = Engine(leaf, name)
        engine.strays = {one for one, _ in engine.tools.reapable(name, 1 << 40, 1000)}

        def lose() -> None:
            raw.delete(f"kvs:{{{name}}}:meta")
            ShardedIndex(leaf, shards=number).register(namespace(), expected_blocks=1000)

        stepped.at(step, lose)
        with suppress(KVStoreError):
            resharded(stepped.leaf, name, after)
        index = ShardedIndex(leaf)
        index.register(namespace(), expected_blocks=1000)
        if not any(found(index, name, chains)):
            lost.append(step)
            put(index, name, chains[0])
            assert served(index.match(name, chains[0])) == len(chains[0]) // 16
            continue
        whole(leaf, engine, chains)
        resharded(leaf, name, after)
        index = ShardedIndex(leaf)
        assert found(index, name, chains) == ALL, step
        assert {one.segment for one in index.segments(name)} >= engine.payloads - engine.strays
    assert len(lost) <= 1


@pytest.mark.parametrize(("before", "after"), WAYS)
@pytest.mark.parametrize("verb", ["reconcile", "erase"])
def test_upkeep_that_is_held_up_drops_nothing_of_it(
    redis_url: str, leaf: RedisIndex, raw: Any, before: int, after: int, verb: str
) -> None:
    """The whole of it, or half of it, falls between any two requests of another process."""
    upkeep, mover = Stepped(redis_url), Stepped(redis_url)
    for half in (False, True):
        step = 0
        over = False
        while not over:
            step += 1
            raw.flushall()
            name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
            # Of a number that it lay in once.
            for shard in shard_names(name, after) if after > 1 else ():
                leaf.register_shard(shard, namespace(), expected_blocks=100)
                put(leaf, shard, chain(2, seed=shard))
            engine, over = Engine(leaf, name), True

            def move() -> None:
                nonlocal over
                over = False
                if half:
                    with mover.killed(before="turn"):
                        resharded(mover.leaf, name, after)
                else:
                    resharded(mover.leaf, name, after)
                    engine.now += LOOK_S
                    assert engine.save(chain(3, seed="new"))

            upkeep.at(step, move)
            index = ShardedIndex(upkeep.leaf)
            if verb == "reconcile":
                index.reconcile(name)
            else:
                assert index.erase(name, 1000) == "in_use"
            upkeep.between = lambda: None
            resharded(leaf, name, after)
            whole(leaf, engine, chains)
    upkeep.close()
    mover.close()


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_who_lists_it_meanwhile_is_told(leaf: RedisIndex, raw: Any, before: int, after: int) -> None:
    name, _ = filled(ShardedIndex(leaf, shards=before), FEW)
    for walk in ("segments", "entries", "of_salt"):
        index = ShardedIndex(leaf)
        listing = getattr(index, walk)(name, *([SALT] if walk == "of_salt" else []))
        next(listing)
        number = after if ShardedIndex(leaf).accounts()[0].shards == before else before
        resharded(leaf, name, number)
        with pytest.raises(TransientError, match="try again"):
            list(listing)


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_what_was_asked_of_shards_that_are_gone_is_asked_again(
    redis_url: str, leaf: RedisIndex, raw: Any, before: int, after: int
) -> None:
    """Else a `fsck --apply` that was held up would take all payloads for waste."""
    asking = Stepped(redis_url)
    name, _ = filled(ShardedIndex(leaf, shards=before), FEW)
    segments = [one.segment for one in ShardedIndex(leaf).segments(name)]
    index = ShardedIndex(asking.leaf)
    assert index.states(name, segments) == ["visible"] * len(segments)
    # The layout was looked at, and then it is held up.
    asking.at(2, lambda: resharded(leaf, name, after) and None)
    assert index.states(name, segments) == ["visible"] * len(segments)
    # Whoever can't ask does not go by what was.
    flaky = FlakyLeaf(leaf)
    index = ShardedIndex(flaky)
    index.states(name, segments)
    flaky.down.add(name)
    with pytest.raises(TransientError):
        index.states(name, segments)
    asking.close()


def test_what_is_believed_is_believed_from_when_it_was_asked(leaf: RedisIndex) -> None:
    """A look that takes long is no longer bound, and the old shards are dropped by then."""
    name, chains = filled(ShardedIndex(leaf, shards=8), FEW)
    now, flaky = 0.0, FlakyLeaf(leaf)
    index = ShardedIndex(flaky, monotonic=lambda: now)

    def slow(verb: str, where: Any) -> None:
        nonlocal now
        now += LOOK_S * 0.75 if verb == "layout" else 0.0

    flaky.between = slow
    assert found(index, name, chains[:1]) == ALL[:1]
    flaky.between = lambda verb, where: None
    resharded(leaf, name, 2)
    now += LOOK_S * 0.5
    assert found(index, name, chains) == ALL


def test_evictions_do_not_keep_what_is_nobodys(leaf: RedisIndex, stepped: Stepped, raw: Any) -> None:
    """They reach what was left as well, between any two steps that drop it."""

    def steps(*, evicts: bool) -> int:
        raw.flushall()
        index = ShardedIndex(leaf, shards=2)
        name = index.register(namespace(), expected_blocks=2_000_000)
        shard = shard_names(name, 2)[0]
        some = [put(leaf, shard, chain(2, seed=str(seed))) for seed in range(100)]
        count = 0

        def between() -> None:
            nonlocal count
            if stepped.last == "erase":
                count += 1
                if evicts:
                    leaf.evict(shard, [some.pop()], delete_after_s=0, rule="capacity")

        stepped.between = between
        stepped.leaf.forget(shard)
        stepped.between = lambda: None
        assert not [one for one in raw.keys("kvs:{*") if shard.encode() in one]
        return count

    assert 1 < steps(evicts=False) == steps(evicts=True) < 50


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_the_trash_is_known_at_every_step(
    leaf: RedisIndex, stepped: Stepped, raw: Any, before: int, after: int
) -> None:
    """Else `fsck` takes it for waste before its time. Somebody may have asked before it came over, and go on
    after that."""
    name, _ = filled(ShardedIndex(leaf, shards=before), FEW)
    index = ShardedIndex(leaf)
    some = [one for one, _ in index.reapable(name, 1 << 40, 1000)]
    states = index.states(name, some)
    assert some and None not in states
    stepped.between = lambda: index.states(name, some) == states or pytest.fail(stepped.last)
    resharded(stepped.leaf, name, after)
    stepped.between = lambda: None
    asking = FlakyLeaf(leaf)
    index, asked = ShardedIndex(asking), 0
    with stepped.killed(before="ZSCAN"):
        resharded(stepped.leaf, name, before)

    def between(verb: str, where: Any) -> None:
        nonlocal asked
        asked += verb == "states"
        if verb == "states" and asked == 2:
            asking.between = lambda verb, where: None
            resharded(leaf, name, before)

    asking.between = between
    assert index.states(name, some) == states


def test_one_that_comes_late_leaves_no_shards(leaf: RedisIndex, raw: Any) -> None:
    """Another one has come to its end while it waited."""
    name, _ = filled(ShardedIndex(leaf, shards=2), FEW)
    with pytest.raises(TransientError, match="run it again"):
        resharded(leaf, name, 8, wait=lambda seconds: resharded(leaf, name, 3) and None)
    (account,) = ShardedIndex(leaf).accounts()
    assert account.shards == 3
    assert {one.decode() for one in raw.smembers("kvs:ns")} == {name, *shard_names(name, account.layout)}


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_what_is_stored_again_is_not_discarded(leaf: RedisIndex, before: int, after: int) -> None:
    """A rebuild commits what was evicted, right before that is brought over."""
    name, _ = filled(ShardedIndex(leaf, shards=before), FEW)
    index, flaky, times = ShardedIndex(leaf), FlakyLeaf(leaf), 0
    segment = put(index, name, one := chain(2, seed="again"))
    index.evict(name, [segment], delete_after_s=0, rule="bad")
    engine = Engine(leaf, name)

    def again(verb: str, where: Any) -> None:
        nonlocal times
        if verb == "discard" and segment in {one for one, _ in flaky.calls[-1][1][1]}:
            put(ShardedIndex(leaf), name, one, segment=segment)
            times += 1

    flaky.between = again
    resharded(flaky, name, after)
    assert times == 1
    assert found(ShardedIndex(leaf), name, [one]) == [2]
    engine.check(ShardedIndex(leaf))
