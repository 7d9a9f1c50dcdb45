"""What the scheduler half promises when loading is weighed against computing, on a real store."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.choice.cost import Prefill
from connectors.choice.speeds import Measured, Speed
from connectors.kv.messages import CUT
from connectors.kv.scheduler import KVScheduler
from kvstore.rules.tiers import Tier
from kvstore.store.store import Store
from tests.connectors.groups import TOKENS
from tests.connectors.kv.world import allocate, answer, half, report, tell
from tests.fake_vllm import FakeRequest, step
from tests.store.world import SLOT_BYTES, chain, make_store, open_space, slots
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.engine

A = chain(*range(8))
#: A second for each block, or a microsecond; and tiers that bring all blocks in no time, or in hours.
DEAR, CHEAP = Prefill(1e6 / TOKENS), Prefill(1.0 / TOKENS)
FAST, SLOW = Speed(1e-6, 1e12), Speed(3600.0, 1.0)


def opened(tmp_path: Path, **kv: Any) -> tuple[Store, KVScheduler]:
    store = make_store(tmp_path, kv={"load": "adaptive", "match_deadline_s": 60.0, **kv})
    space = open_space(store)
    space.save(slots(A[:4]))
    space.save(slots(A))
    return store, half(store, space)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made, _ = opened(tmp_path)
    yield made
    made.close()


@pytest.fixture
def scheduler(store: Store) -> KVScheduler:
    return half(store, open_space(store))


def computing_takes(scheduler: KVScheduler, prefill: Prefill | None) -> None:
    scheduler.cost.prefill = lambda: prefill  # type: ignore[method-assign]


def reads_take(scheduler: KVScheduler, speed: Speed, *, tier: Tier = "disk", done: int = 0) -> None:
    tell(scheduler, speeds={0: {tier: Measured(speed, done, 1 + int(time.monotonic() * 1e6))}})


def request(name: str = "r") -> FakeRequest:
    return FakeRequest(name, range(8))


def arrives(scheduler: KVScheduler, one: FakeRequest) -> None:
    """A request comes, and its look-up is answered: nothing but a load that it waits for delays it."""
    scheduler.on_new_request(one)
    tracked = scheduler.requests.get(one.request_id)
    assert tracked is not None and tracked.match is not None
    assert tracked.match.poll(PATIENCE_S) is not None


def misses(store: Store) -> dict[str, float]:
    found = store.counters.snapshot()
    return {name: found[f"miss_blocks{{{name}}}"] for name in (CUT, "below_threshold", "switched_off")}


@pytest.mark.parametrize(
    ("speed", "prefill", "tokens"),
    [(FAST, DEAR, 8 * TOKENS), (SLOW, DEAR, 0), (SLOW, CHEAP, 0), (SLOW, None, 8 * TOKENS)],
)
def test_what_pays_is_promised(
    scheduler: KVScheduler, store: Store, speed: Speed, prefill: Prefill | None, tokens: int
) -> None:
    computing_takes(scheduler, prefill)
    reads_take(scheduler, speed)
    one = request()
    assert answer(scheduler, one) == (tokens, tokens > 0)
    # However often the scheduler asks, it is counted once.
    assert answer(scheduler, one) == (tokens, tokens > 0)
    assert misses(store) == {CUT: 0 if tokens else 8, "below_threshold": 0, "switched_off": 0}


def test_before_anything_is_measured_the_records_say_what_computing_took(tmp_path: Path) -> None:
    for cost_us, tokens in ((8e9, 8 * TOKENS), (8.0, 0)):
        folder = tmp_path / str(tokens)
        store = make_store(folder, kv={"load": "adaptive", "match_deadline_s": 60.0})
        space = open_space(store)
        space.save(slots(A), cost_us=cost_us)
        scheduler = half(store, space)
        assert answer(scheduler, request())[0] == tokens
        store.close()


@pytest.mark.parametrize(("load", "tokens"), [("always", 8 * TOKENS), ("never", 0)])
def test_settings_decide_where_they_say_so(tmp_path: Path, load: str, tokens: int) -> None:
    store, scheduler = opened(tmp_path, load=load)
    computing_takes(scheduler, CHEAP if tokens else DEAR)
    reads_take(scheduler, SLOW if tokens else FAST)
    assert answer(scheduler, request())[0] == tokens
    assert misses(store)["switched_off"] == (0 if tokens else 8)
    if tokens:
        allocate(scheduler, request(), tokens)
        assert step(scheduler).loads[0].prefill is None, "it is never cut"
    assert step(scheduler).probes == []
    store.close()


def test_fewer_blocks_than_the_floor_are_never_loaded(tmp_path: Path) -> None:
    store, scheduler = opened(tmp_path, min_load_blocks=9)
    computing_takes(scheduler, DEAR)
    reads_take(scheduler, FAST)
    assert answer(scheduler, request()) == (0, False)
    assert misses(store) == {CUT: 0, "below_threshold": 8, "switched_off": 0}
    store.close()


def test_what_lies_nearer_is_loaded_and_the_rest_is_computed(scheduler: KVScheduler, store: Store) -> None:
    computing_takes(scheduler, Prefill(1e3))
    reads_take(scheduler, FAST)
    reads_take(scheduler, SLOW, tier="bucket")
    scheduler.loading._choosing._clock = lambda: time.monotonic() + 60.0
    one = request()
    scheduler.on_new_request(one)
    tracked = scheduler.requests.get("r")
    assert tracked is not None and tracked.match is not None
    match = None
    while match is None:
        match = tracked.match.poll(PATIENCE_S)
    _, second = match.runs[0]
    match.tiers[second.segment] = "bucket"
    assert answer(scheduler, one) == (4 * TOKENS, True)
    allocate(scheduler, one, 4 * TOKENS)
    sent = step(scheduler)
    [load] = sent.loads
    assert [run.count for run in load.groups[0].runs] == [4] and load.stop == 4 * TOKENS
    assert load.prefill == Prefill(1e3) and load.groups[0].block_bytes == SLOT_BYTES
    [probe] = sent.probes
    assert list(probe.tiers.values()) == ["bucket"] and probe.tables == {}
    decision = tracked.decision
    assert decision is not None and (decision.tokens, decision.found) == (4 * TOKENS, 8 * TOKENS)
    assert decision.why == "part" and misses(store)[CUT] == 4


def test_a_declined_tier_is_probed_once_until_that_has_been_told(
    scheduler: KVScheduler, store: Store
) -> None:
    computing_takes(scheduler, CHEAP)
    assert answer(scheduler, request("a")) == (0, False)
    [probe] = step(scheduler).probes
    assert probe.hashes == A[: len(probe.hashes)] and 1 <= len(probe.hashes) <= 8
    for name in "bcd":
        assert answer(scheduler, request(name)) == (0, False)
        assert step(scheduler).probes == []
    # It says that the tier is fast; computing is dearer than that.
    computing_takes(scheduler, DEAR)
    reads_take(scheduler, FAST, done=len(probe.hashes) * SLOT_BYTES)
    assert answer(scheduler, request("e"))[0] == 8 * TOKENS


def test_what_is_under_way_counts_for_the_next(scheduler: KVScheduler) -> None:
    computing_takes(scheduler, Prefill(10.0))
    # All blocks take half as long as computing them; so the second load would take as long again.
    reads_take(scheduler, Speed(1e-6, 8 * SLOT_BYTES / (8 * TOKENS * 10e-6 / 1.5)))
    one, other = request("a"), request("b")
    assert answer(scheduler, one)[0] == 8 * TOKENS
    allocate(scheduler, one, 8 * TOKENS)
    [load] = step(scheduler).loads
    # It waits for the first one's blocks, which cost it nothing.
    arrives(scheduler, other)
    assert scheduler.get_num_new_matched_tokens(other, 0) == (None, False)
    tracked = scheduler.requests.get("b")
    assert tracked is not None and tracked.waits_for == "a"
    third = scheduler.loading._choosing
    match = tracked.match and tracked.match.poll(PATIENCE_S)
    assert match is not None
    assert third.decide(tracked, match, 0).tokens == 0, "by itself it would not load"
    tell(scheduler, speeds={0: {"disk": Measured(Speed(1e-6, 1e12), 8 * SLOT_BYTES, 9)}}, finished={"a"})
    assert load.request_id == "a" and third.decide(tracked, match, TOKENS).tokens == 7 * TOKENS


def test_a_cut_load_is_no_failure_and_is_not_tried_again(scheduler: KVScheduler, store: Store) -> None:
    computing_takes(scheduler, DEAR)
    reads_take(scheduler, FAST)
    one, waits = request("a"), request("b")
    assert answer(scheduler, one)[0] == 8 * TOKENS
    allocate(scheduler, one, 8 * TOKENS)
    step(scheduler)
    arrives(scheduler, waits)
    assert scheduler.get_num_new_matched_tokens(waits, 0) == (None, False)
    tell(
        scheduler, finished={"a"}, failed_loads={"a": {0: 6}}, load_reasons={"a": CUT},
    )  # fmt: skip
    stats = scheduler.take_stats()
    assert stats is not None
    counts = stats.data["counts"]
    assert counts["loads{cut}"] == 1 and counts["loaded_tokens"] == 6 * TOKENS
    assert "loads{failed}" not in counts and "loads{complete}" not in counts
    # It computes the rest, and so does who has waited for it.
    assert scheduler.get_num_new_matched_tokens(one, 0) == (0, False)
    assert scheduler.get_num_new_matched_tokens(waits, 6 * TOKENS) == (0, False)
    tracked = scheduler.requests.get("a")
    assert tracked is not None and tracked.progress.saved == [8], "what is stored isn't saved again"
    assert scheduler.loading.held == 0
    # Another one weighs it anew.
    assert answer(scheduler, request("c"))[0] == 8 * TOKENS


def test_what_loads_take_beside_their_reads_is_learned(scheduler: KVScheduler) -> None:
    computing_takes(scheduler, DEAR)
    reads_take(scheduler, FAST)
    choosing, now = scheduler.loading._choosing, time.monotonic()
    choosing._clock = lambda: now
    for number in range(30):
        one = FakeRequest(str(number), range(8))
        assert answer(scheduler, one)[0] == 8 * TOKENS
        allocate(scheduler, one, 8 * TOKENS)
        step(scheduler)
        tracked = scheduler.requests.get(str(number))
        assert tracked is not None
        now += 0.3
        tell(scheduler, finished={str(number)}, load_seconds={str(number): 0.1})
        scheduler.request_finished(one, [[]])
    assert 0.15 < choosing._detour_s < 0.21


def test_a_decision_costs_the_schedulers_thread_little(scheduler: KVScheduler) -> None:
    """The bound is an order of magnitude: a decision takes microseconds."""
    computing_takes(scheduler, DEAR)
    reads_take(scheduler, FAST)
    one = request()
    assert answer(scheduler, one)[0] == 8 * TOKENS
    report(scheduler, finished=set())
    tracked = scheduler.requests.get("r")
    assert tracked is not None and tracked.match is not None
    match = tracked.match.poll(PATIENCE_S)
    assert match is not None
    spent = []
    for _ in range(50):
        tracked.decided_of = None
        began = time.thread_time()
        scheduler.loading._choosing.decide(tracked, match, 0)
        spent.append(time.thread_time() - began)
    assert min(spent) < 0.001
