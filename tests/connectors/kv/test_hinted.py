"""A hint brings what a session has stored to the node's folder, and its request pays nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.ahead import prefetch, segments
from connectors.ahead.prefetch import Prefetch
from connectors.kv.scheduler import KVScheduler
from kvstore.conformance.faulty import Rule
from kvstore.errors import TransientError
from kvstore.keys import NO_SALT, session_id
from kvstore.threads.transfers import AHEAD_THREADS
from tests.connectors.kv.world import allocate, answer, half, report
from tests.connectors.node import Gate, Node
from tests.fake_vllm import TABLES, FakeAction, FakeEnvelope, FakeRequest, step
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine

MINE, YOURS = session_id(NO_SALT, "mine"), session_id(NO_SALT, "yours")
ASK = {"kv_hints": {"prefetch": True}}


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Node]]:
    made: list[Node] = []

    def node(**more: Any) -> Node:
        made.append(Node(tmp_path, **more))
        return made[-1]

    yield node
    for one in made:
        one.close()


def engine(node: Node, **changes: Any) -> KVScheduler:
    made = half(node.store, node.space, **changes)
    if isinstance(made.prefetch, Prefetch):
        made.prefetch._clock = node.clock
    return made


def hinted(node: Node) -> int:
    return node.store.counters.snapshot()["prefetch_segments{hinted}"]


def held(scheduler: KVScheduler) -> int:
    assert isinstance(scheduler.prefetch, Prefetch)
    return scheduler.prefetch.held


def tiny(name: str = "tiny", session: str = "mine", **more: Any) -> FakeRequest:
    """A request of less than a block, which is looked up nowhere."""
    return FakeRequest(name, (), session_id=session, **{"kv_transfer_params": ASK} | more)


def send(scheduler: KVScheduler, request: FakeRequest) -> None:
    """The request arrives, and the scheduler begins it at once, computes it and ends it."""
    scheduler.on_new_request(request)
    answer(scheduler, request)
    scheduler.update_state_after_alloc(request, None, 0)  # type: ignore[arg-type]
    step(scheduler)
    scheduler.request_finished(request, TABLES)  # type: ignore[arg-type]


def loads(scheduler: KVScheduler, request: FakeRequest, tokens: int) -> set[str]:
    """The request is looked up and begins to load; returns where its segments lie."""
    scheduler.on_new_request(request)
    assert answer(scheduler, request) == (tokens, True)
    allocate(scheduler, request, tokens)
    return set(step(scheduler).loads[0].groups[0].tiers.values())


@pytest.mark.parametrize("how", ["words", "envelope"])
def test_a_tiny_request_brings_what_its_session_has_stored(make: Any, how: str) -> None:
    node = make()
    node.save(*range(6), session=MINE)
    node.save(*range(20, 24), session=YOURS)
    node.save(*range(30, 34))
    scheduler = engine(node)
    said = {"kv_hints": FakeEnvelope([FakeAction("kv.prefetch")])} if how == "envelope" else {}
    send(scheduler, tiny(**{"kv_transfer_params": {}} | said) if said else tiny())
    until(lambda: node.counted()[0] == 3)
    assert node.store.transfers.drain(PATIENCE_S)
    assert node.fetched() == node.copies() == hinted(node) == 3 and held(scheduler) == 0
    request = FakeRequest("r", [*range(6), 77], session_id="mine")
    assert loads(scheduler, request, 48) == {"folder"}
    assert node.counted() == (3, 3, 0, 0)
    report(scheduler, finished={"r"})
    scheduler.request_finished(request, TABLES)  # type: ignore[arg-type]
    assert held(scheduler) == 0


def test_it_brings_what_its_request_has_found_as_well(make: Any) -> None:
    """A prompt that others use too, which is computed here since that is faster than the bucket."""
    node = make(kv={"min_load_blocks": 99})
    node.save(*range(4))
    node.save(*range(20, 24), session=MINE)
    scheduler = engine(node)
    send(scheduler, FakeRequest("r", [*range(4), 77], session_id="mine", kv_transfer_params=ASK))
    until(lambda: node.counted()[0] == 4)
    assert hinted(node) == 4


def test_what_its_request_loads_is_not_fetched_beside_it(make: Any) -> None:
    node = make()
    node.save(*range(4))
    node.save(*range(20, 24), session=MINE)
    scheduler = engine(node)
    request = FakeRequest("r", [*range(4), 77], session_id="mine", kv_transfer_params=ASK)
    assert loads(scheduler, request, 32) == {"disk"}
    until(lambda: scheduler.prefetch._later)  # type: ignore[attr-defined]
    step(scheduler)
    assert node.store.transfers.drain(PATIENCE_S) and node.fetched() == 0
    report(scheduler, finished={"r"})
    until(lambda: node.counted()[0] == 4)


def test_nothing_of_a_hint_is_asked_before_its_request_is_decided(make: Any) -> None:
    node = make()
    node.save(*range(4), session=MINE)
    matches, late, asked = node.space.match, threading.Event(), threading.Event()
    owned, threads = node.space.owned, set[int]()
    node.space.match = lambda packed, **more: late.wait(PATIENCE_S) and matches(packed, **more)

    def listed(session: Any) -> Any:
        threads.add(threading.get_ident())
        asked.set()
        return owned(session)

    node.space.owned = listed
    scheduler = engine(node)
    request = FakeRequest("r", [*range(4), 77], session_id="mine", kv_transfer_params=ASK)
    scheduler.on_new_request(request)
    for _ in range(3):
        assert scheduler.get_num_new_matched_tokens(request, 0) == (None, False)
        step(scheduler)
    assert not asked.is_set()
    late.set()
    assert answer(scheduler, request) == (32, True)
    allocate(scheduler, request, 32)
    step(scheduler)
    assert asked.wait(PATIENCE_S) and threading.get_ident() not in threads
    step(scheduler)
    assert node.store.transfers.drain(PATIENCE_S) and len(threads) == 1, "once for a request"


def test_a_hint_of_a_request_that_waits_is_followed_while_it_waits(make: Any) -> None:
    node = make()
    node.save(*range(4), session=MINE)
    scheduler = engine(node)
    scheduler.on_new_request(tiny())
    step(scheduler)
    until(lambda: node.counted()[0] == 2)
    assert hinted(node) == 2


def test_a_hint_of_an_aborted_request_is_followed(make: Any) -> None:
    node = make()
    node.save(*range(4), session=MINE)
    scheduler, request = engine(node), tiny()
    scheduler.on_new_request(request)
    scheduler.request_finished(request, TABLES)  # type: ignore[arg-type]
    until(lambda: hinted(node) == 2)


def test_what_waits_goes_first(make: Any) -> None:
    node = make()
    node.save(*range(6), session=MINE)
    node.save(*range(20, 24))
    scheduler = engine(node)
    scheduler.prefetch._paused_until = float("inf")  # type: ignore[attr-defined]
    send(scheduler, tiny())
    until(lambda: len(scheduler.prefetch._later) == 3)  # type: ignore[attr-defined]
    # One waits for what the hint names, and another for something else.
    for name, steps in (("one", range(20, 24)), ("two", range(2))):
        scheduler.on_new_request(FakeRequest(name, steps))
        step(scheduler)
    until(lambda: len(scheduler.prefetch._queue) == 3)  # type: ignore[attr-defined]
    order: list[Any] = []
    following = scheduler.prefetch._next  # type: ignore[attr-defined]

    def noted() -> Any:
        if (one := following()) is not None:
            order.append(one.segment)
        return one

    scheduler.prefetch._next = noted  # type: ignore[attr-defined]
    scheduler.prefetch._paused_until = 0.0  # type: ignore[attr-defined]
    step(scheduler)
    until(lambda: node.counted()[0] == 5)
    assert set(order[3:]) == {run.segment for run in node.space.owned(MINE)[1:]}


def test_hints_fill_no_more_than_half_of_the_budget_until_they_are_over(make: Any) -> None:
    node = make()
    size = node.save(*range(6), session=MINE)
    node.save(*range(20, 26), session=YOURS)
    node = make(prefetch_bytes=8 * size + 1)
    scheduler = engine(node)
    send(scheduler, tiny("a"))
    until(lambda: node.counted()[0] == 3)
    send(scheduler, tiny("b", "yours"))
    until(lambda: node.counted()[0] == 4)
    assert node.store.transfers.drain(PATIENCE_S) and node.fetched() == 4 and held(scheduler) == 0
    # The head has come. Said again of what is there, it counts from now on.
    node.clock.now += segments.HINT_S / 2
    send(scheduler, tiny("c"))
    assert node.store.transfers.drain(PATIENCE_S)
    node.clock.now += segments.HINT_S / 2
    send(scheduler, tiny("d", "yours"))
    until(lambda: node.counted() == (4, 0, 1, 0))
    assert node.store.transfers.drain(PATIENCE_S) and node.fetched() == 4, "what was wasted leaves no room"
    node.clock.now += prefetch._WASTE_S
    send(scheduler, tiny("e", "yours"))
    until(lambda: node.counted() == (5, 0, 4, 0))
    assert node.store.transfers.drain(PATIENCE_S) and node.fetched() == 5
    node.clock.now += segments.HINT_S
    send(scheduler, tiny("f", "none"))
    until(lambda: node.counted() == (5, 0, 5, 0))
    assert not scheduler.prefetch._segments  # type: ignore[attr-defined]


def test_a_load_has_nothing_but_what_is_on_its_way_beside_it(make: Any) -> None:
    node = make()
    node.save(*range(10), session=MINE)
    node.save(*range(20, 22))
    gate = Gate(node)
    scheduler = engine(node)
    send(scheduler, tiny())
    until(lambda: gate.waiting == AHEAD_THREADS)
    assert loads(scheduler, FakeRequest("loads", [20, 21, 7]), 16) == {"disk"}
    gate.open()
    until(lambda: node.counted()[0] == AHEAD_THREADS)
    step(scheduler)
    assert node.store.transfers.drain(PATIENCE_S) and node.fetched() == AHEAD_THREADS
    report(scheduler, finished={"loads"})
    until(lambda: node.counted()[0] == 5)


def test_what_fails_twice_is_named_no_more(make: Any) -> None:
    node = make()
    node.save(*range(2), session=MINE)
    node.plan.replace(Rule("missing", verbs=("read",)))
    scheduler = engine(node)
    send(scheduler, tiny())
    until(lambda: scheduler.prefetch._parted)  # type: ignore[attr-defined]
    node.clock.now += prefetch._PAUSE_S
    step(scheduler)
    until(lambda: node.counted() == (0, 0, 0, 1))
    assert hinted(node) == 0 and not scheduler.prefetch._segments  # type: ignore[attr-defined]
    assert not list(scheduler.prefetch._hinted)  # type: ignore[attr-defined]


def test_a_reset_forgets_hints(make: Any) -> None:
    node = make()
    node.save(*range(10), session=MINE)
    gate = Gate(node)
    scheduler = engine(node)
    send(scheduler, tiny())
    until(lambda: gate.waiting == AHEAD_THREADS)
    scheduler.on_new_request(tiny("later", "yours"))
    scheduler.reset_cache()
    gate.open()
    assert node.store.transfers.drain(PATIENCE_S)
    assert node.fetched() == AHEAD_THREADS and len(scheduler._hinted) == 0
    assert not scheduler.prefetch._segments  # type: ignore[attr-defined]


def test_an_index_that_fails_is_counted(make: Any) -> None:
    node = make()
    node.save(*range(2), session=MINE)

    def failing(*_: Any, **__: Any) -> Any:
        raise TransientError("away")

    node.store.index.owned = failing
    scheduler = engine(node)
    send(scheduler, tiny())
    until(lambda: node.store.counters.snapshot()["session_failures"] == 1)
    node.store.transfers.errand = lambda nbytes, job: False
    send(scheduler, tiny("again"))
    assert node.store.counters.snapshot()["session_failures"] == 2


@pytest.mark.parametrize("why", ["end", "false", "never", "budget", "salt", "no session"])
def test_nothing_is_brought_where_it_makes_no_sense(make: Any, why: str) -> None:
    node = make(
        **{"prefetch_bytes": 0} if why == "budget" else {}, kv={"load": "never"} if why == "never" else {}
    )
    node.save(*range(4), session=MINE)
    asked = []
    owned = node.space.owned
    node.space.owned = lambda session: asked.append(session) or owned(session)
    more: dict[str, Any] = {
        "end": {"kv_transfer_params": {"kv_hints": {"prefetch": True, "end": True}}},
        "false": {"kv_transfer_params": {"kv_hints": {"prefetch": False}}},
        "salt": {"cache_salt": "other"},
        "no session": {"session": ""},
    }.get(why, {})
    scheduler = engine(node)
    send(scheduler, tiny(**more))
    assert node.store.transfers.drain(PATIENCE_S)
    assert node.fetched() == 0 and len(asked) == (why == "salt")
