"""A namespace that is brought into another number of shards, and what others do meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from kvstore.conformance.index.chains import CREATED_S, LATER_S, chain, namespace, put, record, served
from kvstore.errors import NamespaceUnknown, TransientError
from kvstore.events import EventReader, Gap
from kvstore.index.port import CommitState
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sharding.layouts import LOOK_S
from kvstore.index.sharding.names import shard_names
from kvstore.index.sharding.requests import ShardedRequests
from kvstore.index.sharding.resharding import Moved, Resharding
from kvstore.keys import NO_SALT, NamespaceId, SaltId, SegmentId, new_segment_id
from tests.index.sharding.flaky import FlakyLeaf
from tests.servers.redis import PATIENT

pytestmark = pytest.mark.servers

WAYS = [(1, 8), (8, 2), (8, 1), (2, 8)]
SALT = SaltId(b"salt" * 4)
BANNED = SaltId(b"bans" * 4)
#: Long before anything was created, and by the server's clock.
TTL_S = 400 * 86_400 * 100


@pytest.fixture
def raw(redis_url: str) -> Iterator[Any]:
    with redis.Redis.from_url(redis_url, protocol=2) as client:
        yield client


@pytest.fixture
def leaf(redis_url: str) -> Iterator[RedisIndex]:
    with RedisIndex.from_settings(redis_url, PATIENT) as leaf:
        yield leaf


def resharded(
    leaf: Any, name: NamespaceId, shards: int, *, wait: Callable[[float], None] = lambda seconds: None
) -> Moved:
    return Resharding(
        ShardedIndex(leaf),
        leaf,
        namespace(),
        name,
        shards,
        expected_blocks=1000,
        is_stored=lambda segment, ranks: True,
        wait=wait,
    ).run()


def everything(index: ShardedIndex, name: NamespaceId) -> dict[str, Any]:
    """All that a reshard keeps."""
    listed = {one.segment: one for one in index.segments(name)}
    due = index.reapable(name, LATER_S * 2, 1000)
    (account,) = index.accounts()
    return {
        "listed": listed,
        "usage": index.usage(name),
        "account": (account.usage, account.trashed, account.ttl_s, account.problem),
        "order": [one.segment for one in index.order(name, 1000)],
        "entries": sorted((one.digest, one.segment, one.slot) for one in index.entries(name)),
        "due": sorted(due),
        "held": index.holdings(name, 0),
        "of salt": {one.segment for one in index.of_salt(name, SALT)},
        "hot": sorted(index.hottest(name, 100)),
        "forbidden": index.forbidden(name),
        "unlisted": index.reconcile(name).mended,
    }


def filled(index: ShardedIndex, number: int = 40) -> tuple[NamespaceId, list[bytes]]:
    """A namespace with some of everything; its chains that can be matched."""
    name = index.register(namespace(), expected_blocks=1000)
    index.forbid(name, BANNED)
    chains = [chain(4, seed=str(seed)) for seed in range(number)]
    made = []
    for one in chains:
        first = put(index, name, one[:32])
        salted = record(2, depth=2, salt=SALT, created_s=CREATED_S)
        second = new_segment_id(one)
        assert index.commit(name, second, one[32:], salted, rank=0, ranks=1) is CommitState.VISIBLE
        made.append((first, second))
    for turn, (first, second) in enumerate(made):
        index.touch(name, [first, second], CREATED_S + 86_400 + 7200 * (turn * 7 % 40))
    index.pin(name, [first for first, _ in made[:5]], most_bytes=1 << 40)
    index.age_out(name, TTL_S, delete_after_s=LATER_S)
    index.evict(name, [second for _, second in made[-number // 4 :]], delete_after_s=LATER_S, rule="admin")
    while index.sweep(name, 1000):
        pass
    return name, chains


def found(index: Any, name: NamespaceId, chains: list[bytes]) -> list[int]:
    return [served(index.match(name, one)) for one in chains]


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_what_there_is_is_there_after(leaf: RedisIndex, raw: Any, before: int, after: int) -> None:
    index = ShardedIndex(leaf, shards=before)
    name, chains = filled(index)
    kept = everything(index, name)
    assert (kept["usage"].segments, len(kept["due"]), len(kept["hot"])) == (70, 10, 40)
    moved = resharded(leaf, name, after)
    assert (moved.segments, moved.entries, moved.late, moved.unfindable) == (70, 140, 0, 0)

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
    assert meta.keys().isdisjoint({b"to", b"from", b"aside_bits"})
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


class Stopped(Exception):
    """Somebody was killed."""


#: Chains of a namespace that is brought elsewhere many times, and what can be matched of them.
FEW = 8
ALL = [4] * 6 + [2] * 2
#: About at so many of its steps something else happens.
STEPS = 24


def calls_of(leaf: Any, name: NamespaceId, after: int) -> int:
    """How many calls a reshard takes."""
    flaky = FlakyLeaf(leaf)
    resharded(flaky, name, after)
    return len(flaky.calls)


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_who_is_stopped_anywhere_is_followed(leaf: RedisIndex, raw: Any, before: int, after: int) -> None:
    """And until then nobody has lost a hit."""
    count = 0
    for step in range(1, 1 << 30):
        raw.flushall()
        index = ShardedIndex(leaf, shards=before)
        name, chains = filled(index, FEW)
        kept, flaky = everything(index, name), FlakyLeaf(leaf)
        calls = 0
        at = step if step < 10 else step * count // STEPS

        def stop(verb: str, where: Any) -> None:
            nonlocal calls
            calls += 1
            if at <= calls:
                raise Stopped

        if step == 1:
            count = calls_of(leaf, name, after)
            continue
        if at > count:
            break
        flaky.between = stop
        with pytest.raises(Stopped):
            resharded(flaky, name, after)
        fresh = ShardedIndex(leaf, shards=before)
        assert found(fresh, name, chains) == ALL, step
        (account,) = fresh.accounts()
        assert (account.usage, account.problem) == (kept["usage"], ""), step
        # Neither a registration nor upkeep gets into a muddle.
        fresh.register(namespace(), expected_blocks=1000)
        fresh.reconcile(name)
        assert fresh.erase(name, 1000) == "in_use"
        resharded(leaf, name, after)
        assert everything(ShardedIndex(leaf), name) == kept, step


class Engine:
    """One that believes what it knew before for as long as it may, and does a bit of everything."""

    def __init__(self, leaf: Any, name: NamespaceId) -> None:
        self.now = 0.0
        self.index = ShardedRequests(leaf, monotonic=lambda: self.now)
        self.name = name
        self.saved: list[bytes] = []
        self.refused = 0

    def save(self, one: bytes) -> SegmentId | None:
        """As a store does: who is told that the namespace is unknown registers it."""
        segment = new_segment_id(one)
        for _ in range(2):
            try:
                state = self.index.commit(self.name, segment, one, record(len(one) // 16), rank=0, ranks=1)
            except NamespaceUnknown:
                self.refused += 1
                self.index.register(namespace(), expected_blocks=1000)
            else:
                assert state is CommitState.VISIBLE
                self.saved.append(one)
                return segment
        return None


@pytest.mark.parametrize(("before", "after"), WAYS)
@pytest.mark.parametrize("knows", [True, False])
def test_engines_go_on_at_every_step(
    leaf: RedisIndex, raw: Any, before: int, after: int, *, knows: bool
) -> None:
    """One that knows the old number, or one that looks at each step, saves, evicts and matches in between."""
    name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
    count = calls_of(leaf, name, after)
    refused = 0
    for step in range(0, count, max(1, count // STEPS)):
        raw.flushall()
        name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
        engine, flaky = Engine(leaf, name), FlakyLeaf(leaf)
        assert found(engine.index, name, chains) == ALL
        calls = 0

        def between(verb: str, where: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == step + 1:
                engine.now += 0.0 if knows else LOOK_S
                assert found(engine.index, name, chains) == ALL, step
                for seed in range(6):
                    assert engine.save(chain(3, seed=f"at {step}: {seed}"))
                gone = [run.segment for one in chains[:3] for run in engine.index.match(name, one)]
                engine.index.evict(name, gone, delete_after_s=LATER_S, rule="bad")

        def wait(seconds: float) -> None:
            engine.now += LOOK_S

        flaky.between = between
        resharded(flaky, name, after, wait=wait)
        refused += engine.refused
        index = ShardedIndex(leaf)
        assert found(index, name, engine.saved) == [3] * 6, step
        assert found(index, name, chains) == [0] * 3 + ALL[3:], step
        assert index.usage(name).segments == 2 * FEW - 2, step
        assert len(index.reapable(name, LATER_S * 2, 1000)) == 2 + 6, step
        reconciled = index.reconcile(name)
        assert reconciled.counted == reconciled.recorded, step
        engine.now += LOOK_S
        assert found(engine.index, name, engine.saved) == [3] * 6, step
    assert (refused > 0) == knows


@pytest.mark.parametrize(("before", "after"), WAYS)
def test_what_is_invalidated_or_erased_meanwhile_stays_so(
    leaf: RedisIndex, raw: Any, before: int, after: int
) -> None:
    def invalidate(index: ShardedIndex, name: NamespaceId) -> None:
        index.invalidate(name)

    def erase(index: ShardedIndex, name: NamespaceId) -> None:
        """As the command does: forbids, deletes at once what it finds, and forgets it."""
        index.forbid(name, SALT)
        some = [one.segment for one in index.of_salt(name, SALT)]
        index.evict(name, some, delete_after_s=0, rule="erased")
        index.reaped(name, some)

    name, _ = filled(ShardedIndex(leaf, shards=before), FEW)
    count = calls_of(leaf, name, after)
    for action, left in ((invalidate, 0), (erase, 2)):
        for step in range(0, count, max(1, count // STEPS)):
            raw.flushall()
            name, chains = filled(ShardedIndex(leaf, shards=before), FEW)
            operator, flaky = ShardedIndex(leaf), FlakyLeaf(leaf)
            found(operator, name, chains)
            calls = 0

            def between(verb: str, where: Any) -> None:
                nonlocal calls
                calls += 1
                if calls == step + 1:
                    action(operator, name)

            flaky.between = between
            resharded(flaky, name, after)
            assert found(ShardedIndex(leaf), name, chains) == [left] * FEW, (action.__name__, step)


def test_another_number_undoes_what_was_begun(leaf: RedisIndex, raw: Any) -> None:
    index = ShardedIndex(leaf, shards=2)
    name, _ = filled(index)
    kept = everything(index, name)
    for first, then in ((8, 4), (1, 4), (4, 1), (1, 2), (8, 2)):
        flaky = FlakyLeaf(leaf)

        def turned(verb: str, where: Any) -> None:
            if verb == "reshard" and where == name and flaky.calls[-1][1][1] == "turn":
                raise Stopped

        flaky.between = turned
        with pytest.raises(Stopped):
            resharded(flaky, name, first)
        assert [one.to for one in index.accounts()] == [first]
        assert any("is being brought into" in text for text in index.warnings())
        resharded(leaf, name, then)
        assert everything(ShardedIndex(leaf), name) == kept
        assert {one.decode() for one in raw.smembers("kvs:ns")} == {name, *shard_names(name, then)}
        resharded(leaf, name, 2)
        index = ShardedIndex(leaf)


def test_an_undoing_that_was_stopped_leaves_nothing_that_takes_nothing(leaf: RedisIndex) -> None:
    """Shards that were put aside, and are built again."""
    name, chains = filled(ShardedIndex(leaf))
    for shard in shard_names(name, 8):
        leaf.register_shard(shard, namespace(), expected_blocks=100)
        leaf.reshard(shard, "seal", 0, 0)
    resharded(leaf, name, 8)
    index = ShardedIndex(leaf)
    assert found(index, name, chains) == [4] * 30 + [2] * 10
    put(index, name, chain(3, seed="more"))


def test_what_was_evicted_long_after_the_turn_does_not_come_back(leaf: RedisIndex) -> None:
    """Who turned was killed, and somebody goes on days later."""
    name, chains = filled(ShardedIndex(leaf, shards=8))
    flaky = FlakyLeaf(leaf)

    def stop(verb: str, where: Any) -> None:
        if verb == "reshard" and flaky.calls[-1][1][1] == "seal":
            raise Stopped

    flaky.between = stop
    with pytest.raises(Stopped):
        resharded(flaky, name, 2)
    index = ShardedIndex(leaf)
    gone = [run.segment for one in chains for run in index.match(name, one)]
    stored = set(gone[1:])
    index.evict(name, gone, delete_after_s=0, rule="capacity")
    index.reaped(name, gone)
    put(index, name, chain(3, seed="new"))
    # One whose payloads are there was never known after.
    moved = Resharding(
        index,
        leaf,
        namespace(),
        name,
        2,
        expected_blocks=1000,
        is_stored=lambda segment, ranks: segment not in stored,
        wait=lambda seconds: None,
    ).run()
    assert (moved.late, moved.missing) == (1, len(stored))
    assert index.usage(name).segments == 2


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


def test_two_do_not_do_it_at_once(leaf: RedisIndex) -> None:
    name, _ = filled(ShardedIndex(leaf, shards=2))
    flaky = FlakyLeaf(leaf)

    def other(verb: str, where: Any) -> None:
        if verb == "reshard" and flaky.calls[-1][1][1] == "turn":
            flaky.between = lambda verb, where: None
            resharded(leaf, name, 4)

    flaky.between = other
    with pytest.raises(TransientError, match="run it again"):
        resharded(flaky, name, 8)
    assert ShardedIndex(leaf).accounts()[0].shards == 4
    assert resharded(leaf, name, 8).segments == 70


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


def test_what_is_evicted_and_deleted_while_it_is_copied_is_not_brought_over(leaf: RedisIndex) -> None:
    """No trash tells of it any more when the namespace turns."""
    name, chains = filled(ShardedIndex(leaf, shards=2), FEW)
    operator, flaky = ShardedIndex(leaf), FlakyLeaf(leaf)

    def between(verb: str, where: Any) -> None:
        if verb == "enter":
            gone = [run.segment for one in chains[:3] for run in operator.match(name, one)]
            operator.evict(name, gone, delete_after_s=0, rule="bad")
            operator.reaped(name, gone)

    flaky.between = between
    assert resharded(flaky, name, 8).withdrawn == 6
    assert found(ShardedIndex(leaf), name, chains) == [0] * 3 + ALL[3:]


def test_a_shard_that_is_left_does_not_begin_anew(leaf: RedisIndex) -> None:
    """Whoever registers it knew the number before."""
    name, chains = filled(ShardedIndex(leaf, shards=2), FEW)
    for shard in shard_names(name, 2):
        before = leaf.usage(shard)
        leaf.reshard(shard, "seal", 0, 0)
        leaf.register_shard(shard, namespace(), expected_blocks=100)
        assert leaf.usage(shard) == before
        with pytest.raises(NamespaceUnknown):
            leaf.claim(shard, chains[0], new_segment_id(chains[0]), 1.0)
    assert found(ShardedIndex(leaf), name, chains) == ALL
