"""Which segments go: the plan against an oracle, on real indexes, with several namespaces and quotas."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from math import floor, log2
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.build import load_settings, open_index
from kvstore.index.contract import QUARTER_S, UNUSED_S
from kvstore.index.eviction import Holder, Scope, ghost_bytes, ghost_step, plan, watermarks, worth
from kvstore.index.maintenance import Candidate, FullIndex
from kvstore.index.port import EngineIndex
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.keys import NamespaceId, SegmentId, new_segment_id
from kvstore.metrics import Counters
from kvstore.store.housekeeping import Housekeeping
from schemas.namespace import Namespace
from schemas.records import PartRecord, SegmentRecord, rounded_cost
from schemas.settings import Settings
from tests.index.contract.chains import chain, namespace

NOW_S = 1_790_000_000 // 60 * 60.0
GIB = 1 << 30
MINUTE = 60


# Pure


@pytest.mark.parametrize(
    ("cost_us", "nbytes", "expected"),
    [
        (0, 1024, 0),
        (1023, 1 << 20, 0),
        (1024, 1 << 20, 1),
        (3 * 1024, 1 << 20, 2),
        (10**12, 1024, 15),
        (5, 0, 0),
    ],
)
def test_worth(cost_us: int, nbytes: int, expected: int) -> None:
    """A doubling of the microseconds per KiB is worth one more, up to fifteen."""
    assert worth(cost_us, nbytes) == expected


@pytest.mark.parametrize(
    ("quota", "high", "low"),
    [
        (1, 1, 1),
        (99, 99, 99),
        (100, 99, 98),
        (GIB, GIB - GIB // 100, GIB - 2 * (GIB // 100)),
        (100 * GIB, 99 * GIB, 98 * GIB),
        (101 * GIB, 100 * GIB, 99 * GIB),
        (10 << 40, (10 << 40) - GIB, (10 << 40) - 2 * GIB),
        # No bytes are lost to a float's 53 bits.
        ((1 << 60) + 1, (1 << 60) + 1 - GIB, (1 << 60) + 1 - 2 * GIB),
    ],
)
def test_the_room_is_a_matter_of_bytes_in_large_quotas(quota: int, high: int, low: int) -> None:
    assert watermarks(quota) == (high, low)


def test_ghost_steps_are_a_fourth_root_of_two_apart() -> None:
    assert ghost_step(0) == ghost_step(1) == ghost_step(1 << 26) == 0
    assert ghost_step((1 << 26) + 1) == 1
    assert ghost_step(1 << 30) == 16
    assert ghost_bytes(16) == 1 << 30
    for step in range(1, 80):
        assert ghost_step(ghost_bytes(step) - 1) == step
        assert ghost_step(ghost_bytes(step) + 1) == step + 1


times = st.integers(0, 12).map(lambda minutes: NOW_S - MINUTE * minutes)
candidates = st.builds(
    Candidate, st.binary(min_size=8, max_size=8).map(SegmentId), st.integers(1, 9), times, times
)


@given(
    orders=st.lists(st.lists(candidates, max_size=8), max_size=4),
    shifts=st.lists(st.sampled_from([0.0, 600.0, 1200.0]), min_size=4, max_size=4),
    excess=st.integers(0, 60),
    spare=st.none() | times,
)
def test_a_plan_takes_the_first_of_all_orders(
    orders: list[list[Candidate]], shifts: list[float], excess: int, spare: float | None
) -> None:
    holders = [
        Holder(NamespaceId(f"{i:016x}"), shift, sorted(order, key=lambda c: c.keep_s), False)
        for i, (order, shift) in enumerate(zip(orders, shifts, strict=False))
    ]
    everything = sorted(
        (one.keep_s + holder.shift_s, number, place, one.nbytes)
        for number, holder in enumerate(holders)
        for place, one in enumerate(holder.first)
        if spare is None or one.used_s < spare
    )
    expected: dict[str, int] = {}
    for _, number, _, nbytes in everything:
        if sum(expected.values()) >= excess:
            break
        name = holders[number].namespace
        expected[name] = expected.get(name, 0) + nbytes
    assert plan(holders, excess, spare_from_s=spare) == expected


def test_a_plan_ends_where_it_knows_no_more() -> None:
    """Behind the last that is known there may be one that goes before everybody else's next."""
    old, new = (Candidate(SegmentId(b"x" * 8), 10, at, at) for at in (NOW_S - 600, NOW_S - 60))
    holders = [
        Holder(NamespaceId("a" * 16), 0.0, [old], True),
        Holder(NamespaceId("b" * 16), 0.0, [new], False),
    ]
    assert plan(holders, 50, spare_from_s=None) == {"a" * 16: 10}


def test_what_is_spared_does_not_spare_what_others_used_long_ago() -> None:
    """All that is known of one namespace is fresh, and goes first by its worth alone."""
    fresh, old = (Candidate(SegmentId(b"x" * 8), 10, at, at) for at in (NOW_S, NOW_S - 3600))
    holders = [
        Holder(NamespaceId("a" * 16), 0.0, [fresh], True),
        Holder(NamespaceId("b" * 16), 9000.0, [old], False),
    ]
    assert plan(holders, 50, spare_from_s=NOW_S - 120) == {"b" * 16: 10}


# On indexes


@dataclass
class Held:
    """A segment that the oracle knows."""

    namespace: NamespaceId
    segment: SegmentId
    nbytes: int
    cost_us: int
    depth: int
    used_s: float
    pinned: bool = False


def kv(model: str, tenant: str = "default") -> Namespace:
    return namespace(model).model_copy(update={"tenant": tenant})


def ec(model: str, tenant: str = "default") -> Namespace:
    return Namespace(kind="ec", model=model, weights="w", dtype="float32", tenant=tenant)


class World:
    """An index, what the oracle knows of it, and a clock."""

    def __init__(self, index: Any, made: Settings, seed: int) -> None:
        self.index: EngineIndex = index
        self.catalogue: FullIndex = index
        self.settings = made
        self.source = random.Random(seed)
        self.held: list[Held] = []
        self.kinds: dict[NamespaceId, Namespace] = {}
        self.housekeeping = Housekeeping(index, None, made, Counters(), lambda: NOW_S)  # type: ignore[arg-type]

    def open(self, space: Namespace) -> NamespaceId:
        name = self.index.register(space, expected_blocks=10_000)
        self.kinds[name] = space
        return name

    def put(
        self, name: NamespaceId, *, slots: int, slot_bytes: int, cost_us: int, depth: int, age_s: int
    ) -> None:
        segment = new_segment_id()
        used_s = NOW_S - age_s
        record = SegmentRecord(
            (PartRecord(4096, (slot_bytes,) * slots),),
            slots,
            "none",
            int(used_s),
            depth,
            0,
            rounded_cost(cost_us),
        )
        digests = chain(slots, seed=segment.hex())
        self.index.commit(name, segment, digests, record, rank=0, ranks=1)
        self.held.append(
            Held(
                name,
                segment,
                record.nbytes,
                record.cost_us,
                depth,
                (used_s - UNUSED_S) // QUARTER_S * QUARTER_S,
            )
        )

    def fill(self, names: list[NamespaceId], count: int) -> None:
        source = self.source
        for _ in range(count):
            name = source.choice(names)
            item = self.kinds[name].kind == "ec"
            self.put(
                name,
                slots=1 if item else source.choice([1, 4, 16]),
                slot_bytes=source.choice([100, 5000, 20_000]),
                cost_us=source.choice([0, 50, 5000, 300_000]) if item else source.choice([2000, 2500]),
                depth=0 if item else 16 * source.randrange(4),
                age_s=source.choice([1, 59, 61, 150, 400, 900, 4000, 9000]),
            )

    # The oracle: eviction.py's docstring once more, without its code.

    def order(self, name: NamespaceId, held: list[Held]) -> list[Held]:
        def key(one: Held) -> tuple[float, int, float, bytes]:
            return self.keep_s(one), -one.depth, one.used_s, one.segment

        return sorted((one for one in held if one.namespace == name and not one.pinned), key=key)

    def keep_s(self, one: Held) -> float:
        if self.kinds[one.namespace].kind != "ec" or not self.settings.eviction.cost_aware:
            return one.used_s
        return one.used_s + 600 * min(15, floor(log2(1 + one.cost_us * 1024 / one.nbytes)))

    def shift_s(self, name: NamespaceId, held: list[Held]) -> float:
        mine = [one for one in held if one.namespace == name]
        if self.kinds[name].kind != "kv" or not self.settings.eviction.cost_aware or not mine:
            return 0.0
        cost, nbytes = sum(one.cost_us for one in mine), sum(one.nbytes for one in mine)
        return 600.0 * min(15, floor(log2(1 + cost * 1024 / nbytes)))

    def after_eviction(self, quotas: dict[str, int]) -> list[Held]:
        """What is left."""
        left = list(self.held)
        names = sorted(self.kinds)
        tenants = sorted({space.tenant for space in self.kinds.values()})
        scopes = [(Scope.namespace(name), [name]) for name in names]
        scopes += [
            (Scope.tenant(tenant), [name for name in names if self.kinds[name].tenant == tenant])
            for tenant in tenants
        ]
        scopes.append((Scope.STORE, names))
        eviction = self.settings.eviction
        for scope, members in scopes:
            if scope not in quotas:
                continue
            used = sum(one.nbytes for one in left if one.namespace in members)
            room = min(quotas[scope] // 100, 1 << 30)
            if used <= quotas[scope] - room:
                continue
            excess = used - (quotas[scope] - 2 * room)
            fresh_from = NOW_S - eviction.fresh_s
            for fresh in (False, True):
                ordered = [
                    (self.keep_s(one) + self.shift_s(name, left), number, place, one)
                    for number, name in enumerate(members)
                    for place, one in enumerate(self.order(name, left))
                    if fresh or one.used_s < fresh_from
                ]
                for *_, one in sorted(ordered, key=lambda item: item[:3]):
                    if excess <= 0:
                        break
                    left.remove(one)
                    excess -= one.nbytes
        return left

    def visible(self) -> set[tuple[NamespaceId, SegmentId]]:
        return {(name, one.segment) for name in self.kinds for one in self.catalogue.segments(name)}


@pytest.fixture(params=["sqlite", pytest.param("redis", marks=pytest.mark.servers)])
def index(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqliteIndex | RedisIndex]:
    url = f"sqlite://{tmp_path}/index.sqlite"
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
    with open_index(load_settings({"payloads": f"file://{tmp_path}", "index": url}, environ={})) as index:
        yield index


def world(index: Any, tmp_path: Path, seed: int, **given: Any) -> World:
    return World(index, load_settings({"payloads": f"file://{tmp_path}", **given}, environ={}), seed)


@pytest.mark.parametrize("seed", range(6))
def test_victims_are_those_of_the_documented_policy(index: Any, tmp_path: Path, seed: int) -> None:
    """Chains and items, three tenants, quotas in every scope, some pinned, some fresh."""
    it = world(index, tmp_path, seed, capacity_bytes=3_000_000, eviction={"tenant_bytes": 2_000_000})
    spaces = [kv("one"), kv("two", "blue"), ec("three", "blue"), ec("four"), kv("five", "red")]
    names = [it.open(space) for space in spaces]
    it.fill(names, 120)
    for one in it.source.sample(it.held, 6):
        it.catalogue.pin(one.namespace, [one.segment], most_bytes=1 << 40)
        one.pinned = True
    it.catalogue.set_quota(Scope.namespace(names[0]), 400_000)
    it.catalogue.set_quota(Scope.tenant("red"), 150_000)
    quotas = {
        Scope.STORE: 3_000_000,
        Scope.namespace(names[0]): 400_000,
        Scope.tenant("red"): 150_000,
        Scope.tenant("blue"): 2_000_000,
        Scope.tenant("default"): 2_000_000,
    }
    expected = it.after_eviction(quotas)
    assert len(expected) < len(it.held) - 10
    evicted, headroom = it.housekeeping.evict()
    assert it.visible() == {(one.namespace, one.segment) for one in expected}
    assert evicted == len(it.held) - len(expected)
    # What the eviction leaves free, and less than the last segment that went.
    assert headroom < 30_000 + 4096 + 16 * 20_000
    assert all(usage.pinned_bytes >= 0 for usage in map(it.catalogue.usage, names))
    it.held = expected
    # Met is met.
    assert it.housekeeping.evict()[0] == 0


@pytest.mark.parametrize(("capacity", "left"), [(1, 0), (10_000, 0), (14_095, 0), (14_240, 1), (20_000, 1)])
def test_a_store_with_room_for_one_segment_or_none(
    index: Any, tmp_path: Path, capacity: int, left: int
) -> None:
    """A segment has 13,956 bytes, and two hundredths are left free: no eviction leaves a quota exceeded."""
    it = world(index, tmp_path, 6, capacity_bytes=capacity)
    name = it.open(kv("one"))
    for number in range(3):
        it.put(name, slots=1, slot_bytes=9860, cost_us=0, depth=0, age_s=100 * (3 - number))
        it.housekeeping.evict()
        assert it.catalogue.usage(name).segments == left
    assert it.visible() == {(name, one.segment) for one in it.held[-left:] if left}


def test_a_huge_store_evicts_what_is_above_a_gigabyte(index: Any, tmp_path: Path) -> None:
    """200 GiB in segments of 256 MiB: with less than four of them free an eviction begins, and it ends with
    eight. The shares of former releases began with 40 and ended with 80."""
    it = world(index, tmp_path, 7, capacity_bytes=200 * GIB)
    name = it.open(kv("one"))
    segment = 256 << 20

    def put() -> None:
        it.put(name, slots=1, slot_bytes=segment - 4096, cost_us=0, depth=0, age_s=9000)

    for _ in range(796):
        put()
    assert it.held[0].nbytes == segment
    assert it.housekeeping.evict() == (0, 0)
    put()
    assert it.housekeeping.evict() == (5, GIB)
    assert it.catalogue.usage(name).nbytes == 198 * GIB


@pytest.mark.slow
def test_more_segments_than_one_look_shows(index: Any, tmp_path: Path) -> None:
    it = world(index, tmp_path, 1, capacity_bytes=1_500_000)
    names = [it.open(kv("one")), it.open(kv("two")), it.open(ec("three"))]
    for number in range(1800):
        it.put(
            names[number % 3],
            slots=1,
            slot_bytes=10,
            cost_us=0,
            depth=0,
            age_s=100 + 7 * it.source.randrange(3000),
        )
    expected = it.after_eviction({Scope.STORE: 1_500_000})
    it.housekeeping.evict()
    assert it.visible() == {(one.namespace, one.segment) for one in expected}


def test_a_round_lists_about_as_much_as_it_evicts(
    index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many namespaces, and a few segments to go: most of a round would be listing what stays."""
    it = world(index, tmp_path, 8, capacity_bytes=4_110_000)
    names = [it.open(kv(f"model {number}")) for number in range(4)]
    for number in range(1000):
        it.put(
            names[number % 4],
            slots=1,
            slot_bytes=14,
            cost_us=0,
            depth=0,
            age_s=300 + 70 * (number * 37 % 997),
        )
    expected = it.after_eviction({Scope.STORE: 4_110_000})
    listed, real = 0, index.order

    def order(name: NamespaceId, most: int) -> Any:
        nonlocal listed
        found = real(name, most)
        listed += len(found)
        return found

    monkeypatch.setattr(index, "order", order)
    evicted, _ = it.housekeeping.evict()
    assert it.visible() == {(one.namespace, one.segment) for one in expected}
    assert evicted == 20
    assert listed <= 4 * (8 + 2 * evicted)


def test_without_cost_it_is_last_use_alone(index: Any, tmp_path: Path) -> None:
    tree = {"payloads": f"file://{tmp_path}", "eviction": {"cost_aware": False}, "capacity_bytes": 300_000}
    made = load_settings({**tree, "index": f"sqlite://{tmp_path}/plain.sqlite"}, environ={})
    with open_index(made) as plain:
        it = World(plain, made, 3)
        it.fill([it.open(kv("one")), it.open(ec("two"))], 60)
        expected = it.after_eviction({Scope.STORE: 300_000})
        it.housekeeping.evict()
        assert it.visible() == {(one.namespace, one.segment) for one in expected}
        ages = [one.used_s for one in it.held if one not in expected]
        assert max(ages) <= min(one.used_s for one in expected)


def test_what_is_pinned_may_exceed_its_quota(index: Any, tmp_path: Path) -> None:
    it = world(index, tmp_path, 4, capacity_bytes=100_000)
    name = it.open(kv("one"))
    it.fill([name], 30)
    segments = [one.segment for one in it.held]
    it.catalogue.pin(name, segments, most_bytes=1 << 40)
    assert it.housekeeping.evict() == (0, 0)
    it.catalogue.unpin(name, segments[:10])
    assert it.housekeeping.evict()[0] == 10


@pytest.mark.parametrize("moment", ["orders", "accounts", "shares"])
def test_what_two_processes_find_too_much_goes_once(
    index: Any, tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever another process's eviction falls between the looks of this one."""
    it = world(index, tmp_path, 5, capacity_bytes=1_000_000)
    it.fill([it.open(kv("one")), it.open(kv("two")), it.open(ec("three"))], 80)
    expected = it.after_eviction({Scope.STORE: 1_000_000})
    other = Housekeeping(index, None, it.settings, Counters(), lambda: NOW_S)  # type: ignore[arg-type]
    name = {"orders": "_orders", "accounts": "quotas", "shares": "_shares"}[moment]
    real = getattr(it.housekeeping, name)
    calls = 0

    def between(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        found = real(*args)
        # The first accounts are those that show the excess; the second are those of the step.
        if calls == (2 if moment == "accounts" else 1):
            assert other.evict()[0] == len(it.held) - len(expected)
        return found

    monkeypatch.setattr(it.housekeeping, name, between)
    assert it.housekeeping.evict()[0] == 0
    assert it.visible() == {(one.namespace, one.segment) for one in expected}
