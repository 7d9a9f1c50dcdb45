"""A namespace that is brought into another number of shards, and what others do meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from kvstore.errors import NamespaceUnknown
from kvstore.events import EventReader, Gap
from kvstore.index.port import CommitState
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sessions import Allowance, Hint
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sharding.layouts import LOOK_S, lease_of
from kvstore.index.sharding.names import shard_names
from kvstore.index.sharding.resharding import Moved
from kvstore.keys import NO_SALT, NamespaceId, SegmentId, new_segment_id, session_id
from tests.index.contract.chains import CREATED_S, LATER_S, chain, namespace, put, record
from tests.index.sharding.moving import (
    ALL,
    BANNED,
    FEW,
    SALT,
    STEPS,
    WAYS,
    Engine,
    Stepped,
    Stopped,
    everything,
    filled,
    found,
    resharded,
    some_steps,
    steps_of,
    stop,
)

pytestmark = pytest.mark.servers


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_what_there_is_is_there_after(leaf: RedisIndex, raw: Any, before: int, after: int) -> None:
    index = ShardedIndex(leaf, shards=before)
    name, chains = filled(index)
    kept = everything(index, name)
    assert (kept["usage"].segments, len(kept["due"]), len(kept["hot"])) == (70, 10, 40)
    moved = resharded(leaf, name, after)
    assert (moved.segments, moved.entries, moved.withdrawn, moved.unfindable) == (70, 140, 0, 0)

    index = ShardedIndex(leaf)
    assert everything(index, name) == kept
    assert index.accounts()[0].shards == after
    assert found(index, name, chains) == [4] * 30 + [2] * 10
    assert found(ShardedIndex(leaf, shards=after), name, chains) == [4] * 30 + [2] * 10
    banned = record(1, salt=BANNED, created_s=CREATED_S)
    one = chain(1, seed="banned")
    assert index.commit(name, new_segment_id(one), one, banned, rank=0, ranks=1) is CommitState.REFUSED
    # Nothing else is left, and nothing says that there was anything.
    assert index.warnings() == leaf.warnings()
    assert {one.decode() for one in raw.smembers("kvs:ns")} == {name, *shard_names(name, after)}
    tags = {key.decode().split("}")[0][5:] for key in raw.keys("kvs:{*")}
    assert tags == {name, *shard_names(name, after)}
    meta = raw.hgetall(f"kvs:{{{name}}}:meta")
    assert meta.keys().isdisjoint({b"to", b"from", b"run", b"sealed", b"aside_bits"})
    assert meta[b"schema"] == (b"2" if after == 1 else b"3")
    if after > 1:
        assert set(meta) == {b"schema", b"json", b"kind", b"tenant", b"created", b"seen", b"shards"}
    # It is as one that was registered so: nothing happens, and it can be removed.
    assert resharded(leaf, name, after) == Moved()
    put(index, name, chain(3, seed="later"))
    index.invalidate(name)
    while index.drain(name, delete_after_s=0, limit=1000):
        pass
    while due := index.reapable(name, None, 1000):
        index.reaped(name, [segment for segment, _ in due])
    assert index.erase(name, 100_000) == "erased"
    assert all(key.endswith(b":erased") for key in raw.keys("kvs:{*"))


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_who_is_stopped_anywhere_is_followed(
    leaf: RedisIndex, stepped: Stepped, raw: Any, before: int, after: int
) -> None:
    """Until then nobody has lost a hit, and once its lease has run out engines save again."""
    name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
    count = steps_of(stepped, name, after)
    for turn, step in enumerate(sorted({1, 2, 3, *some_steps(count), count - 1, count - 2})):
        raw.flushall()
        index = ShardedIndex(leaf, shards=before)
        name, chains = filled(index, FEW)
        kept = everything(index, name)
        if turn % 2:
            stepped.at(step, stop)
            with pytest.raises(Stopped):
                resharded(stepped.leaf, name, after)
        else:
            with stepped.killed(step=step):
                resharded(stepped.leaf, name, after)
            raw.delete(f"kvs:lease:{lease_of(name)}")
        fresh = ShardedIndex(leaf, shards=before)
        assert found(fresh, name, chains) == ALL, step
        (account,) = fresh.accounts()
        assert (account.usage, account.problem) == (kept["usage"], ""), step
        # Neither a registration nor upkeep gets into a muddle.
        fresh.register(namespace(), expected_blocks=1000)
        one = chain(3, seed=f"at {step}")
        segment = put(fresh, name, one)
        fresh.reconcile(name)
        assert fresh.erase(name, 1000) == "in_use"
        resharded(leaf, name, after)
        index = ShardedIndex(leaf)
        assert found(index, name, [one]) == [3], step
        index.unlist(name, [segment])
        while index.sweep(name, 1000):
            pass
        assert everything(index, name) == kept, step


def done(now: list[int], left: list[int], *, denied: bool) -> bool:
    """Tells whether what was to be left is left. What was denied was done in some shards."""
    if not denied:
        return now == left
    return all(one in (blocks, rest) for one, blocks, rest in zip(now, ALL, left, strict=True))


@pytest.mark.parametrize(("before", "after"), WAYS)
@pytest.mark.parametrize("knows", [True, False])
def test_engines_go_on_at_every_step(
    leaf: RedisIndex, stepped: Stepped, raw: Any, before: int, after: int, *, knows: bool
) -> None:
    """One that knows the old number, or one that looks at each step, matches, saves and evicts in between.
    While it is sealed it is told that it can't."""
    name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
    count = steps_of(stepped, name, after)
    refused = 0
    for step in some_steps(count):
        raw.flushall()
        name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
        engine = Engine(leaf, name)
        assert found(engine.index, name, chains) == ALL
        denied = False

        def work() -> None:
            nonlocal denied
            engine.now += 0.0 if knows else LOOK_S
            assert found(engine.index, name, chains) == ALL, step
            for seed in range(6):
                engine.save(chain(3, seed=f"at {step}: {seed}"))
            some = engine.segments(chains[:3])
            try:
                engine.index.evict(name, some, delete_after_s=LATER_S, rule="bad")
            except NamespaceUnknown:
                denied = True

        def wait(seconds: float) -> None:
            engine.now += LOOK_S

        stepped.at(step, work)
        resharded(stepped.leaf, name, after, wait=wait)
        refused += engine.refused
        index = ShardedIndex(leaf)
        assert found(index, name, engine.saved) == [3] * len(engine.saved), step
        assert done(found(index, name, chains), [0] * 3 + ALL[3:], denied=denied), step
        engine.check(index)
        engine.now += LOOK_S
        assert found(engine.index, name, engine.saved) == [3] * len(engine.saved), step
        assert engine.save(chain(3, seed="after")), step
    assert refused > 0


def _evict(engine: Engine, chains: list[bytes]) -> None:
    engine.tools.evict(engine.name, engine.segments(chains[:3]), delete_after_s=0, rule="bad")
    engine.reap()


def _cull(engine: Engine, chains: list[bytes]) -> None:
    keep = engine.tools.usage(engine.name).nbytes // 2
    engine.tools.cull(engine.name, keep_bytes=keep, delete_after_s=0, limit=100, rule="capacity")
    engine.reap()


def _invalidate(engine: Engine, chains: list[bytes]) -> None:
    engine.tools.invalidate(engine.name)
    while engine.tools.drain(engine.name, delete_after_s=0, limit=1000):
        pass
    engine.reap()


def _erase(engine: Engine, chains: list[bytes]) -> None:
    """As the command does: forbids, deletes at once what it finds, and forgets it."""
    engine.tools.forbid(engine.name, SALT)
    some = [one.segment for one in engine.tools.of_salt(engine.name, SALT)]
    engine.tools.evict(engine.name, some, delete_after_s=0, rule="erased")
    engine.reap()


def _unlist(engine: Engine, chains: list[bytes]) -> None:
    """As fsck does with what has lost its payload."""
    some = engine.segments(chains[:1])
    engine.tools.unlist(engine.name, some)
    engine.payloads.difference_update(some)


def _upkeep(engine: Engine, chains: list[bytes]) -> None:
    """As a janitor and fsck of another process do."""
    for _ in range(3):
        engine.tools.sweep(engine.name, 1000)
    engine.tools.reconcile(engine.name)
    engine.tools.age_out(engine.name, None, delete_after_s=0)
    engine.tools.expire(engine.name)


def _pin(engine: Engine, chains: list[bytes]) -> None:
    engine.tools.pin(engine.name, engine.segments(chains), most_bytes=1 << 40)


def _unpin(engine: Engine, chains: list[bytes]) -> None:
    engine.tools.unpin(engine.name, engine.segments(chains))


#: What others do, and what can be matched after it.
ACTIONS = [
    (_evict, [0] * 3 + ALL[3:]),
    (_cull, None),
    (_invalidate, [0] * FEW),
    (_erase, [2] * FEW),
    (_unlist, [0, *ALL[1:]]),
    (_upkeep, ALL),
    (_pin, ALL),
    (_unpin, ALL),
]


@pytest.mark.parametrize(("before", "after"), WAYS)
@pytest.mark.parametrize(("action", "left"), ACTIONS, ids=lambda one: getattr(one, "__name__", ""))
def test_what_is_done_meanwhile_is_done_or_refused(
    leaf: RedisIndex,
    stepped: Stepped,
    raw: Any,
    before: int,
    after: int,
    action: Callable[[Engine, list[bytes]], None],
    left: list[int] | None,
) -> None:
    """At any step, by who believes the old number; payloads are deleted at once, and leave no trash."""
    name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
    count = steps_of(stepped, name, after)
    times = 0
    for step in some_steps(count, STEPS // 2):
        raw.flushall()
        name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
        engine, denied = Engine(leaf, name), False
        assert found(engine.index, name, chains) == found(engine.tools, name, chains) == ALL

        def work() -> None:
            nonlocal denied
            try:
                action(engine, chains)
            except NamespaceUnknown:
                denied = True

        def wait(seconds: float) -> None:
            engine.now += LOOK_S

        stepped.at(step, work)
        resharded(stepped.leaf, name, after, wait=wait)
        index = ShardedIndex(leaf)
        engine.check(index)
        if action is _erase:
            # What was forbidden goes, whoever deletes it.
            assert found(index, name, chains) == left, step
        elif left is not None:
            assert done(found(index, name, chains), left, denied=denied), step
        if action in (_pin, _unpin) and not denied:
            pinned = {one.pinned for one in index.segments(name)}
            assert pinned == {action is _pin}, step
        times += not denied
    assert times > 0


def test_what_is_told_that_it_is_sealed_says_when_to_come_again(leaf: RedisIndex) -> None:
    name, chains = filled(ShardedIndex(leaf, shards=2), FEW)
    index = ShardedIndex(leaf)
    some = [run.segment for one in chains for run in index.match(name, one)]
    for shard in shard_names(name, 2):
        assert leaf.reshard(shard, "seal", run="some")
    for work in (
        lambda: index.evict(name, some, delete_after_s=0, rule="bad"),
        lambda: index.pin(name, some, most_bytes=1 << 40),
        lambda: index.unpin(name, some),
        lambda: index.unlist(name, some),
        lambda: index.invalidate(name),
    ):
        with pytest.raises(NamespaceUnknown, match="try again in some minutes"):
            work()
    assert index.cull(name, keep_bytes=0, delete_after_s=0, limit=100, rule="capacity") == []
    assert index.order(name, 100) == []
    assert index.age_out(name, 1, delete_after_s=0)[0] == 0
    assert found(index, name, chains) == ALL
    assert index.states(name, some) == ["visible"] * len(some)


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_what_is_retained_is_used_when_it_was(leaf: RedisIndex, raw: Any, before: int, after: int) -> None:
    """Its retention is not told after, so its place must not be that of its end."""
    index = ShardedIndex(leaf, shards=before)
    name = index.register(namespace(), expected_blocks=1000)
    one, session, much = chain(4), session_id(NO_SALT, "one"), Allowance(1 << 40, 1 << 40, 1 << 40)
    segment, now_s = new_segment_id(one), float(raw.time()[0])
    index.commit(name, segment, one, record(4), rank=0, ranks=1, session=session, allowance=much)
    told = index.session(name, session, [], now_s, Hint(retain_s=3600), allowance=much)
    assert told.segments == 1 and told.retained_bytes > 0
    assert index.order(name, 10)[0].used_s > now_s + 1800
    resharded(leaf, name, after)
    # The hint was a use of what is the session's own.
    assert now_s - 120 < ShardedIndex(leaf).order(name, 10)[0].used_s <= now_s


def test_another_number_undoes_what_was_begun(leaf: RedisIndex, stepped: Stepped, raw: Any) -> None:
    """Whether the undoing is stopped in turn, and whatever is sealed."""
    index = ShardedIndex(leaf, shards=2)
    name, _ = filled(index, FEW)
    kept = everything(index, name)
    for first, then in ((8, 4), (1, 4), (4, 1), (1, 2), (8, 2)):
        with stepped.killed(before="turn"):
            resharded(stepped.leaf, name, first, lease=False)
        assert [one.to for one in index.accounts()] == [first]
        assert any("is being brought into" in text for text in index.warnings())
        for verb in ("aside", "erase", "disarm", "undo"):
            with stepped.killed(before=verb):
                resharded(stepped.leaf, name, then, lease=False)
        resharded(leaf, name, then)
        index = ShardedIndex(leaf)
        assert everything(index, name) == kept
        assert {one.decode() for one in raw.smembers("kvs:ns")} == {name, *shard_names(name, then)}
        index.unlist(name, [put(index, name, chain(2))])
        while index.sweep(name, 1000):
            pass
        resharded(leaf, name, 2)
        index = ShardedIndex(leaf)


def test_what_was_left_of_another_number_is_dropped_before_it_is_filled(leaf: RedisIndex, raw: Any) -> None:
    name, chains = filled(ShardedIndex(leaf), FEW)
    for shard in shard_names(name, 8):
        leaf.register_shard(shard, namespace(), expected_blocks=100)
        put(leaf, shard, chain(2, seed=shard))
    leaf.reshard(shard_names(name, 8)[0], "aside")
    resharded(leaf, name, 8)
    index = ShardedIndex(leaf)
    assert found(index, name, chains) == ALL
    assert index.usage(name).segments == 2 * FEW - 2
    put(index, name, chain(3, seed="more"))


def test_ids_without_tags_are_counted_and_go_by_age(leaf: RedisIndex) -> None:
    index = ShardedIndex(leaf)
    name = index.register(namespace(), expected_blocks=100)
    for seed in range(20):
        one = chain(2, seed=str(seed))
        segment = SegmentId(new_segment_id(one)[:7] + bytes([one[13] ^ 0x80]))
        assert leaf.commit(name, segment, one, record(2), rank=0, ranks=1) is CommitState.VISIBLE
    assert resharded(leaf, name, 8).unfindable == 20
    index = ShardedIndex(leaf)
    assert found(index, name, [chain(2, seed="0")]) == [0]
    assert index.usage(name).segments == len(index.order(name, 100)) == 20
    # One shard has them all again.
    assert resharded(leaf, name, 1).unfindable == 0
    assert found(ShardedIndex(leaf), name, [chain(2, seed=str(seed)) for seed in range(20)]) == [2] * 20


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_readers_of_events_have_a_gap(leaf: RedisIndex, before: int, after: int) -> None:
    index = ShardedIndex(leaf, shards=before)
    name, _ = filled(index)
    reader = EventReader(index, name, after=None)
    resharded(leaf, name, after)
    reader._index = index = ShardedIndex(leaf)
    segments = {put(index, name, chain(2, seed=f"after {seed}")) for seed in range(20)}
    read = reader.read() + reader.read()
    assert isinstance(read[0], Gap)
    assert segments <= {one.segment for one in read if not isinstance(one, Gap)}


def test_one_that_is_gone_is_not_begun(leaf: RedisIndex) -> None:
    with pytest.raises(NamespaceUnknown):
        resharded(leaf, NamespaceId("0" * 16), 8)
    assert leaf.accounts() == []


def test_a_salt_of_none_is_no_salt(leaf: RedisIndex) -> None:
    """What is forbidden as a whole is not brought over either."""
    name, chains = filled(ShardedIndex(leaf))
    ShardedIndex(leaf).forbid(name, NO_SALT)
    resharded(leaf, name, 8)
    assert found(ShardedIndex(leaf), name, chains) == [0] * 40
