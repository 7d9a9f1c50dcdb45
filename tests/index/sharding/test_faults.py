"""Shards that are down, lost or gone, and what happens in between."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations, count
from typing import Any

import pytest
import redis

from kvstore.breaker import Breaker
from kvstore.build import load_settings
from kvstore.errors import BreakerOpen, DamagedIndex, NamespaceUnknown, TransientError
from kvstore.events import EventReader, Gap
from kvstore.index.port import Claim, CommitState
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sharding.breakers import ShardBreakers
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sharding.layouts import LOOK_S
from kvstore.index.sharding.leaf import Layout, ShardLeaf
from kvstore.index.sharding.names import base_of, of_chain, shard_names
from kvstore.index.sharding.requests import ShardedRequests
from kvstore.index.sqlite.client import SqliteClient
from kvstore.index.sqlite.file import IndexMemory
from kvstore.keys import (
    NO_SALT,
    NamespaceId,
    PlaceId,
    SegmentId,
    canonical_json,
    chain_like,
    namespace_id,
    new_segment_id,
    session_id,
    writer_id,
)
from kvstore.metrics import Counters
from kvstore.store.housekeeping import Housekeeping
from schemas.namespace import Namespace
from schemas.settings import BreakerSettings, JournalSettings
from tests.index.contract.chains import CREATED_S, LATER_S, chain, namespace, put, record, served
from tests.index.memory import Memory
from tests.index.sharding.flaky import FlakyLeaf
from tests.servers.redis import PATIENT

SHARDS = 4
#: The shortest ring that settings allow.
RING = JournalSettings(events=1)


class Place:
    """Where leaves lie, and how one loses what it must not lose."""

    def __init__(self, url: str | None) -> None:
        self.url = url
        self.memory = Memory()

    def leaf(self, **options: Any) -> ShardLeaf:
        if self.url is None:
            return self.memory.open(**options)
        return RedisIndex.from_settings(self.url, PATIENT, **options)

    def lose_layout(self, name: NamespaceId) -> None:
        """As a node does that has lost its memory, and had nothing else of the namespace."""
        words = ("UNLINK", f"kvs:{{{name}}}:meta")
        if self.url is None:
            SqliteClient(IndexMemory.named(self.memory.name), time.time).command(*words)
        else:
            with redis.Redis.from_url(self.url, protocol=2) as client:
                client.execute_command(*words)


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.servers)])
def place(request: pytest.FixtureRequest) -> Place:
    url = request.getfixturevalue("redis_url") if request.param == "redis" else None
    return Place(url)


@pytest.fixture
def leaf(place: Place) -> Iterator[FlakyLeaf]:
    with place.leaf() as leaf:
        yield FlakyLeaf(leaf)


def sharded(leaf: Any, shards: int = SHARDS) -> ShardedIndex:
    return ShardedIndex(leaf, shards=shards)


def filled(index: ShardedIndex, number: int = 40) -> tuple[NamespaceId, dict[bytes, SegmentId]]:
    """A namespace with segments in all shards."""
    name = index.register(namespace(), expected_blocks=1000)
    chains = [chain(2, seed=str(seed)) for seed in range(number)]
    return name, {one: put(index, name, one) for one in chains}


class Clocked:
    """An engine's index behind breakers whose time is told."""

    def __init__(self, leaf: Any, shards: int) -> None:
        self.now = 0.0
        settings = BreakerSettings(failures=3, backoff_s=1.0, max_backoff_s=1.0)
        self.breakers = ShardBreakers(lambda name: Breaker(name, settings, lambda: self.now))
        self.index = ShardedRequests(
            leaf, shards=shards, guard=self.breakers.guard, monotonic=lambda: self.now
        )


# Down


@pytest.mark.parametrize("shards", [1, SHARDS])
def test_a_registration_that_fails_is_one_failure(leaf: FlakyLeaf, shards: int) -> None:
    """More of them would open the breaker of an index that has not answered once."""
    leaf.down.add(namespace_id(namespace()))
    with pytest.raises(TransientError):
        Clocked(leaf, shards).index.register(namespace(), expected_blocks=10)
    assert [verb for verb, _ in leaf.calls] == ["layout"]


@pytest.mark.parametrize("shards", [1, SHARDS])
@pytest.mark.parametrize("forgets", [False, True])
def test_who_only_saves_finds_out_that_the_index_is_back(
    leaf: FlakyLeaf, *, shards: int, forgets: bool
) -> None:
    """A worker process of an engine calls nothing that registers."""
    name = sharded(leaf, shards).register(namespace(), expected_blocks=100)
    engine = Clocked(leaf, shards)
    digests = chain(3)

    def claim() -> Claim:
        return engine.index.claim(name, digests, new_segment_id(digests), 5)

    if forgets:
        assert claim().granted
        engine.index._known = {}
    leaf.down = {name, *shard_names(name, shards)}
    for _ in range(5):
        with pytest.raises(TransientError):
            claim()
    with pytest.raises(BreakerOpen):
        claim()
    leaf.down = set()
    engine.now += 60
    assert claim().present == 0


def test_a_layout_that_can_not_be_told_is_asked_for_once_in_a_while(leaf: FlakyLeaf) -> None:
    name, chains = filled(sharded(leaf))
    engine = Clocked(leaf, SHARDS)
    one = next(iter(chains))
    assert served(engine.index.match(name, one)) == 2
    engine.now += LOOK_S
    leaf.down = {name}
    leaf.calls.clear()
    for _ in range(5):
        assert served(engine.index.match(name, one)) == 2
    assert [verb for verb, _ in leaf.calls] == ["layout", *5 * ["match"]]


def test_shards_are_found_to_be_back_while_what_lays_them_out_is_down(leaf: FlakyLeaf) -> None:
    name, chains = filled(sharded(leaf))
    engine = Clocked(leaf, SHARDS)
    engine.index.register(namespace(), expected_blocks=1000)
    one = next(iter(chains))
    leaf.down = {name, of_chain(shard_names(name, SHARDS), one)}
    for _ in range(4):
        with pytest.raises(TransientError):
            engine.index.match(name, one)
    leaf.down = {name}
    engine.now += 60
    with pytest.raises(BreakerOpen):
        engine.index.match(name, one)
    with pytest.raises(TransientError):
        engine.index.register(namespace(), expected_blocks=1000)
    assert served(engine.index.match(name, one)) == 2


def test_a_verdict_holds_though_a_shard_does_not_hear_of_it(leaf: FlakyLeaf) -> None:
    index = sharded(leaf)
    name, _ = filled(index)
    writer = writer_id("a start")
    leaf.down = {shard_names(name, SHARDS)[-1]}
    assert index.judge(name, writer, "differs", by=PlaceId(b"a place."), stands=True) == "failed"
    assert index.verdicts(name)[writer].state == "failed"


def test_an_erasure_is_made_up_for_with_its_time(leaf: FlakyLeaf) -> None:
    """A shard that was down when a salt was erased for the second time knew the first time."""
    index = sharded(leaf)
    name = index.register(namespace(), expected_blocks=100)
    index.forbid(name, NO_SALT)
    shards = shard_names(name, SHARDS)
    until = leaf.leaf.forbidden(name)[NO_SALT] + 1000
    for one in (name, *shards[1:]):
        leaf.leaf.forbid_until(one, NO_SALT, until)
    index.register(namespace(), expected_blocks=100)
    assert {leaf.leaf.forbidden(one)[NO_SALT] for one in shards} == {until}
    for seed in range(20):
        digests = chain(1, seed=str(seed))
        made = record(1, created_s=int(until))
        state = index.commit(name, new_segment_id(digests), digests, made, rank=0, ranks=1)
        assert state is CommitState.REFUSED
    leaf.calls.clear()
    index.register(namespace(), expected_blocks=100)
    assert "forbid_until" not in [verb for verb, _ in leaf.calls]


@pytest.mark.parametrize("down", range(SHARDS))
def test_what_is_too_old_goes_in_the_shards_that_answer(leaf: FlakyLeaf, down: int) -> None:
    index = sharded(leaf)
    name, chains = filled(index)
    shards = shard_names(name, SHARDS)
    leaf.down = {shards[down]}
    gone, after, steps = 0, "", 0
    while steps < 3 * SHARDS:
        some, after = index.age_out(name, 60, delete_after_s=LATER_S, after=after)
        gone, steps = gone + some, steps + 1
        if not after:
            break
    assert not after
    assert gone == sum(of_chain(shards, one) != shards[down] for one in chains)
    leaf.down = set(shards)
    with pytest.raises(TransientError):
        index.age_out(name, 60, delete_after_s=LATER_S)


def test_a_cull_is_of_the_shards_that_the_account_was_summed_of(leaf: FlakyLeaf) -> None:
    """What a shard holds that was down a moment ago is no excess of the others'."""
    index = sharded(leaf)
    name, chains = filled(index, 80)
    shards = shard_names(name, SHARDS)
    whole = index.usage(name)
    accounts = [one for one in leaf.leaf.accounts() if one.namespace != shards[0]]
    leaf.between = lambda verb, name: None
    seen: Any = leaf.leaf.reachable
    leaf.leaf.reachable = lambda: (accounts, TransientError("down"))  # type: ignore[method-assign]
    (account,), _ = index.reachable()
    leaf.leaf.reachable = seen  # type: ignore[method-assign]
    assert account.summed == shards[1:]
    assert account.usage.nbytes < whole.nbytes
    two = 2 * whole.nbytes // whole.segments
    gone = index.cull(
        name,
        keep_bytes=account.usage.nbytes - two,
        delete_after_s=LATER_S,
        limit=256,
        rule="capacity",
        among=account.summed,
    )
    assert len(gone) == 2
    kept = {chains[one] for one in chains if of_chain(shards, one) == shards[0]}
    assert not kept & set(gone)


def test_a_cull_looks_at_about_as_many_as_it_takes(leaf: FlakyLeaf) -> None:
    index = sharded(leaf, 8)
    name, _ = filled(index, 300)
    leaf.calls.clear()
    gone = index.cull(
        name, keep_bytes=0, delete_after_s=LATER_S, limit=64, rule="capacity", spare_from_s=LATER_S
    )
    assert len(gone) == 64
    assert sum(args[1] for verb, args in leaf.calls if verb == "order") <= 8 * 64


def test_a_cull_keeps_to_the_order_over_all_shards(leaf: FlakyLeaf) -> None:
    """Here all that goes first is in one shard, and the others have much that goes later."""
    index = sharded(leaf, 8)
    name, chains = filled(index, 800)
    shards = shard_names(name, 8)
    later = [segment for one, segment in chains.items() if of_chain(shards, one) != shards[3]]
    index.touch(name, later, CREATED_S + 86400)
    first = [one.segment for one in index.order(name, 64)]
    assert not set(first) & set(later)
    gone = index.cull(name, keep_bytes=0, delete_after_s=LATER_S, limit=64, rule="capacity")
    assert gone == first


def test_a_cull_goes_on_where_what_goes_first_is_fresh(leaf: FlakyLeaf) -> None:
    """Its orders are read further, up to where those that aren't begin, in whatever shard they are."""
    index = sharded(leaf, 8)
    name, _ = filled(index, 400)
    # One shard has only those that may go, and the others begin with those that may not.
    order = index.order(name, 1000)
    fresh = [one.segment for one in order[:350]]
    index.touch(name, fresh, CREATED_S + 86400)
    gone: list[SegmentId] = []
    while some := index.cull(
        name,
        keep_bytes=0,
        delete_after_s=LATER_S,
        limit=10,
        rule="capacity",
        spare_from_s=CREATED_S + 3600,
    ):
        gone += some
    assert set(gone) == {one.segment for one in order[350:]}


# Lost


@pytest.mark.parametrize("place", [pytest.param("redis", marks=pytest.mark.servers)], indirect=True)
def test_what_is_laid_out_nowhere_is_not_empty(place: Place) -> None:
    with place.leaf() as leaf:
        index = sharded(leaf)
        name, chains = filled(index)
        segments = list(chains.values())
        place.lose_layout(name)
        index = sharded(leaf, 8)
        assert set(index.states(name, segments)) == {"visible"}
        assert {one.segment for one in index.segments(name)} == set(segments)
        assert index.erase(name, 1000) == "in_use"
        assert index.namespaces() == {name: canonical_json(namespace())}
        (account,) = index.accounts()
        assert (account.usage.segments, account.shards, account.problem) == (len(chains), SHARDS, "")
        assert any("lays them out" in text for text in index.warnings())
        # To an engine it is a namespace that it doesn't know, which it registers.
        engine = ShardedRequests(leaf, shards=SHARDS)
        assert engine.match(name, next(iter(chains))) == []
        engine.register(namespace(), expected_blocks=1000)
        assert served(engine.match(name, next(iter(chains)))) == 2
        (account,) = index.accounts()
        assert (account.problem, account.usage.segments) == ("", len(chains))
        assert index.warnings() == leaf.warnings()


@pytest.mark.parametrize("asked", [1, 8])
def test_what_is_laid_out_nowhere_is_laid_out_as_its_shards_are(place: Place, asked: int) -> None:
    """Whatever the settings of who registers it first ask for."""
    with place.leaf() as leaf:
        name, chains = filled(sharded(leaf))
        place.lose_layout(name)
        index = sharded(leaf, asked)
        index.register(namespace(), expected_blocks=1000)
        (account,) = index.accounts()
        assert (account.shards, account.usage.segments, account.problem) == (SHARDS, len(chains), "")
        assert all(served(index.match(name, one)) == 2 for one in chains)


def test_what_may_be_laid_out_in_two_ways_is_damage(place: Place) -> None:
    with place.leaf() as leaf:
        index = sharded(leaf)
        name, chains = filled(index)
        place.lose_layout(name)
        # As a release did that took the settings' number whatever there was.
        leaf.lay_out(namespace(), expected_blocks=1000, layout="8")
        sharded(leaf, 8).register(namespace(), expected_blocks=1000)
        place.lose_layout(name)
        index = sharded(leaf)
        segments = list(chains.values())
        for ask in (
            lambda: index.states(name, segments),
            lambda: index.get(name, segments),
            lambda: list(index.segments(name)),
            lambda: index.reapable(name, None, 10),
            lambda: index.erase(name, 10),
        ):
            with pytest.raises(DamagedIndex, match="lays them out"):
                ask()
        (account,) = index.accounts()
        assert account.usage.segments == len(chains)
        assert "lays them out" in account.problem
        index.register(namespace(), expected_blocks=1000)
        assert set(index.states(name, segments)) == {"visible"}


@pytest.mark.servers
def test_what_is_neither_laid_out_nor_listed_is_not_empty(redis_url: str) -> None:
    """One node may have had both."""
    with sharded(RedisIndex.from_settings(redis_url, PATIENT)) as index:
        name, chains = filled(index)
        with redis.Redis.from_url(redis_url, protocol=2) as client:
            client.delete(f"kvs:{{{name}}}:meta", "kvs:ns")
        assert set(sharded(index.leaf).states(name, list(chains.values()))) == {"visible"}


@pytest.mark.servers
@pytest.mark.parametrize("shards", [None, b"", b"x", b"0", b"1", b"257"])
def test_a_number_that_can_not_be_is_told_by_the_names(redis_url: str, shards: bytes | None) -> None:
    with sharded(RedisIndex.from_settings(redis_url, PATIENT)) as index:
        name, chains = filled(index)
        with redis.Redis.from_url(redis_url, protocol=2) as client:
            client.hdel(f"kvs:{{{name}}}:meta", "shards")
            if shards is not None:
                client.hset(f"kvs:{{{name}}}:meta", "shards", shards)
        fresh, segments = sharded(index.leaf), list(chains.values())
        assert set(fresh.states(name, segments)) == {"visible"}
        (account,) = fresh.accounts()
        assert account.problem
        assert account.usage.segments == len(chains)
        fresh.register(namespace(), expected_blocks=1000)
        assert set(fresh.states(name, segments)) == {"visible"}
        (account,) = fresh.accounts()
        assert (account.problem, account.usage.segments) == ("", len(chains))


def test_another_layout_does_not_count_and_is_forgotten(place: Place) -> None:
    with place.leaf() as leaf:
        name, _ = filled(sharded(leaf))
        place.lose_layout(name)
        leaf.lay_out(namespace(), expected_blocks=1000, layout="8")
        index = sharded(leaf, 8)
        index.register(namespace(), expected_blocks=1000)
        again = put(index, name, chain(3, seed="again"))
        assert index.leaf.usage(shard_names(name, SHARDS)[0]).segments > 0
        (account,) = index.accounts()
        assert (account.usage.segments, account.shards, account.problem) == (1, 8, "")
        index.reconcile(name)
        assert not index._named(name) & set(shard_names(name, SHARDS))
        assert index.states(name, [again]) == ["visible"]

        place.lose_layout(name)
        leaf.lay_out(namespace(), expected_blocks=1000, layout="2")
        other = sharded(leaf, 2)
        other.register(namespace(), expected_blocks=1000)
        assert other.erase(name, 1000) == "erased"
        assert leaf.accounts() == []


@pytest.mark.parametrize("hot", range(SHARDS))
def test_a_hole_in_one_shard_is_a_gap(place: Place, hot: int) -> None:
    with place.leaf(journal=RING) as leaf:
        index = sharded(leaf)
        name, _ = filled(index)
        shards = shard_names(name, SHARDS)
        reader = EventReader(index, name)
        while reader.read():
            pass
        rising = [chain(1, seed=f"more {seed}") for seed in range(3000)]
        fitting = [one for one in rising if of_chain(shards, one) == shards[hot]]
        put(index, name, fitting[0])
        (event,) = reader.read()
        assert not isinstance(event, Gap)
        for one in fitting[1:300]:
            put(index, name, one)
        assert isinstance(reader.read(7)[0], Gap)
        while found := reader.read(7):
            assert not any(isinstance(one, Gap) for one in found)


def test_a_reader_of_small_pages_is_told_what_it_loses_in_a_shard_it_had_not_come_to(place: Place) -> None:
    with place.leaf(journal=RING) as leaf:
        index = sharded(leaf)
        name, _ = filled(index)
        shards = shard_names(name, SHARDS)
        reader = EventReader(index, name)
        while found := reader.read(3):
            assert not any(isinstance(one, Gap) for one in found)
        reader = EventReader(index, name)
        (first,) = reader.read(1)
        assert not isinstance(first, Gap)
        assert first.first is not None
        other = next(one for one in shards if one != of_chain(shards, first.first))
        for seed in range(3000):
            digests = chain(1, seed=f"more {seed}")
            if of_chain(shards, digests) == other:
                put(index, name, digests)
        assert isinstance(reader.read(1)[0], Gap)


# In between


def _tells_the_truth(leaf: Any, made: Namespace, digests: bytes) -> None:
    """What is served is accounted for, under whatever number it is registered next."""
    index = sharded(leaf, 8)
    name = index.register(made, expected_blocks=100)
    there = index.usage(name)
    assert (served(index.match(name, digests)) > 0) == (there.segments > 0)
    # Nor is anything where nobody looks.
    members = [one for one in leaf.accounts() if base_of(one.namespace) == name]
    assert sum(one.usage.segments for one in members) == there.segments
    (account,) = [one for one in index.accounts() if one.namespace == name]
    assert (account.usage, account.problem) == (there, "")
    gone = index.cull(name, keep_bytes=0, delete_after_s=0, limit=99, rule="capacity")
    assert len(gone) == there.segments


def _saves(engine: ShardedRequests, made: Namespace, digests: bytes) -> None:
    """As Space.registered does."""
    try:
        put(engine, namespace_id(made), digests)
    except NamespaceUnknown:
        engine.register(made, expected_blocks=100)
        put(engine, namespace_id(made), digests)


@pytest.mark.parametrize("step", range(16))
def test_an_engine_that_saves_while_a_namespace_is_erased(leaf: FlakyLeaf, step: int) -> None:
    engine, operator = ShardedRequests(leaf.leaf, shards=SHARDS), sharded(leaf, 8)
    name = engine.register(namespace(), expected_blocks=100)
    digests = chain(5)
    made = 0

    def between(verb: str, _name: Any) -> None:
        nonlocal made
        made += 1
        if made == step + 1:
            _saves(engine, namespace(), digests)

    leaf.between = between
    answer = operator.erase(name, 1000)
    leaf.between = lambda verb, name: None
    if made > step:
        assert served(engine.match(name, digests)) == 5
        if answer == "erased":
            # All of it came afterwards.
            assert served(sharded(leaf).match(name, digests)) == 5
    _tells_the_truth(leaf, namespace(), digests)


@pytest.mark.parametrize("step", range(16))
def test_a_namespace_that_is_erased_while_an_engine_registers(leaf: FlakyLeaf, step: int) -> None:
    operator, engine = sharded(leaf.leaf, 8), ShardedRequests(leaf, shards=SHARDS)
    name = operator.register(namespace(), expected_blocks=100)
    made = 0

    def between(verb: str, _name: Any) -> None:
        nonlocal made
        made += 1
        if made == step + 1:
            assert operator.erase(name, 1000) == "erased"

    leaf.between = between
    engine.register(namespace(), expected_blocks=100)
    leaf.between = lambda verb, name: None
    digests = chain(5)
    _saves(engine, namespace(), digests)
    assert served(sharded(leaf.leaf).match(name, digests)) == 5
    _tells_the_truth(leaf, namespace(), digests)


@pytest.mark.parametrize("begins", range(10))
def test_an_erase_that_begins_and_ends_in_the_middle_of_a_registration(leaf: FlakyLeaf, begins: int) -> None:
    """All but its last step is done before one of the engine's calls, and the last before a later one."""
    for ends in range(begins + 1, 14):
        made, steps = namespace(f"{begins} {ends}"), 0
        name = sharded(leaf.leaf).register(made, expected_blocks=100)
        inner = FlakyLeaf(leaf.leaf)
        inner.instead = {("erase", name): lambda: "erased"}
        operator, engine = sharded(inner, 8), ShardedRequests(leaf, shards=SHARDS)

        def between(_verb: str, _name: Any) -> None:
            nonlocal steps
            steps += 1
            if steps == begins + 1:
                operator.erase(name, 1000)
            if steps == ends + 1:
                leaf.leaf.erase(name, 1000)

        leaf.between = between
        engine.register(made, expected_blocks=100)
        _saves(engine, made, chain(5))
        leaf.between = lambda verb, name: None
        if steps <= ends:
            leaf.leaf.erase(name, 1000)
        assert served(sharded(leaf.leaf).match(name, chain(5))) == 5 or steps <= begins
        _tells_the_truth(leaf.leaf, made, chain(5))


def test_a_layout_that_changes_in_a_call_is_looked_at_once(leaf: FlakyLeaf) -> None:
    index = sharded(leaf)
    name, chains = filled(index)
    number, clock = 0, count()

    def layout(_namespace: NamespaceId) -> Layout:
        nonlocal number
        number += 1
        return Layout(str(SHARDS if number % 2 else 8))

    hasty = ShardedIndex(leaf, shards=SHARDS, monotonic=lambda: next(clock) * LOOK_S)  # type: ignore[arg-type]
    leaf.leaf.layout = layout  # type: ignore[method-assign]
    segments = list(chains.values())
    for _ in range(2):
        with pytest.raises(TransientError, match="try again"):
            hasty.states(name, segments)
        with suppress(NamespaceUnknown):
            hasty.session(name, session_id(NO_SALT, "one"), segments, CREATED_S)


def test_quotas_take_of_the_shards_that_they_have_seen(leaf: FlakyLeaf) -> None:
    """A node times out at the look at the accounts, and answers at the evictions."""
    index = sharded(leaf)
    name, _ = filled(index, 80)
    shards = shard_names(name, SHARDS)
    whole, away = index.usage(name), leaf.leaf.usage(shards[0])
    seen = whole.nbytes - away.nbytes
    leaf.reachable = lambda: (  # type: ignore[method-assign]
        [one for one in leaf.leaf.accounts() if one.namespace != shards[0]],
        TransientError("no answer"),
    )
    settings = load_settings({"payloads": "file:///nowhere", "capacity_bytes": seen - 1}, environ={})
    housekeeping = Housekeeping(index, None, settings, Counters(), lambda: LATER_S)  # type: ignore[arg-type]
    gone, _ = housekeeping.evict()
    assert 1 <= gone <= 3
    assert leaf.leaf.usage(shards[0]) == away


def test_who_knows_a_segment_looks_in_its_chain(leaf: FlakyLeaf) -> None:
    index = sharded(leaf)
    name, chains = filled(index)
    leaf.calls.clear()
    for digests, segment in chains.items():
        assert all(index.find(name, digests, chain_like(segment)))
    assert len(leaf.calls) == len(chains)
    (_, of_one), (other, _) = next(
        pair
        for pair in combinations(chains.items(), 2)
        if len({of_chain(shard_names(name, SHARDS), digests) for digests, _ in pair}) == 2
    )
    assert all(index.find(name, other))
    assert not any(index.find(name, other, chain_like(of_one)))
