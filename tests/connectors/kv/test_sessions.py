"""What the scheduler's half tells of sessions: once per request, off its thread, and never in its way."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.engine.sessions.telling import tell
from connectors.kv.scheduler import KVScheduler
from connectors.kv.worker.worker import KVWorker
from kvstore.errors import TransientError
from kvstore.index.sessions import LONGEST_RETAINED_S, USE, Hint, SessionListing
from kvstore.keys import (
    NO_SALT,
    NO_SESSION,
    SegmentId,
    SessionId,
    digests,
    salt_id,
    session_id,
)
from kvstore.store.space import Space
from kvstore.store.store import Store
from tests.connectors.groups import WORKERS
from tests.connectors.kv.worker.test_worker import BLOCKS, caches, finished, load, save
from tests.connectors.kv.world import allocate, answer, half, report
from tests.fake_vllm import TABLES, FakeAction, FakeEnvelope, FakeRequest, step
from tests.store.world import chain, make_store, match, open_space, slots
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine

MINE = session_id(NO_SALT, "mine")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = make_store(tmp_path, kv={"match_deadline_s": 60.0})
    yield made
    made.close()


class Calls:
    """What the index was told, in order; everything still happens."""

    def __init__(self, store: Store) -> None:
        self.told: list[tuple[SessionId, tuple[SegmentId, ...], Hint]] = []
        self.touched: list[SegmentId] = []
        self.threads: set[int] = set()
        session, touch = store.index.session, store.index.touch

        def tell(namespace: Any, name: SessionId, segments: Any, *, hint: Hint, **more: Any) -> Any:
            self.threads.add(threading.get_ident())
            done = session(namespace, name, segments, hint=hint, **more)
            self.told.append((name, tuple(segments), hint))
            return done

        def noted(namespace: Any, segments: Any) -> None:
            touch(namespace, segments)
            self.touched += segments

        store.index.session, store.index.touch = tell, noted  # type: ignore[method-assign, assignment]

    @property
    def said(self) -> list[Hint]:
        """What was told beside uses."""
        return [hint for _, _, hint in self.told if hint != Hint()]


@pytest.fixture
def calls(store: Store) -> Calls:
    return Calls(store)


@pytest.fixture
def space(store: Store) -> Space:
    made = open_space(store)
    made.register()
    return made


@pytest.fixture
def make(store: Store, space: Space, calls: Calls) -> Callable[..., KVScheduler]:
    return lambda **changes: half(store, space, **changes)


def stored(space: Space, *path: int) -> list[SegmentId]:
    """Save a chain, two blocks a segment; returns its segments."""
    own = chain(*path)
    for first in range(0, len(own), 2):
        space.save(slots(own[first : first + 2]), depth=first, chain=digests(own[:1]))
    return [run.segment for run in match(space, own).runs]


def end(scheduler: KVScheduler, request: FakeRequest) -> None:
    scheduler.request_finished(request, TABLES)  # type: ignore[arg-type]


def serve(scheduler: KVScheduler, request: FakeRequest) -> None:
    """A request from its arrival to its end; what it loads is loaded."""
    scheduler.on_new_request(request)  # type: ignore[arg-type]
    tokens, _ = answer(scheduler, request)
    if tokens:
        allocate(scheduler, request, tokens)
        step(scheduler)
        report(scheduler, finished={request.request_id})
    step(scheduler, (request, request.num_prompt_tokens))
    end(scheduler, request)


def listed(store: Store, space: Space, session: SessionId = MINE) -> SessionListing | None:
    return store.maintenance.find_sessions(space.id, [session])[0]


def test_a_match_is_a_use_by_the_session_and_by_nobody_else(
    make: Any, store: Store, space: Space, calls: Calls
) -> None:
    segments = stored(space, *range(6))
    scheduler, request = make(), FakeRequest("r", range(8), session_id="mine")
    scheduler.on_new_request(request)
    tokens, _ = answer(scheduler, request)
    assert tokens == 48
    until(lambda: calls.told)
    assert calls.told == [(MINE, tuple(segments), Hint())]
    assert threading.get_ident() not in calls.threads
    allocate(scheduler, request, tokens)
    [planned] = step(scheduler).loads
    assert not planned.touch, "the workers would make it a use by nobody's session"
    report(scheduler, finished={"r"})
    end(scheduler, request)
    step(scheduler)
    assert len(calls.told) == 1, "a request tells once"


def test_a_request_without_a_session_tells_nothing(make: Any, space: Space, calls: Calls) -> None:
    stored(space, *range(6))
    scheduler, request = make(), FakeRequest("r", range(8))
    scheduler.on_new_request(request)
    tokens, _ = answer(scheduler, request)
    allocate(scheduler, request, tokens or 0)
    [planned] = step(scheduler).loads
    assert planned.touch
    saves = step(scheduler, (request, request.num_prompt_tokens)).saves
    assert {saved.session for saved in saves} == {NO_SESSION}
    end(scheduler, request)
    assert calls.told == []


def test_what_it_has_found_in_the_engine_is_used_too(make: Any, space: Space, calls: Calls) -> None:
    segments = stored(space, *range(6))
    scheduler, request = make(), FakeRequest("r", range(6), session_id="mine")
    scheduler.on_new_request(request)
    assert answer(scheduler, request, computed=48) == (0, False)
    until(lambda: calls.told)
    assert calls.told == [(MINE, tuple(segments), Hint())]


def test_what_it_saves_is_its_sessions(make: Any) -> None:
    scheduler, request = make(), FakeRequest("r", range(8), session_id="mine", cache_salt="salt")
    scheduler.on_new_request(request)
    answer(scheduler, request)
    saves = step(scheduler, (request, request.num_prompt_tokens)).saves
    expected = session_id(salt_id("salt"), "mine")
    assert [one.session for one in saves] == [expected] * 2 and expected != MINE
    # Also what it saves again under another name of the weights.
    scheduler.reset_cache()
    assert scheduler.requests.get("r").progress.session == expected


@pytest.mark.parametrize(
    ("said", "hint"),
    [
        ({"end": True}, Hint(end=True)),
        ({"retain": 300}, Hint(retain_s=300)),
        ({"retain": 10**9}, Hint(retain_s=LONGEST_RETAINED_S)),
        ({"priority": "low", "retain": 5}, Hint(retain_s=5, priority="low")),
    ],
)
def test_what_it_says_counts_from_its_end_on(
    make: Any, store: Store, space: Space, calls: Calls, said: dict[str, Any], hint: Hint
) -> None:
    segments = stored(space, *range(6))
    scheduler = make()
    request = FakeRequest("r", range(6), session_id="mine", kv_transfer_params={"kv_hints": said})
    scheduler.on_new_request(request)
    answer(scheduler, request, computed=48)
    step(scheduler)
    until(lambda: calls.told)
    end(scheduler, request)
    until(lambda: len(calls.told) == 2)
    assert calls.told == [(MINE, tuple(segments), Hint()), (MINE, tuple(segments), hint)]


def test_an_aborted_request_has_said_what_it_said(make: Any, calls: Calls) -> None:
    envelope = FakeEnvelope([FakeAction("kv.evict")])
    scheduler, request = make(), FakeRequest("r", range(6), session_id="mine", kv_hints=envelope)
    scheduler.on_new_request(request)
    end(scheduler, request)
    until(lambda: calls.told)
    assert calls.told == [(MINE, (), Hint(end=True))]


def test_a_conversation_from_its_beginning_to_its_end(
    make: Any, store: Store, space: Space, calls: Calls
) -> None:
    """As the index has it afterwards; a worker's part is played by the space."""
    scheduler = make()
    first = FakeRequest("1", range(4), session_id="mine")
    serve(scheduler, first)
    space.save(slots(chain(*range(4))), session=MINE)
    again = FakeRequest("2", range(6), session_id="mine", kv_transfer_params={"kv_hints": {"retain": 60}})
    serve(scheduler, again)
    until(lambda: (one := listed(store, space)) is not None and one.state == "retained")
    last = FakeRequest("3", range(6), session_id="mine", kv_transfer_params={"kv_hints": {"end": True}})
    serve(scheduler, last)
    until(lambda: (one := listed(store, space)) is not None and one.state == "ended")
    ended = listed(store, space)
    assert ended is not None and ended.segments == 1
    # A use by anybody else makes it nobody's.
    serve(scheduler, FakeRequest("4", range(4), session_id="other"))
    until(lambda: (one := listed(store, space)) is not None and one.segments == 0)


def test_nonsense_is_counted_once(make: Any, store: Store, calls: Calls) -> None:
    scheduler = make()
    said = {"kv_hints": {"retain": -1, "forget": True}}
    request = FakeRequest("r", range(6), session_id="mine", kv_transfer_params=said)
    serve(scheduler, request)
    assert store.counters.snapshot()["hints_ignored"] == 2
    serve(scheduler, FakeRequest("s", range(6), session_id=["mine"], kv_hints="kv.evict"))
    assert store.counters.snapshot()["hints_ignored"] == 4
    assert calls.said == []


def test_an_index_that_fails_costs_nothing_but_what_was_said(
    make: Any, store: Store, space: Space, calls: Calls
) -> None:
    stored(space, *range(6))

    def failing(*_: Any, **__: Any) -> Any:
        raise TransientError("away")

    store.index.session = failing  # type: ignore[method-assign]
    scheduler = make()
    said = {"kv_hints": {"end": True}}
    serve(scheduler, FakeRequest("r", range(8), session_id="mine"))
    serve(scheduler, FakeRequest("s", range(8), session_id="mine", kv_transfer_params=said))
    until(lambda: store.counters.snapshot()["session_failures"] == 3)


def test_endless_sessions_are_bounded_and_keep_no_match_waiting(tmp_path: Path) -> None:
    made = make_store(tmp_path, kv={"match_deadline_s": 60.0}, transfers={"queue_jobs": 100})
    go, calls, space = threading.Event(), Calls(made), open_space(made)
    said = made.index.session

    def hangs(*given: Any, **more: Any) -> Any:
        assert go.wait(PATIENCE_S)
        return said(*given, **more)

    made.index.session = hangs  # type: ignore[method-assign]
    scheduler = half(made, space)
    for _ in range(1000):
        tell(made, space, MINE, NO_SALT, [], USE)
    lost = made.counters.snapshot()["session_failures"]
    assert lost in (899, 900), "all for which there is no room; one may have begun"
    # No thread for calls waits with them.
    serve(scheduler, FakeRequest("r", range(6)))
    go.set()
    assert made.transfers.drain(PATIENCE_S)
    assert len(calls.told) == 1000 - lost
    made.close()


def test_an_engine_that_left_the_store_alone_tells_nothing(make: Any, calls: Calls) -> None:
    scheduler = make()
    request = FakeRequest("r", range(6), session_id="mine", kv_transfer_params={"kv_hints": {"end": True}})
    scheduler.on_new_request(request)
    answer(scheduler, request)
    scheduler.give_up("for a test")
    end(scheduler, request)
    assert calls.said == []


@pytest.mark.parametrize("touch", [True, False])
def test_a_worker_touches_what_nobody_else_tells_of(store: Store, space: Space, *, touch: bool) -> None:
    worker = KVWorker(store, WORKERS, segment_blocks=[4])
    worker.register(caches(), BLOCKS)
    worker.use(space.namespace)
    space.save(slots(chain(*range(8))))
    planned, jobs = load(space), []
    planned.touch = touch
    store.transfers.call = lambda job: not jobs.append(job)  # type: ignore[method-assign, func-returns-value]
    worker.reads.start([planned])
    assert finished(worker) == {"r"}
    assert len(jobs) == touch


def test_a_worker_saves_for_the_session(store: Store, space: Space) -> None:
    worker = KVWorker(store, WORKERS, segment_blocks=[4])
    worker.register(caches(), BLOCKS)
    worker.use(space.namespace)
    one = save(chain(1, 2), [3, 4])
    one.session = MINE
    worker.writes.start([one])
    until(lambda: (found := listed(store, space)) is not None and found.segments == 1)
    assert store.maintenance.owners(space.id, [one.segment]) == [MINE]
