"""What engines tell the journal: for which blocks, why, once, and without waiting for anything."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")
pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.choice.cost import TokenCost
from connectors.ec.cost import Encoding
from connectors.ec.messages import ECStoreMetadata, ECStoreWorkerMetadata
from connectors.ec.worker import ECWorker
from connectors.kv.messages import KVStoreWorkerMetadata
from connectors.kv.scheduler import KVScheduler
from connectors.telemetry.outcomes import BATCH, MOST, Outcomes
from kvstore.breaker import Breaker
from kvstore.errors import TransientError
from kvstore.index.port import Outcome
from kvstore.keys import SegmentId, canonical_json, digest, digests
from kvstore.store.space import Space
from kvstore.store.store import Store
from tests.connectors.ec.world import ROWS, WIDTH, FakeEngine, ItemRequest, key, put
from tests.connectors.engine.test_tensors import CUDA
from tests.connectors.groups import SCHEDULERS, TOKENS
from tests.connectors.kv.world import allocate, answer, half, report, tell
from tests.fake_vllm import FakeRequest, step
from tests.store.world import chain, make_store, open_space, slots, with_parts
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.engine


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    made: list[Store] = []

    def store(**settings: Any) -> Store:
        made.append(make_store(tmp_path, **{"kv": {"match_deadline_s": 60.0}} | settings))
        return made[-1]

    yield store
    for one in made:
        one.close()


@pytest.fixture
def store(opened: Callable[..., Store]) -> Store:
    return opened()


@pytest.fixture
def space(store: Store) -> Space:
    made = open_space(store)
    made.register()
    return made


def told(store: Store, space: Space) -> list[Outcome]:
    """What has arrived, oldest first."""
    assert store.transfers.drain(PATIENCE_S)
    return store.maintenance.outcomes(space.id, 1000)[::-1]


def finish(scheduler: KVScheduler, request: FakeRequest) -> None:
    scheduler.request_finished(request, [list(range(100, 200))])  # type: ignore[arg-type]


def brief(one: Outcome) -> tuple[Any, ...]:
    return one.op, one.asked, one.served, one.reason, one.position


def first(request: FakeRequest, block: int) -> bytes:
    return digests(request.block_hashes[block : block + 1])


# ---- matches ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "computed", "least", "expected"),
    [
        # What the engine has itself isn't asked for; what is stored beyond it is served.
        (6, 2, 1, (6, 4, "absent", 6)),
        (0, 0, 1, (8, 0, "absent", 0)),
        (8, 8, 1, None),
        (2, 5, 1, (3, 0, "absent", 5)),
        # Too little to be worth it: all of it is computed.
        (6, 4, 3, (4, 0, "below_threshold", 4)),
        (8, 6, 3, (2, 0, "below_threshold", 6)),
    ],
)
def test_a_match_is_told_of_what_the_engine_lacks(
    opened: Any, stored: int, computed: int, least: int, expected: Any
) -> None:
    store = opened(kv={"match_deadline_s": 60.0, "min_load_blocks": least})
    space = open_space(store)
    request = FakeRequest("r", list(range(8)))
    if stored:
        space.save(slots(request.block_hashes[:stored]))
    scheduler = half(store, space)
    scheduler.on_new_request(request)  # type: ignore[arg-type]
    answer(scheduler, request, computed * TOKENS)
    answer(scheduler, request, computed * TOKENS)
    finish(scheduler, request)
    found = [one for one in told(store, space) if one.op == "match"]
    if expected is None:
        assert found == []
        return
    [one] = found
    assert brief(one) == ("match", *expected)
    assert (one.request, one.missing) == ("r", first(request, expected[3]))
    seen = store.maintenance.seen(space.id)
    assert (seen["asked"], seen.get("served", 0)) == expected[:2]


def test_what_is_served_in_full_counts_and_is_not_kept(store: Store, space: Space) -> None:
    request = FakeRequest("r", list(range(8)))
    space.save(slots(request.block_hashes))
    scheduler = half(store, space)
    assert answer(scheduler, request, 16) == (48, True)
    finish(scheduler, request)
    assert told(store, space) == []
    assert store.maintenance.seen(space.id) == {"requests": 1, "asked": 6, "served": 6}


def test_an_answer_that_never_came_is_told_as_late(opened: Any) -> None:
    store = opened(kv={"match_deadline_s": 0.05})
    space = open_space(store)
    space.register()
    late = threading.Event()
    match = space.match
    space.match = lambda packed, **more: (late.wait(PATIENCE_S), match(packed))[1]  # type: ignore[method-assign]
    scheduler, request = half(store, space), FakeRequest("r", list(range(4)))
    assert answer(scheduler, request) == (0, False)
    late.set()
    finish(scheduler, request)
    [one] = told(store, space)
    assert (brief(one), one.missing) == (("match", 4, 0, "deadline", 0), first(request, 0))


# ---- loads ------------------------------------------------------------------------------------------


def test_a_failed_load_takes_back_what_was_served(store: Store, space: Space) -> None:
    request = FakeRequest("r", list(range(8)))
    space.save(slots(request.block_hashes[:6]))
    scheduler = half(store, space)
    assert answer(scheduler, request, 8) == (40, True)
    allocate(scheduler, request, 40)
    step(scheduler)
    tell(scheduler, finished={"r"}, failed_loads={"r": {0: 3}}, load_reasons={"r": "corrupt"})
    finish(scheduler, request)
    match, load = told(store, space)
    assert (brief(match), brief(load)) == (("match", 7, 5, "absent", 6), ("load", 5, 2, "corrupt", 3))
    assert load.missing == first(request, 3)
    seen = store.maintenance.seen(space.id)
    assert seen == {"requests": 1, "asked": 7, "served": 2, "miss:absent": 2, "miss:corrupt": 3}


def test_of_several_ranks_the_first_reason_counts() -> None:
    segment = SegmentId(b"a segment")
    one = KVStoreWorkerMetadata(load_reasons={"r": "missing"}, save_reasons={segment: "held"})
    reasons = {"r": "corrupt", "s": "deadline"}
    both = one.aggregate(KVStoreWorkerMetadata(load_reasons=reasons, save_reasons={segment: "failed"}))
    assert isinstance(both, KVStoreWorkerMetadata)
    assert both.load_reasons == {"r": "missing", "s": "deadline"}
    assert both.save_reasons == {segment: "held"}


# ---- saves ------------------------------------------------------------------------------------------


def ended(scheduler: KVScheduler, reasons: dict[Any, str], *, count: int = 1) -> None:
    tell(
        scheduler,
        ended_saves={segment: (count, reason == "stored") for segment, reason in reasons.items()},
        save_reasons={segment: reason for segment, reason in reasons.items() if reason != "stored"},
    )


@pytest.mark.parametrize("reason", ["stored", "present", "held", "refused", "dropped", "failed"])
def test_each_segment_is_told_when_all_ranks_have_ended_it(store: Store, space: Space, reason: str) -> None:
    scheduler, request = half(store, space, can_load=False), FakeRequest("r", list(range(7)))
    answer(scheduler, request)
    one, two = step(scheduler, (request, 59)).saves
    ended(scheduler, {one.segment: reason, two.segment: "stored"})
    finish(scheduler, request)
    found = told(store, space)
    if reason in ("stored", "present"):
        assert found == []
        assert store.maintenance.seen(space.id) == {"offered": 7, "stored": 7}
    else:
        assert [brief(one) for one in found] == [("save", 4, 0, reason, 0)]
        assert (found[0].request, found[0].missing) == ("r", first(request, 0))
        assert store.maintenance.seen(space.id) == {"offered": 7, "stored": 3, f"unsaved:{reason}": 4}


def test_the_first_ranks_reason_is_told_when_the_last_has_ended(store: Store, space: Space) -> None:
    [group] = SCHEDULERS
    two = [replace(group, writers=2)]
    scheduler, request = half(store, space, groups=two, can_load=False), FakeRequest("r", [1, 2, 3])
    answer(scheduler, request)
    [save] = step(scheduler, (request, 27)).saves
    ended(scheduler, {save.segment: "dropped"})
    assert told(store, space) == []
    ended(scheduler, {save.segment: "failed"})
    finish(scheduler, request)
    assert [brief(one) for one in told(store, space)] == [("save", 3, 0, "dropped", 0)]


def test_what_is_not_worth_saving_is_told_once_at_the_end(opened: Any) -> None:
    store = opened(admission={"min_blocks": 9})
    space = open_space(store)
    space.register()
    scheduler, request = half(store, space, can_load=False), FakeRequest("r", list(range(8)))
    answer(scheduler, request)
    for tokens in (24, 24, 19):
        step(scheduler, (request, tokens))
    finish(scheduler, request)
    [one] = told(store, space)
    assert (brief(one), one.missing) == (("save", 8, 0, "not_admitted", 0), first(request, 0))


def test_only_what_follows_a_second_use_is_told_as_not_admitted(opened: Any) -> None:
    store = opened(admission={"second_use": True})
    space = open_space(store)
    space.register()
    space.note(digests(chain(*range(5))))
    scheduler, request = half(store, space), FakeRequest("r", list(range(8)))
    scheduler.on_new_request(request)  # type: ignore[arg-type]
    answer(scheduler, request)
    assert store.transfers.drain(PATIENCE_S)
    saves = step(scheduler, (request, 67)).saves
    assert sum(len(one.hashes) for one in saves) == 5
    finish(scheduler, request)
    saved = [one for one in told(store, space) if one.op == "save"]
    assert [brief(one) for one in saved] == [("save", 3, 0, "not_admitted", 5)]
    assert saved[0].missing == first(request, 5)


def test_an_answer_about_uses_that_came_too_late_is_no_verdict(opened: Any) -> None:
    store = opened(admission={"second_use": True})
    space = open_space(store)
    space.register()
    late = threading.Event()
    note = space.note
    space.note = lambda packed: (late.wait(PATIENCE_S), note(packed))[1]  # type: ignore[method-assign]
    scheduler, request = half(store, space), FakeRequest("r", list(range(8)))
    scheduler.on_new_request(request)  # type: ignore[arg-type]
    answer(scheduler, request)
    step(scheduler, (request, 67))
    finish(scheduler, request)
    late.set()
    assert [brief(one) for one in told(store, space) if one.op == "save"] == [("save", 8, 0, "deadline", 0)]


# ---- telling ----------------------------------------------------------------------------------------


class Recorded:
    """Calls of `Space.tell`, and when they may return."""

    def __init__(self, space: Space) -> None:
        self.batches: list[list[str]] = []
        self.go = threading.Event()
        self.go.set()
        self.threads: set[int] = set()
        self.works = True
        space.tell = self._tell  # type: ignore[method-assign]

    def _tell(self, outcomes: Any, asked: bytes | None = b"") -> bool:
        self.threads.add(threading.get_ident())
        self.go.wait(PATIENCE_S)
        self.batches.append([one.request for one in outcomes])
        return self.works


def note(outcomes: Outcomes, space: Space, *names: str, reason: str = "absent") -> None:
    for name in names:
        outcomes.note(space, name, "match", asked=1, served=0, reason=reason)


def test_a_batch_a_second_or_when_there_are_many_or_when_the_engine_goes_idle(
    store: Store, space: Space
) -> None:
    recorded, outcomes = Recorded(space), Outcomes(store)
    note(outcomes, space, "a")
    outcomes.tick()
    assert store.transfers.drain(PATIENCE_S)
    assert recorded.batches == [["a"]]
    note(outcomes, space, "b", "c")
    outcomes.tick()
    assert store.transfers.drain(PATIENCE_S)
    assert recorded.batches == [["a"]]
    outcomes.tick(idle=True)
    assert store.transfers.drain(PATIENCE_S)
    assert recorded.batches[1:] == [["b", "c"]]
    many = [str(i) for i in range(BATCH)]
    note(outcomes, space, *many)
    outcomes.tick()
    assert store.transfers.drain(PATIENCE_S)
    assert recorded.batches[2:] == [many]
    assert threading.get_ident() not in recorded.threads


def test_the_engine_never_waits_and_what_is_too_much_is_dropped_and_counted(
    store: Store, space: Space
) -> None:
    recorded, outcomes = Recorded(space), Outcomes(store)
    recorded.go.clear()
    note(outcomes, space, "first")
    outcomes.tick()
    while not recorded.threads:
        time.sleep(0.001)
    began = time.monotonic()
    note(outcomes, space, *map(str, range(MOST + 10)))
    for _ in range(100):
        outcomes.tick(idle=True)
    assert time.monotonic() - began < PATIENCE_S / 2
    assert store.counters.snapshot()["outcomes_lost"] == 10
    recorded.go.set()
    assert store.transfers.drain(PATIENCE_S)
    # Asked for while it was under way: all of it goes, in order.
    assert [name for batch in recorded.batches for name in batch][:3] == ["first", "0", "1"]
    assert max(map(len, recorded.batches)) <= BATCH


def test_what_comes_while_others_are_told_does_not_wait_for_a_step(store: Store, space: Space) -> None:
    recorded, outcomes = Recorded(space), Outcomes(store)
    recorded.go.clear()
    note(outcomes, space, "a")
    outcomes.tick()
    while not recorded.threads:
        time.sleep(0.001)
    note(outcomes, space, "b")
    outcomes.tick(idle=True)
    recorded.go.set()
    assert store.transfers.drain(PATIENCE_S)
    assert recorded.batches == [["a"], ["b"]]


class LockThen:
    """A lock after which, where a call thread leaves it, something happens once."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._lock, self._then, self._engine = threading.Lock(), [then], threading.get_ident()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()
        if threading.get_ident() != self._engine and self._then:
            self._then.pop()()


def test_what_comes_as_a_call_ends_does_not_wait_for_a_step(store: Store, space: Space) -> None:
    recorded, outcomes = Recorded(space), Outcomes(store)

    def idle() -> None:
        note(outcomes, space, "b")
        outcomes.tick(idle=True)

    outcomes._lock = LockThen(idle)  # type: ignore[assignment]
    note(outcomes, space, "a")
    outcomes.tick()
    assert store.transfers.drain(PATIENCE_S)
    assert recorded.batches == [["a"], ["b"]]


def test_while_the_index_is_down_nothing_is_told_and_nothing_lost(store: Store, space: Space) -> None:
    breaker = Breaker("index", store.settings.breaker)
    recorded, outcomes = Recorded(space), Outcomes(with_parts(store, index_breaker=breaker))
    down, later = True, ["b"]

    def ping() -> None:
        if down:
            if later:
                note(outcomes, space, later.pop())  # meanwhile
            raise TransientError("down")

    store.maintenance.ping = ping  # type: ignore[method-assign]
    # The outcomes themselves say that something is wrong.
    note(outcomes, space, "a", reason="unavailable")
    outcomes.tick(idle=True)
    assert store.transfers.drain(PATIENCE_S)
    outcomes.tick(idle=True)
    assert store.transfers.drain(PATIENCE_S)
    assert recorded.batches == []
    down = False
    outcomes.tick(idle=True)
    assert store.transfers.drain(PATIENCE_S)
    assert recorded.batches == [["a", "b"]]
    assert store.counters.snapshot()["outcomes_lost"] == 0


def test_with_an_open_breaker_not_even_that_is_asked(store: Store, space: Space) -> None:
    breaker = Breaker("index", store.settings.breaker)
    recorded, outcomes = Recorded(space), Outcomes(with_parts(store, index_breaker=breaker))
    store.maintenance.ping = lambda: pytest.fail("asked")  # type: ignore[method-assign]
    for _ in range(store.settings.breaker.failures):
        with pytest.raises(TransientError), breaker.guard():
            raise TransientError("down")
    note(outcomes, space, "a", reason="breaker_open")
    outcomes.tick(idle=True)
    assert store.transfers.drain(PATIENCE_S)
    assert recorded.batches == []


def test_a_call_that_failed_is_not_made_again(store: Store, space: Space) -> None:
    """It may have been carried out, and twice would be wrong in every total."""
    recorded, outcomes = Recorded(space), Outcomes(store)
    recorded.works = False
    note(outcomes, space, "a")
    outcomes.tick()
    assert store.transfers.drain(PATIENCE_S)
    recorded.works = True
    note(outcomes, space, "b")
    outcomes.tick(idle=True)
    assert store.transfers.drain(PATIENCE_S)
    assert recorded.batches == [["a"], ["b"]]
    assert store.counters.snapshot()["outcomes_lost"] == 1


def test_a_bug_costs_its_batch_and_not_what_follows(store: Store, space: Space) -> None:
    recorded, outcomes = Recorded(space), Outcomes(store)

    def broken() -> bytes:
        raise ZeroDivisionError

    outcomes.note(space, "a", "match", asked=1, served=0, reason="absent", missing=broken)
    outcomes.tick()
    assert store.transfers.drain(PATIENCE_S)
    note(outcomes, space, "b")
    outcomes.tick(idle=True)
    assert store.transfers.drain(PATIENCE_S)
    assert recorded.batches == [["b"]]


def test_outcomes_of_two_namespaces_go_where_they_belong(store: Store, space: Space) -> None:
    other = open_space(store, model="another")
    other.register()
    outcomes = Outcomes(store)
    note(outcomes, space, "a")
    note(outcomes, other, "b")
    note(outcomes, space, "c")
    outcomes.tick()
    assert [one.request for one in told(store, space)] == ["a", "c"]
    assert [one.request for one in told(store, other)] == ["b"]


# ---- costs ------------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run(cost: TokenCost, clock: Clock, tokens: int, took: float, *, requests: int = 1) -> None:
    cost.sent(tokens, requests)
    clock.now += took
    cost.ended()


def test_steps_one_by_one_with_gaps_between_them() -> None:
    clock = Clock()
    cost = TokenCost(clock)
    for _ in range(20):
        run(cost, clock, 2048, 0.2048)
        clock.now += 60.0
    assert cost.token_us == pytest.approx(100.0)


def test_steps_that_are_sent_ahead_are_not_counted_twice() -> None:
    clock = Clock()
    cost = TokenCost(clock)
    cost.sent(1000, 1)
    for _ in range(20):
        cost.sent(1000, 1)  # while the one before it is computed
        clock.now += 0.05
        cost.ended()
    clock.now += 0.05
    cost.ended()
    assert cost.token_us == pytest.approx(50.0)


def test_decoding_and_drafts_say_nothing_about_prompts() -> None:
    clock = Clock()
    cost = TokenCost(clock)
    run(cost, clock, 256, 0.03, requests=256)
    run(cost, clock, 5 * 256, 0.03, requests=256)
    run(cost, clock, 20, 0.03)
    assert cost.token_us == 0.0
    run(cost, clock, 4096, 0.4, requests=65)
    assert cost.token_us == pytest.approx(0.4e6 / 4096)


def test_an_outlier_moves_it_little_and_a_faster_machine_is_noticed() -> None:
    clock = Clock()
    cost = TokenCost(clock)
    for _ in range(10):
        run(cost, clock, 2048, 0.2048)
    run(cost, clock, 2048, 30.0)
    assert 100 < cost.token_us < 150
    for _ in range(40):
        run(cost, clock, 2048, 0.02048)
    assert cost.token_us == pytest.approx(10.0, rel=0.05)


def test_ends_that_never_come_cost_nothing() -> None:
    clock = Clock()
    cost = TokenCost(clock)
    for _ in range(10_000):
        cost.sent(2048, 1)
    assert len(cost._sent) < 100
    assert TokenCost(clock).ended() is None


def test_what_is_saved_carries_what_it_took_and_a_load_adds_it_up(store: Store, space: Space) -> None:
    scheduler, request = half(store, space, can_load=False), FakeRequest("r", list(range(8)))
    scheduler.cost.token_us = 125.0
    answer(scheduler, request)
    saves = step(scheduler, (request, 67)).saves
    assert [one.cost_us for one in saves] == [4 * TOKENS * 125] * 2
    space.save(slots(request.block_hashes[:4]), cost_us=saves[0].cost_us)
    space.save(slots(request.block_hashes), cost_us=2 * saves[0].cost_us)
    reader, again = half(store, space), FakeRequest("s", list(range(8)))
    assert answer(reader, again, 16) == (48, True)
    allocate(reader, again, 48)
    step(reader)
    report(reader, finished={"s"})
    stats = reader.take_stats()
    assert stats is not None
    # Six of eight blocks; records round down to 11 bits.
    assert stats.data["counts"]["saved_compute_seconds"] == pytest.approx(6 * TOKENS * 125e-6, rel=0.001)


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_items_share_what_their_encoder_took(device: str) -> None:
    began = time.perf_counter()
    encoding = Encoding(torch.device(device))
    if device == "cpu":
        time.sleep(0.05)
    else:
        torch.cuda._sleep(100_000_000)
    encoding.made(30)
    most_us = (time.perf_counter() - began) * 1e6
    time.sleep(0.1)
    encoding.made(10)
    one, two = encoding.cost_us(30), encoding.cost_us(10)
    assert one == pytest.approx(3 * two, rel=0.01)
    if device == "cpu":
        assert 50_000 <= one + two + 2 < most_us + 2
    else:
        assert one + two > 10_000
    assert Encoding(torch.device(device)).cost_us(1) == 0


def test_an_item_is_saved_with_its_share_when_its_step_is_over(store: Store) -> None:
    space = open_space(store)
    worker = ECWorker(store, dtype=torch.float32, device=lambda: torch.device("cpu"), saves=lambda: True)
    metadata = ECStoreMetadata(canonical_json(space.namespace), {}, {"a": key("a")})
    worker.use(metadata)
    began = time.perf_counter()
    worker.load(metadata, {})
    time.sleep(0.02)
    cache = {"a": torch.zeros(ROWS, WIDTH), "b": torch.zeros(3 * ROWS, WIDTH)}
    worker.save(metadata, cache, "a")
    most_us = (time.perf_counter() - began) * 1e6
    worker.save(metadata, cache, "b")
    assert store.counters.snapshot()["save_blocks{stored}"] == 0
    assert worker.take_report() is None
    assert store.transfers.drain(PATIENCE_S)
    [run] = space.match(digest(key("a"))).runs
    assert 5_000 <= run.record.cost_us + 10 <= most_us / 4 + 10
    made = worker.take_report()
    assert made is not None
    assert made.saved == {key("a"): "stored"}
    assert worker.take_report() is None


# ---- items ------------------------------------------------------------------------------------------


def outcomes_of(store: Store) -> list[tuple[Any, ...]]:
    return [
        (one.request, one.op, one.asked, one.served, one.reason) for one in told(store, open_space(store))
    ]


def test_items_are_told_one_by_one(store: Store, tmp_path: Path) -> None:
    put(open_space(store), "here")
    put(open_space(store), "odd", rows=ROWS + 1)
    engine = FakeEngine(store)
    request = ItemRequest("r", ["here", "odd", "gone"])
    engine.run(request)
    engine.finish(request)
    found = outcomes_of(store)
    assert found == [("r", "match", 1, 0, "mismatch"), ("r", "match", 1, 0, "absent")]
    assert [one.missing for one in told(store, open_space(store))] == [
        digest(key("odd")),
        digest(key("gone")),
    ]
    seen = store.maintenance.seen(open_space(store).id)
    assert seen == {"requests": 3, "asked": 3, "served": 1, "miss:mismatch": 1, "miss:absent": 1}
    # In the engine's own cache now: nothing is asked for.
    engine.run(ItemRequest("s", ["here"]))
    assert store.maintenance.seen(open_space(store).id)["requests"] == 3
    engine.half.shutdown()


def test_saves_of_items_are_told_as_the_workers_report_them(opened: Any) -> None:
    store = opened(admission={"second_use": True})
    open_space(store).register()
    engine = FakeEngine(store)
    request = ItemRequest("r", ["new"])
    assert engine.run(request).saves == set()
    engine.finish(request)
    assert outcomes_of(store)[-1] == ("r", "save", 1, 0, "not_admitted")
    engine.half.shutdown()
    other = opened()
    engine = FakeEngine(other)
    request = ItemRequest("s", ["newer"])
    assert engine.run(request).saves == {"newer"}
    engine.half.update_connector_output(
        SimpleNamespace(ec_connector_worker_meta=ECStoreWorkerMetadata(saved={key("newer"): "held"}))  # type: ignore[arg-type]
    )
    engine.finish(request)
    assert outcomes_of(other)[-1] == ("s", "save", 1, 0, "held")
    engine.half.shutdown()
