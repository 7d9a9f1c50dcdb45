"""A namespace that is brought into another number of shards, and what others do meanwhile."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.build import load_settings
from kvstore.errors import NamespaceUnknown
from kvstore.events import EventReader, Gap
from kvstore.index.ageing import Ageing
from kvstore.index.port import CommitState, Replaced
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sessions import Allowance, Hint
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sharding.layouts import LOOK_S
from kvstore.index.sharding.names import shard_names
from kvstore.index.sharding.requests import ShardedRequests
from kvstore.index.sharding.resharding import Moved
from kvstore.keys import NO_SALT, NamespaceId, PlaceId, SegmentId, WriterId, new_segment_id, session_id
from tests.index.contract.chains import CREATED_S, LATER_S, chain, namespace, put, record
from tests.index.sharding.flaky import FlakyLeaf
from tests.index.sharding.moving import (
    ALL,
    BANNED,
    FEW,
    SALT,
    STEPS,
    TTL_S,
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
    shards = shard_names(name, index.accounts()[0].layout)
    assert len(shards) == after
    assert {one.decode() for one in raw.smembers("kvs:ns")} == {name, *shards}
    tags = {key.decode().split("}")[0][5:] for key in raw.keys("kvs:{*")}
    assert tags == {name, *shards}
    meta = raw.hgetall(f"kvs:{{{name}}}:meta")
    assert set(meta) == {b"schema", b"json", b"kind", b"tenant", b"created", b"seen", b"shards"}
    assert meta[b"schema"] == b"3"
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
    """Nobody loses a hit by that, and engines save all the while."""
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


@pytest.mark.parametrize(("before", "after"), WAYS)
@pytest.mark.parametrize("knows", [True, False])
def test_engines_go_on_at_every_step(
    leaf: RedisIndex, stepped: Stepped, raw: Any, before: int, after: int, *, knows: bool
) -> None:
    """One that knows the old number, or one that looks at each step, matches, saves and evicts in between.
    What it saves is there after, or a miss."""
    name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
    count = steps_of(stepped, name, after)
    misses = 0
    for step in some_steps(count):
        raw.flushall()
        name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
        engine = Engine(leaf, name)
        assert found(engine.index, name, chains) == ALL

        def work() -> None:
            engine.now += 0.0 if knows else LOOK_S
            assert found(engine.index, name, chains) == ALL, step
            for seed in range(6):
                engine.save(chain(3, seed=f"at {step}: {seed}"))
            some = engine.segments(chains[:3])
            engine.index.evict(name, some, delete_after_s=LATER_S, rule="bad")

        def wait(seconds: float) -> None:
            engine.now += LOOK_S

        stepped.at(step, work)
        resharded(stepped.leaf, name, after, wait=wait)
        index = ShardedIndex(leaf)
        there = found(index, name, list(engine.saved))
        assert len(there) == 6 and set(there) <= {0, 3}, step
        misses += there.count(0)
        assert found(index, name, chains) == [0] * 3 + ALL[3:], step
        engine.check(index)
        engine.now += LOOK_S
        assert found(engine.index, name, list(engine.saved)) == there, step
        assert engine.save(chain(3, seed="after")), step
        assert found(engine.index, name, [chain(3, seed="after")]) == [3], step
    assert misses > 0


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


def _join(engine: Engine, chains: list[bytes]) -> None:
    """As an engine does that saves more of a chain: its last segments become one, which may be missed."""
    for one in chains[:3]:
        olds = [run.segment for run in engine.index.match(engine.name, one) if run.start == 2]
        rest = chain(2, seed="more", after=one)[32:]
        made = record(4, depth=2, salt=SALT, created_s=CREATED_S)
        replaces = [Replaced(old, one[32:]) for old in olds]
        segment = new_segment_id(one)
        state = engine.index.commit(engine.name, segment, rest, made, rank=0, ranks=1, replaces=replaces)
        assert state is CommitState.VISIBLE
        engine.payloads.add(segment)
        engine.strays.add(segment)
    engine.reap()


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
    (_join, None),
]


@pytest.mark.parametrize(("before", "after"), WAYS)
@pytest.mark.parametrize(("action", "left"), ACTIONS, ids=lambda one: getattr(one, "__name__", ""))
def test_what_is_done_meanwhile_is_done(
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
    for step in some_steps(count, STEPS // 2):
        raw.flushall()
        name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
        engine = Engine(leaf, name)
        assert found(engine.index, name, chains) == found(engine.tools, name, chains) == ALL

        def work() -> None:
            action(engine, chains)

        def wait(seconds: float) -> None:
            engine.now += LOOK_S

        stepped.at(step, work)
        resharded(stepped.leaf, name, after, wait=wait)
        index = ShardedIndex(leaf)
        engine.check(index)
        if left is not None:
            assert found(index, name, chains) == left, step
        if action is _join:
            assert {2, 4} >= set(found(index, name, chains[:3])), step
        if action in (_pin, _unpin):
            pinned = {one.pinned for one in index.segments(name)}
            assert pinned == {action is _pin}, step


@pytest.mark.parametrize("when", ["second round", "turn"])
@pytest.mark.parametrize("verb", ["cull", "join"])
def test_what_could_not_be_told_to_the_new_shards_is_taken_out(
    leaf: RedisIndex, stepped: Stepped, raw: Any, when: str, verb: str
) -> None:
    """Somebody evicts and replaces while only the new shards are down for them. What is replaced leaves no
    hole if a round follows."""
    name, chains = filled(ShardedIndex(leaf, shards=8), FEW)
    enters = 0

    def count() -> None:
        nonlocal enters
        enters += stepped.last == "enter"

    stepped.between = count
    resharded(stepped.leaf, name, 2)
    raw.flushall()
    name, chains = filled(ShardedIndex(leaf, shards=8), FEW)
    engine = Engine(leaf, name)
    # Two rounds have equally many.
    last, enters = enters if when == "turn" else enters // 2, 0

    def work() -> None:
        (account,) = ShardedIndex(leaf).accounts()
        flaky = FlakyLeaf(leaf)
        flaky.down.update(shard_names(name, account.to))
        engine.index = ShardedRequests(flaky)
        engine.tools = ShardedIndex(flaky)
        (_join if verb == "join" else _cull)(engine, chains)

    def between() -> None:
        count()
        if enters == last:
            stepped.between = lambda: None
            work()

    stepped.between = between
    resharded(stepped.leaf, name, 2)
    index = ShardedIndex(leaf)
    engine.check(index)
    if verb == "join" and when == "second round":
        assert found(index, name, chains[:3]) == [4] * 3


def test_what_a_commit_replaces_goes_from_what_is_filled(leaf: RedisIndex, stepped: Stepped) -> None:
    name, chains = filled(ShardedIndex(leaf, shards=8), FEW)
    with stepped.killed(before="turn"):
        resharded(stepped.leaf, name, 2)
    engine = Engine(leaf, name)
    olds = {run.segment for one in chains[:3] for run in engine.index.match(name, one) if run.start == 2}
    (account,) = ShardedIndex(leaf).accounts()
    news = shard_names(name, account.to)

    def there() -> set[SegmentId]:
        return {one.segment for new in news for one in leaf.segments(new)}

    assert len(olds) == 3 and olds <= there()
    _join(engine, chains)
    assert not olds & there()


@pytest.mark.parametrize(("before", "after"), WAYS)
@pytest.mark.parametrize("when", ["", "register", "adopt", "turn"])
def test_a_writer_that_has_failed_is_refused_after(
    leaf: RedisIndex, stepped: Stepped, raw: Any, before: int, after: int, when: str
) -> None:
    """It was found out before, or meanwhile. Nothing of that is left in the shards before."""
    index = ShardedIndex(leaf, shards=before)
    name, _ = filled(index, FEW)
    one = chain(2, seed="late")
    late = dataclasses.replace(record(2), writer=b"a writer")

    def judge() -> None:
        ShardedIndex(leaf).judge(name, WriterId(b"a writer"), "differs", by=PlaceId(b"somebody"), stands=True)

    if when:
        stepped.before(when, judge)
    else:
        judge()
    resharded(stepped.leaf, name, after)
    index = ShardedIndex(leaf)
    shards = shard_names(name, index.accounts()[0].layout)
    for shard in shards:
        # Even where nobody asks for the verdict before.
        assert leaf.commit(shard, new_segment_id(one), one, late, rank=0, ranks=1) is CommitState.REFUSED
    assert {key.decode().split("}")[0][5:] for key in raw.keys("kvs:{*:writers")} == {name, *shards}


@pytest.mark.parametrize(("before", "after"), [(8, 1), (1, 8)])
def test_a_pass_by_age_begins_anew(leaf: RedisIndex, before: int, after: int) -> None:
    """It was under way before, and goes through all shards that there are then."""
    name, _ = filled(ShardedIndex(leaf, shards=before), FEW * 100)
    index = ShardedIndex(leaf)
    _, place = index.age_out(name, TTL_S, delete_after_s=LATER_S)
    assert place
    resharded(leaf, name, after)
    index, gone = ShardedIndex(leaf), 0
    segments = index.usage(name).segments
    while place:
        # All are too old for this.
        some, place = index.age_out(name, 1, delete_after_s=LATER_S, after=place)
        gone += some
    assert (gone, index.usage(name).segments) == (segments, 0)


def test_a_pass_by_age_whose_place_makes_no_sense_begins_anew(leaf: RedisIndex, tmp_path: Path) -> None:
    index = ShardedIndex(leaf)
    name, _ = filled(index, FEW)
    tree = {"payloads": f"file://{tmp_path}", "eviction": {"ttl_s": TTL_S}}
    ageing = Ageing(index, load_settings(tree, environ={}), time.time)

    def damaged() -> set[NamespaceId]:
        ageing.round(index.accounts(), lambda: True, lambda: None)
        return set(ageing.damaged)

    assert not damaged()
    ageing._passes[name].after, ageing._passes[name].done_s = "nonsense", None
    assert damaged() == {name}
    assert not damaged()


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_what_is_retained_stays_so(leaf: RedisIndex, raw: Any, before: int, after: int) -> None:
    index = ShardedIndex(leaf, shards=before)
    name = index.register(namespace(), expected_blocks=1000)
    one, session, much = chain(4), session_id(NO_SALT, "one"), Allowance(1 << 40, 1 << 40, 1 << 40)
    segment, now_s = new_segment_id(one), float(raw.time()[0])
    index.commit(name, segment, one, record(4), rank=0, ranks=1, session=session, allowance=much)
    told = index.session(name, session, [], now_s, Hint(retain_s=3600), allowance=much)
    assert told.segments == 1 and told.retained_bytes > 0
    assert index.order(name, 10)[0].used_s > now_s + 1800
    held, order = index.retained(name), index.order(name, 10)
    assert held == {NO_SALT: told.retained_bytes}
    resharded(leaf, name, after)
    index = ShardedIndex(leaf)
    assert (index.retained(name), index.order(name, 10)) == (held, order)
    index.evict(name, [segment], delete_after_s=LATER_S, rule="bad")
    assert index.retained(name) == {}


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
