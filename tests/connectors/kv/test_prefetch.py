"""Requests that wait have their payloads fetched to the node's folder, and nobody pays for that."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.ahead import prefetch, queued
from connectors.ahead.prefetch import Prefetch
from connectors.choice.cost import Prefill
from connectors.engine.step import RequestView
from connectors.kv.scheduler import KVScheduler
from kvstore.build import open_store
from kvstore.conformance.faulty import Rule
from kvstore.threads.transfers import AHEAD_THREADS
from tests.connectors.kv.world import allocate, answer, half, report, tell
from tests.connectors.node import Gate, Node
from tests.fake_vllm import TOKENS, FakeFeature, FakePlace, FakeRequest, step
from tests.store.world import open_space
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def node(**more: Any) -> Node:
        made.append(Node(tmp_path, **more))
        return made[-1]

    yield node
    for one in made:
        one.close()


def passed_over(scheduler: KVScheduler, request: Any) -> None:
    """A request arrives at an engine that is full."""
    scheduler.on_new_request(request)
    step(scheduler)


def engine(node: Node, **changes: Any) -> KVScheduler:
    """An engine's scheduler half on this node, whose prefetch has a clock of the test's."""
    made = half(node.store, node.space, **changes)
    if isinstance(made.prefetch, Prefetch):
        made.prefetch._clock = node.clock
    return made


def prefetched(scheduler: KVScheduler) -> Prefetch:
    made = scheduler.prefetch
    assert isinstance(made, Prefetch)
    return made


def test_a_request_that_waits_finds_its_payloads_on_the_node(make: Any) -> None:
    node = make()
    node.save(*range(6))
    scheduler, request = engine(node), FakeRequest("r", [*range(6), 77])
    passed_over(scheduler, request)
    until(lambda: node.counted()[0] == 3)
    assert node.fetched() == node.copies() == 3
    assert answer(scheduler, request) == (48, True)
    allocate(scheduler, request, 48)
    [load] = step(scheduler).loads[0].groups
    assert set(load.tiers.values()) == {"folder"} and len(load.tiers) == 3
    assert node.counted() == (3, 3, 0, 0)
    report(scheduler, finished={"r"})
    scheduler.request_finished(request, [[]])
    assert prefetched(scheduler).held == 0


def test_a_request_that_starts_at_once_has_nothing_fetched(make: Any) -> None:
    node = make()
    node.save(*range(6))
    scheduler, request = engine(node), FakeRequest("r", [*range(6), 77])
    scheduler.on_new_request(request)
    # `answer` asks in step after step: "later" means that the scheduler has come to it.
    assert answer(scheduler, request) == (48, True)
    allocate(scheduler, request, 48)
    assert set(step(scheduler).loads[0].groups[0].tiers.values()) == {"disk"}
    step(scheduler)
    assert node.store.transfers.drain(PATIENCE_S)
    assert node.fetched() == 0 and node.counted() == (0, 0, 0, 0)


def test_an_answer_that_comes_after_the_step_is_fetched_without_another_step(make: Any) -> None:
    node = make()
    node.save(*range(2))
    matches, late = node.space.match, threading.Event()
    node.space.match = lambda packed, **more: late.wait(PATIENCE_S) and matches(packed, **more)
    scheduler = engine(node)
    passed_over(scheduler, FakeRequest("r", range(2)))
    late.set()
    until(lambda: node.counted()[0] == 1)


def test_what_an_aborted_request_has_not_got_yet_is_not_fetched(make: Any) -> None:
    node = make()
    node.save(*range(10))
    gate = Gate(node)
    scheduler, request = engine(node), FakeRequest("r", range(10))
    passed_over(scheduler, request)
    until(lambda: gate.waiting == AHEAD_THREADS)
    scheduler.request_finished(request, [[]])
    gate.open()
    assert node.store.transfers.drain(PATIENCE_S)
    assert node.fetched() == AHEAD_THREADS
    assert node.counted() == (AHEAD_THREADS, 0, AHEAD_THREADS, 0)
    assert prefetched(scheduler).held == 0


def test_what_no_request_has_loaded_yet_stays_within_the_budget(make: Any) -> None:
    node = make()
    size = node.save(*range(2))
    node.save(*range(20, 30))
    node = make(prefetch_bytes=3 * size)
    scheduler = engine(node)
    first, second = FakeRequest("first", [0, 1, 7]), FakeRequest("second", [*range(20, 30), 7])
    passed_over(scheduler, first)
    until(lambda: node.counted()[0] == 1)
    passed_over(scheduler, second)
    until(lambda: node.counted()[0] == 3)
    assert node.store.transfers.drain(PATIENCE_S) and node.fetched() == 3
    # The first starts, and what it had makes room for one more.
    assert answer(scheduler, first) == (16, True)
    allocate(scheduler, first, 16)
    until(lambda: node.counted()[0] == 4)
    assert node.store.transfers.drain(PATIENCE_S) and node.fetched() == 4
    # The second is aborted: what it had was fetched for nothing, and counts for a while.
    scheduler.request_finished(second, [[]])
    assert node.counted() == (4, 1, 3, 0)
    node.save(*range(40, 42))
    third = FakeRequest("third", [40, 41, 7])
    passed_over(scheduler, third)
    until(lambda: prefetched(scheduler)._queue)
    step(scheduler)
    assert node.store.transfers.drain(PATIENCE_S) and node.fetched() == 4
    node.clock.now += prefetch._WASTE_S
    step(scheduler)
    until(lambda: node.counted()[0] == 5)


def test_no_more_than_a_quarter_of_the_folder_is_filled_ahead(make: Any) -> None:
    assert prefetched(engine(make()))._budget == (64 << 20) // 4


def test_loads_from_beyond_the_folder_go_first(make: Any) -> None:
    node = make()
    node.save(*range(2))
    node.save(*range(20, 26))
    scheduler = engine(node)
    loads, waits = FakeRequest("loads", [0, 1, 7]), FakeRequest("waits", [*range(20, 26), 7])
    scheduler.on_new_request(loads)
    assert answer(scheduler, loads) == (16, True)
    allocate(scheduler, loads, 16)
    passed_over(scheduler, waits)
    until(lambda: prefetched(scheduler)._queue)
    step(scheduler)
    assert node.store.transfers.drain(PATIENCE_S) and node.fetched() == 0
    report(scheduler, finished={"loads"})
    until(lambda: node.counted()[0] == 3)
    # A load from the folder is in nobody's way.
    assert answer(scheduler, waits) == (48, True)
    allocate(scheduler, waits, 48)
    node.save(*range(40, 42))
    passed_over(scheduler, FakeRequest("next", [40, 41, 7]))
    until(lambda: node.counted()[0] == 4)


def test_a_load_that_begins_meets_no_more_than_what_is_on_its_way(make: Any) -> None:
    node = make()
    node.save(*range(2))
    node.save(*range(20, 30))
    gate = Gate(node)
    scheduler = engine(node)
    waits, loads = FakeRequest("waits", [*range(20, 30), 7]), FakeRequest("loads", [0, 1, 7])
    passed_over(scheduler, waits)
    until(lambda: gate.waiting == AHEAD_THREADS)
    scheduler.on_new_request(loads)
    assert answer(scheduler, loads) == (16, True)
    allocate(scheduler, loads, 16)
    gate.open()
    until(lambda: node.counted()[0] == AHEAD_THREADS)
    step(scheduler)
    assert node.store.transfers.drain(PATIENCE_S) and node.fetched() == AHEAD_THREADS
    report(scheduler, finished={"loads"}, failed={"loads": 0})
    until(lambda: node.counted()[0] == 5)


def test_two_requests_with_one_head_have_it_fetched_once(make: Any) -> None:
    node = make()
    node.save(*range(4))
    scheduler = engine(node)
    requests = [FakeRequest(name, [*range(4), 70 + i]) for i, name in enumerate("ab")]
    for request in requests:
        passed_over(scheduler, request)
    until(lambda: node.counted()[0] == 2)
    until(lambda: all(len(one.waiting) == 2 for one in prefetched(scheduler)._segments.values()))
    scheduler.request_finished(requests[0], [[]])
    assert node.store.transfers.drain(PATIENCE_S) and node.counted() == (2, 0, 0, 0)
    assert answer(scheduler, requests[1]) == (32, True)
    allocate(scheduler, requests[1], 32)
    assert set(step(scheduler).loads[0].groups[0].tiers.values()) == {"folder"}
    assert node.counted() == (2, 2, 0, 0) and node.fetched() == 2


def test_all_ranks_parts_are_fetched_before_a_segment_is_near(make: Any) -> None:
    node = make()
    node.save(*range(2), parts=3)
    gate = Gate(node)
    scheduler, request = engine(node, ranks=3), FakeRequest("r", [0, 1, 7])
    passed_over(scheduler, request)
    until(lambda: gate.waiting)
    tracked = scheduler.requests.get("r")
    assert tracked is not None and tracked.match is not None and (found := tracked.match.poll(0)) is not None
    assert set(found.tiers.values()) == {"disk"}
    gate.open()
    until(lambda: node.counted()[0] == 1)
    assert set(found.tiers.values()) == {"folder"} and node.copies() == 3


def test_parts_that_are_not_begun_wait_for_a_load_as_well(make: Any) -> None:
    node = make()
    node.save(*range(2), parts=3)
    node.save(*range(20, 22))
    gate = Gate(node)
    scheduler = engine(node, ranks=1)
    passed_over(scheduler, FakeRequest("waits", [0, 1, 7]))
    until(lambda: gate.waiting)
    loads = FakeRequest("loads", [20, 21, 7])
    scheduler.on_new_request(loads)
    assert answer(scheduler, loads) == (16, True)
    allocate(scheduler, loads, 16)
    gate.open()
    until(lambda: prefetched(scheduler)._parted)
    step(scheduler)
    assert node.store.transfers.drain(PATIENCE_S) and node.fetched() == 1
    report(scheduler, finished={"loads"})
    until(lambda: node.counted()[0] == 1)


def test_after_a_failure_nothing_is_begun_for_a_moment(make: Any) -> None:
    node = make()
    node.save(*range(6))
    node.plan.replace(Rule("transient", verbs=("read",), times=1))
    reads, failed = itertools.count(), threading.Event()
    # The first one fails before another has come.
    node.slow.before = lambda verb, name: verb == "read" and next(reads) and failed.wait(PATIENCE_S)
    scheduler, request = engine(node), FakeRequest("r", range(6))
    passed_over(scheduler, request)
    until(lambda: prefetched(scheduler)._parted)
    failed.set()
    assert node.store.transfers.drain(PATIENCE_S)
    before = node.fetched()
    assert before <= AHEAD_THREADS
    step(scheduler)
    assert node.store.transfers.drain(PATIENCE_S) and node.fetched() == before
    node.clock.now += prefetch._PAUSE_S
    step(scheduler)
    until(lambda: node.counted() == (3, 0, 0, 0))


def test_what_fails_twice_is_given_up(make: Any) -> None:
    node = make()
    node.save(*range(2))
    node.plan.replace(Rule("missing", verbs=("read",)))
    scheduler, request = engine(node), FakeRequest("r", range(2))
    passed_over(scheduler, request)
    until(lambda: prefetched(scheduler)._parted)
    node.clock.now += prefetch._PAUSE_S
    step(scheduler)
    until(lambda: node.counted() == (0, 0, 0, 1))
    node.clock.now += prefetch._PAUSE_S
    step(scheduler)
    assert node.store.transfers.drain(PATIENCE_S) and node.fetched() == 2
    scheduler.request_finished(request, [[]])
    assert prefetched(scheduler).held == 0


@pytest.mark.parametrize("what", ["payloads_down", "reads_scarce"])
def test_nothing_is_begun_while_the_ranks_cannot_read(make: Any, what: str) -> None:
    node = make()
    node.save(*range(2))
    scheduler = engine(node)
    scheduler.on_new_request(FakeRequest("r", range(2)))
    until(lambda: prefetched(scheduler)._requests["r"].found)
    tell(scheduler, **{what: {0: True, 1: True}})
    tell(scheduler, **{what: {1: False}})
    step(scheduler)
    assert node.store.transfers.drain(PATIENCE_S) and node.fetched() == 0
    tell(scheduler, **{what: {0: False}})
    step(scheduler)
    until(lambda: node.counted() == (1, 0, 0, 0))


def test_a_segment_that_another_engine_has_brought_meanwhile_is_not_counted(make: Any) -> None:
    node = make()
    node.save(*range(4))
    scheduler, request = engine(node), FakeRequest("r", [*range(4), 7])
    prefetched(scheduler)._paused_until = float("inf")
    passed_over(scheduler, request)
    until(lambda: prefetched(scheduler)._queue)
    for payload in node.slow.list():
        assert node.tier.fill(payload.name, payload.nbytes)
    before = node.fetched()
    prefetched(scheduler)._paused_until = 0.0
    step(scheduler)
    assert node.store.transfers.drain(PATIENCE_S)
    assert node.fetched() == before and node.counted() == (0, 0, 0, 0)
    assert answer(scheduler, request) == (32, True)
    allocate(scheduler, request, 32)
    assert set(step(scheduler).loads[0].groups[0].tiers.values()) == {"folder"}


def test_a_reset_forgets_what_waits(make: Any) -> None:
    node = make()
    node.save(*range(10))
    gate = Gate(node)
    scheduler = engine(node)
    passed_over(scheduler, FakeRequest("r", range(10)))
    until(lambda: gate.waiting == AHEAD_THREADS)
    scheduler.reset_cache()
    gate.open()
    assert node.store.transfers.drain(PATIENCE_S)
    assert node.fetched() == AHEAD_THREADS and prefetched(scheduler).held == 0


@pytest.mark.parametrize("why", ["budget", "one tier", "saves only", "several nodes"])
def test_nothing_is_fetched_ahead_where_it_makes_no_sense(make: Any, why: str, tmp_path: Path) -> None:
    node = make(**{"prefetch_bytes": 0} if why == "budget" else {})
    changes = {"saves only": {"can_load": False}, "several nodes": {"one_node": False}}.get(why, {})
    store, space = node.store, node.space
    if why == "one tier":
        store = open_store({"payloads": node.shared, "index": node.index})
        space = open_space(store)
    made = half(store, space, **changes)
    assert not isinstance(made.prefetch, Prefetch)
    if why == "one tier":
        store.close()


@pytest.mark.parametrize("why", ["never", "faster"])
def test_what_would_not_be_loaded_from_the_folder_either_is_not_fetched(
    make: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    node = make(kv={"load": "never" if why == "never" else "adaptive"})
    node.save(*range(6))
    scheduler, request = engine(node), FakeRequest("r", [*range(6), 77])
    if why == "faster":
        monkeypatch.setattr(scheduler.cost, "prefill", lambda: Prefill(1e-6))
    passed_over(scheduler, request)
    tracked = scheduler.requests.get("r")
    assert tracked is not None and tracked.match is not None
    until(lambda: tracked.match.poll(0))
    step(scheduler)
    assert node.store.transfers.drain(PATIENCE_S) and node.fetched() == 0
    monkeypatch.setattr(scheduler.cost, "prefill", lambda: Prefill(1e6))
    passed_over(scheduler, FakeRequest("slow", [*range(6), 77]))
    if why == "faster":
        until(lambda: node.counted() == (3, 0, 0, 0))


# ---- what the EC connector is told ------------------------------------------------------------------


class Listener:
    """An EC connector: what it was told, requests and tokens."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []
        queued.listen(self)

    def queued(self, request: RequestView, tokens: int) -> None:
        self.told.append((request.request_id, tokens))


def picture(name: str, *steps: int) -> FakeRequest:
    """A request with an image behind its blocks."""
    place = FakePlace(TOKENS * len(steps), 1)
    return FakeRequest(name, steps, mm_features=[FakeFeature("image", mm_position=place)])


def test_requests_with_items_that_wait_are_told_with_what_will_be_loaded(make: Any) -> None:
    node, listener = make(), Listener()
    node.save(*range(6))
    scheduler = engine(node)
    requests = [picture("stored", *range(6), 77), picture("absent", 5, 6), FakeRequest("text", range(6))]
    for request in requests:
        scheduler.on_new_request(request)
    until(lambda: step(scheduler) and len(listener.told) == 2)
    step(scheduler)
    assert sorted(listener.told) == [("absent", 0), ("stored", 48)]


def test_requests_that_start_or_end_are_told_to_nobody(make: Any) -> None:
    node, listener = make(), Listener()
    matches, late = node.space.match, threading.Event()
    node.space.match = lambda packed, **more: late.wait(PATIENCE_S) and matches(packed, **more)
    scheduler = engine(node)
    starts, ends = picture("starts", 1, 2), picture("ends", 3, 4)
    for request in (starts, ends):
        passed_over(scheduler, request)
    scheduler.update_state_after_alloc(starts, None, 0)  # type: ignore[arg-type]
    scheduler.request_finished(ends, [[]])
    late.set()
    assert node.store.transfers.drain(PATIENCE_S)
    step(scheduler)
    assert listener.told == []


def test_a_request_that_is_not_matched_is_told_at_once(make: Any) -> None:
    node, listener = make(), Listener()
    scheduler = engine(node)
    request = picture("r", 1, 2)
    request.skip_reading_prefix_cache = True
    passed_over(scheduler, request)
    assert listener.told == [("r", 0)]
