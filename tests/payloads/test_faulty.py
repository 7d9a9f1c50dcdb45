"""FaultyPayloads: no rules, no difference; with rules exactly the faults that they name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from kvstore.conformance.arrange import fetch, fresh_name, views
from kvstore.conformance.faulty import FaultyPayloads, Plan, Rule
from kvstore.errors import CapacityExceeded, PermissionDenied, TransientError
from kvstore.payloads import memory
from kvstore.payloads.memory import MemoryPayloads
from kvstore.testing import PayloadConformance
from tests.payloads.test_memory import Dictionary

DATA = bytes(range(256)) * 4


@pytest.fixture
def inner(request: pytest.FixtureRequest) -> Iterator[MemoryPayloads]:
    yield MemoryPayloads(request.node.nodeid)
    del memory._STORES[request.node.nodeid]


@pytest.fixture
def plan() -> Plan:
    return Plan(seed=1)


@pytest.fixture
def payloads(inner: MemoryPayloads, plan: Plan) -> FaultyPayloads:
    return FaultyPayloads(inner, plan)


class TestFaultyPayloadsWithoutRules(PayloadConformance):
    @pytest.fixture
    def payloads(self, inner: MemoryPayloads, plan: Plan) -> FaultyPayloads:
        return FaultyPayloads(inner, plan)

    @pytest.fixture
    def raw(self, request: pytest.FixtureRequest, inner: MemoryPayloads) -> Dictionary:
        return Dictionary(request.node.nodeid)


@pytest.mark.parametrize(
    ("fault", "error"),
    [("transient", TransientError), ("permission", PermissionDenied), ("no_space", CapacityExceeded)],
)
def test_an_error_instead_of_the_call(
    payloads: FaultyPayloads, inner: MemoryPayloads, plan: Plan, fault: str, error: type[Exception]
) -> None:
    name = fresh_name()
    plan.replace(Rule(fault))
    with pytest.raises(error, match="injected"):
        payloads.put(name, views(DATA))
    assert fetch(inner, name) is None
    assert plan.injected == {("put", fault): 1}


def test_every_verb_can_fail(payloads: FaultyPayloads, plan: Plan) -> None:
    name = fresh_name()
    plan.replace(Rule("transient"))
    calls = [
        lambda: payloads.put(name, []),
        lambda: payloads.read(name, 0, []),
        lambda: payloads.delete([name]),
        lambda: next(payloads.list()),
        payloads.ping,
    ]
    for call in calls:
        with pytest.raises(TransientError):
            call()
    assert set(plan.injected) == {(verb, "transient") for verb in ("put", "read", "delete", "list", "ping")}


def test_an_unanswered_call_has_happened(payloads: FaultyPayloads, inner: MemoryPayloads, plan: Plan) -> None:
    name = fresh_name()
    plan.replace(Rule("unanswered"))
    with pytest.raises(TransientError, match="lost"):
        payloads.put(name, views(DATA))
    assert fetch(inner, name) == DATA
    with pytest.raises(TransientError, match="lost"):
        payloads.delete([name])
    assert fetch(inner, name) is None
    with pytest.raises(TransientError, match="lost"):
        payloads.ping()


def test_missing(payloads: FaultyPayloads, inner: MemoryPayloads, plan: Plan) -> None:
    name = fresh_name()
    inner.put(name, views(DATA))
    plan.replace(Rule("missing"))
    assert fetch(payloads, name) is None
    plan.replace()
    assert fetch(payloads, name) == DATA


@pytest.mark.parametrize("verb", ["put", "read"])
@pytest.mark.parametrize("at", [None, 0, 500, 1023, 1 << 20])
def test_flip_changes_one_byte(
    payloads: FaultyPayloads, inner: MemoryPayloads, plan: Plan, verb: str, at: int | None
) -> None:
    name = fresh_name()
    plan.replace(Rule("flip", verbs=(verb,), at=at))
    mine = bytearray(DATA)
    payloads.put(name, [memoryview(mine)[:100], memoryview(mine)[100:]])
    assert mine == DATA
    stored = fetch(inner, name)
    into = [bytearray(1), bytearray(600), bytearray(1000)]
    assert payloads.read(name, 0, [memoryview(view) for view in into]) == len(DATA)
    got = b"".join(into)[: len(DATA)]
    changed = [i for i, (old, new) in enumerate(zip(DATA, got, strict=True)) if old != new]
    assert len(changed) == 1
    assert at is None or changed == [min(at, len(DATA) - 1)]
    assert (stored == DATA) == (verb == "read")


@pytest.mark.parametrize("verb", ["put", "read"])
@pytest.mark.parametrize("at", [None, 0, 500])
def test_truncate_loses_the_end(
    payloads: FaultyPayloads, inner: MemoryPayloads, plan: Plan, verb: str, at: int | None
) -> None:
    name = fresh_name()
    plan.replace(Rule("truncate", verbs=(verb,), at=at))
    payloads.put(name, views(DATA))
    stored = fetch(inner, name)
    got = fetch(payloads, name)
    assert got is not None
    assert len(got) < len(DATA)
    assert DATA.startswith(got)
    assert at is None or len(got) == at
    assert (stored == DATA) == (verb == "read")


def test_damage_to_nothing_is_nothing(payloads: FaultyPayloads, inner: MemoryPayloads, plan: Plan) -> None:
    name = fresh_name()
    plan.replace(Rule("flip"), Rule("truncate"))
    payloads.put(name, [])
    assert fetch(payloads, name) == b""


def test_delay(inner: MemoryPayloads) -> None:
    slept: list[float] = []
    payloads = FaultyPayloads(inner, Plan(Rule("delay", verbs=("read",), delay_s=2.5)), slept.append)
    name = fresh_name()
    payloads.put(name, views(DATA))
    assert fetch(payloads, name) == DATA
    assert slept == [2.5]


def test_rules_combine_in_their_order(inner: MemoryPayloads) -> None:
    slept: list[float] = []
    plan = Plan(Rule("delay", delay_s=1.0), Rule("transient", verbs=("put",)))
    payloads = FaultyPayloads(inner, plan, slept.append)
    with pytest.raises(TransientError):
        payloads.put(fresh_name(), [])
    assert slept == [1.0]


def test_skip_and_times(payloads: FaultyPayloads, plan: Plan) -> None:
    name = fresh_name()
    payloads.put(name, views(DATA))
    plan.replace(Rule("missing", skip=2, times=3))
    assert [fetch(payloads, name) is None for _ in range(8)] == [False] * 2 + [True] * 3 + [False] * 3


def test_equal_rules_count_for_themselves(payloads: FaultyPayloads, plan: Plan) -> None:
    name = fresh_name()
    payloads.put(name, views(DATA))
    plan.replace(Rule("flip", verbs=("read",), at=0, times=1), Rule("flip", verbs=("read",), at=0, times=1))
    # Both hit the first read: two flips of one byte cancel out.
    assert fetch(payloads, name) == DATA
    assert plan.injected["read", "flip"] == 2


def test_only_names_that_contain(payloads: FaultyPayloads, plan: Plan) -> None:
    hit, spared = fresh_name(), fresh_name()
    payloads.put(hit, views(DATA))
    payloads.put(spared, views(DATA))
    plan.replace(Rule("missing", name=hit[20:]), Rule("transient", verbs=("delete",), name=hit))
    assert fetch(payloads, hit) is None
    assert fetch(payloads, spared) == DATA
    with pytest.raises(TransientError):
        payloads.delete([spared, hit])
    assert payloads.delete([spared]) == 1


def test_probability_with_a_seed(inner: MemoryPayloads) -> None:
    name = fresh_name()
    inner.put(name, views(DATA))

    def outcomes(seed: int) -> list[bool]:
        payloads = FaultyPayloads(inner, Plan(Rule("missing", probability=0.3), seed=seed))
        return [fetch(payloads, name) is None for _ in range(1000)]

    assert outcomes(7) == outcomes(7)
    assert outcomes(7) != outcomes(8)
    assert 240 < Counter(outcomes(7))[True] < 360


def test_a_rule_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="no_space makes no sense for read"):
        Rule("no_space", verbs=("read",))


def test_repr_shows_the_stack() -> None:
    assert repr(FaultyPayloads(MemoryPayloads("x"), Plan())) == "FaultyPayloads(MemoryPayloads('x'))"
