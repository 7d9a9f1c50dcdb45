"""Regret: how much longer a request took than it would have had to, by what is known and what is expected."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.choice.cost import Prefill
from connectors.choice.regret import Regrets
from connectors.choice.speeds import FIRST
from kvstore.rules.weighed import Weighed
from kvstore.store.store import Store
from tests.connectors.groups import TOKENS
from tests.connectors.kv.world import allocate, answer, half, report
from tests.fake_vllm import FakeRequest, step
from tests.store.world import chain, make_store, open_space, slots
from tests.waiting import until

pytestmark = pytest.mark.engine

#: 100 tokens: half a second to load, two to compute.
WEIGHED = Weighed(0.5, 2.0, 100)


class Bed:
    def __init__(self, wait: float = 1.0) -> None:
        self.now = 10.0
        self.told: list[tuple[float, float, bool]] = []
        self.regrets = Regrets(lambda *one: self.told.append(one), wait, lambda: self.now)

    def loads(self, took: float, tokens: int = 100, *, to_load: bool = True) -> None:
        self.regrets.loads("r", WEIGHED, to_load=to_load)
        self.now += took
        self.regrets.loaded("r", tokens)

    def computes(self, took: float, *, to_load: bool = False, weighed: Weighed = WEIGHED) -> None:
        request: Any = SimpleNamespace(request_id="r", num_computed_tokens=0)
        self.regrets.computes(request, weighed, 100, to_load=to_load)
        for _ in range(2):
            self.regrets.step({"r": 50}, 1)
            request.num_computed_tokens += 50
            self.now += took / 2
            self.regrets.step_ended()


@pytest.fixture
def bed() -> Bed:
    return Bed()


def test_a_load_that_was_faster_than_computing_is_not_regretted(bed: Bed) -> None:
    bed.loads(1.9)
    assert bed.told == [(0.0, 2.0, False)]


def test_a_load_that_was_slower_is_by_the_difference(bed: Bed) -> None:
    bed.loads(5.0)
    assert bed.told == [(pytest.approx(3.0), 2.0, False)]


def test_what_a_load_did_not_bring_is_computed(bed: Bed) -> None:
    bed.loads(1.0, tokens=25)
    assert bed.told == [(pytest.approx(1.0 + 1.5 - 2.0), 2.0, False)]


def test_computing_is_regretted_where_loading_was_expected_to_be_faster(bed: Bed) -> None:
    bed.computes(2.5)
    assert bed.told == [(pytest.approx(2.0), pytest.approx(2.5), False)]
    bed.computes(2.5, weighed=Weighed(9.0, 2.0, 100))
    assert bed.told[1:] == [(0.0, pytest.approx(2.5), False)]


@pytest.mark.parametrize(("took", "regret"), [(0.2, 0.3), (2.0, 0.0)])
def test_a_load_that_was_decided_and_not_made_is_held_against_computing(
    bed: Bed, took: float, regret: float
) -> None:
    bed.computes(took, to_load=True)
    assert bed.told == [(pytest.approx(regret), pytest.approx(took), True)]


@pytest.mark.parametrize(("took", "regret"), [(0.4, 1.6), (3.0, 0.0)])
def test_a_load_that_was_made_though_it_did_not_seem_to_pay_is_too(
    bed: Bed, took: float, regret: float
) -> None:
    bed.loads(took, to_load=False)
    assert bed.told == [(pytest.approx(regret), 2.0, True)]


def test_where_waiting_counts_less_so_does_what_is_waited_for() -> None:
    bed = Bed(wait=0.25)
    bed.loads(7.0)
    bed.computes(2.0, weighed=Weighed(7.0, 2.0, 100))
    assert [regret for regret, _, _ in bed.told] == [0.0, pytest.approx(0.25)]


def test_steps_that_are_sent_ahead_end_in_their_order(bed: Bed) -> None:
    request: Any = SimpleNamespace(request_id="r", num_computed_tokens=0)
    bed.regrets.computes(request, WEIGHED, 100, to_load=False)
    bed.regrets.step({"other": 7}, 1)
    bed.regrets.step({"r": 120}, 3)
    assert not bed.regrets.computing
    for ended in range(3):
        assert bed.told == [], ended
        bed.now += 1
        bed.regrets.step_ended()
    assert bed.told == [(pytest.approx(2.5), pytest.approx(3.0), False)]
    assert bed.regrets.held == 0


def test_a_request_that_ends_or_starts_over_is_forgotten(bed: Bed) -> None:
    request: Any = SimpleNamespace(request_id="r", num_computed_tokens=0)
    bed.regrets.computes(request, WEIGHED, 100, to_load=False)
    bed.regrets.forget("r")
    bed.regrets.loads("r", WEIGHED, to_load=True)
    bed.regrets.restart()
    bed.regrets.loaded("r", 100)
    bed.regrets.step({"r": 100}, 1)
    bed.regrets.step_ended()
    assert bed.told == [] and bed.regrets.held == 0


# ---- the scheduler's half


class Half:
    """A scheduler's half whose store has six blocks, with what it expects and a clock of its own."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        self.store, self.now, self.token_us = store, 10.0, 0.0
        space = open_space(store)
        space.save(slots(chain(*range(6))))
        self.space = space
        self.scheduler = half(store, space)
        monkeypatch.setattr(self.scheduler.cost, "prefill", lambda: Prefill(self.token_us))
        monkeypatch.setattr(self.scheduler._regrets, "_clock", lambda: self.now)

    def ask(self, name: str, compute_s: float) -> tuple[Any, int]:
        """A request for all blocks, which take so long to compute; and how many tokens it is promised."""
        self.token_us = compute_s * 1e6 / (6 * TOKENS)
        request = FakeRequest(name, [*range(6), 77])
        self.scheduler.on_new_request(request)
        tokens, _ = answer(self.scheduler, request)
        assert tokens is not None
        if tokens:
            allocate(self.scheduler, request, tokens)
        return request, tokens

    def compute(self, request: Any, seconds: float) -> None:
        step(self.scheduler, (request, 7 * TOKENS))
        self.now += seconds
        # Steps in which the scheduler waited for the match have ended, too.
        while self.scheduler.cost.under_way:
            self.scheduler.take_events()

    def seen(self) -> dict[str, list[float]]:
        stats = self.scheduler.take_stats()
        found = stats.data["seconds"] if stats is not None else {}
        return {name: values for name, values in found.items() if "regret" in name}


@pytest.fixture
def engine_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Half]:
    kv = {"load": "adaptive", "match_deadline_s": 60.0, "audit_every": 3}
    store = make_store(tmp_path, kv=kv)
    yield Half(store, monkeypatch)
    store.close()


ALL = 6 * TOKENS


def test_a_load_that_took_longer_than_computing_is_observed(engine_half: Half) -> None:
    request, tokens = engine_half.ask("r", compute_s=10.0)
    assert tokens == ALL
    engine_half.now += 15.0
    report(engine_half.scheduler, finished={"r"})
    assert engine_half.seen() == {
        "regret_seconds": [pytest.approx(5.0)],
        "regret_ratio": [pytest.approx(0.5)],
    }
    assert request.request_id == "r"


def test_what_a_failed_load_did_not_bring_counts_as_computed(engine_half: Half) -> None:
    engine_half.ask("r", compute_s=12.0)
    engine_half.now += 6.0
    # The first four of six blocks arrived.
    report(engine_half.scheduler, finished={"r"}, failed={"r": 4})
    assert engine_half.seen()["regret_seconds"] == [0.0]
    engine_half.ask("s", compute_s=12.0)
    engine_half.now += 9.0
    report(engine_half.scheduler, finished={"s"}, failed={"s": 4})
    assert engine_half.seen()["regret_seconds"] == [pytest.approx(9.0 + 4.0 - 12.0)]


def test_what_is_computed_is_observed_and_told_with_its_numbers(engine_half: Half) -> None:
    request, tokens = engine_half.ask("r", compute_s=1e-6)
    assert tokens == 0
    assert engine_half.store.counters.snapshot()["miss_blocks{computing_is_faster}"] == 6
    engine_half.compute(request, seconds=20.0)
    [seconds] = engine_half.seen()["regret_seconds"]
    # All but what loading would have taken, of which next to nothing is expected.
    assert 15 < seconds < 20
    maintenance: Any = engine_half.store.maintenance
    [told] = until(lambda: maintenance.outcomes(engine_half.space.id, 10))
    weighed = Weighed.read(told.detail)
    assert told.reason == "computing_is_faster" and weighed is not None and weighed.tokens == ALL


def test_a_load_declined_for_an_audit_measures_the_decision(engine_half: Half) -> None:
    for number in range(2):
        assert engine_half.ask(str(number), compute_s=10.0)[1] == ALL
        report(engine_half.scheduler, finished={str(number)})
    engine_half.seen()
    request, tokens = engine_half.ask("audited", compute_s=10.0)
    assert tokens == 0
    engine_half.compute(request, seconds=4.0)
    assert engine_half.seen() == {"measured_regret_ratio": [0.0]}


def test_one_in_as_many_loads_that_do_not_seem_to_pay_is_made(engine_half: Half) -> None:
    load_s = FIRST["disk"].latency_s
    # Of those that take many times as long none is.
    promised = [engine_half.ask(f"slow {number}", compute_s=load_s / 1000)[1] for number in range(6)]
    assert promised == [0] * 6
    promised = [engine_half.ask(f"close {number}", compute_s=0.8 * load_s)[1] for number in range(3)]
    assert promised == [0, 0, ALL]
    loads = step(engine_half.scheduler).loads
    # Nothing cuts it short.
    assert [load.prefill for load in loads] == [None]
    # And nobody waits for it.
    assert engine_half.ask("beside", compute_s=0.8 * load_s)[1] == 0
    engine_half.now += 0.3 * load_s
    report(engine_half.scheduler, finished={"close 2"})
    assert engine_half.seen() == {"measured_regret_ratio": [pytest.approx(0.5 / 0.8)]}


def test_nothing_is_followed_that_has_ended(engine_half: Half) -> None:
    request, _ = engine_half.ask("r", compute_s=1e-6)
    loading, _ = engine_half.ask("s", compute_s=10.0)
    regrets = engine_half.scheduler._regrets
    assert regrets.held == 2
    engine_half.scheduler.request_finished(request, [[]])
    engine_half.scheduler.request_finished(loading, [[]])
    assert regrets.held == 0
