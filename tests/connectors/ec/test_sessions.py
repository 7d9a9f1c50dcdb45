"""Which items a session's requests use: told off the scheduler's thread, in place of the touch."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

import torch

from connectors.ec.messages import ECStoreMetadata
from connectors.ec.worker import ECWorker
from kvstore.index.sessions import Hint, SessionListing
from kvstore.keys import NO_SALT, NO_SESSION, SegmentId, SessionId, digest, salt_id, session_id
from kvstore.store.space import Space
from kvstore.store.store import Store
from tests.connectors.ec.world import ROWS, WIDTH, FakeEngine, ItemRequest, key, put
from tests.connectors.kv.test_sessions import Calls
from tests.fake_vllm import FakeStep
from tests.store.world import make_store, open_space
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine

MINE, OTHER = session_id(NO_SALT, "mine"), session_id(NO_SALT, "other")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    ec = {"staging_dir": str(tmp_path / "staging"), "absent_ttl_s": 0.1, "fetch_deadline_s": 60.0}
    made = make_store(tmp_path / "store", ec=ec)
    yield made
    made.close()


@pytest.fixture
def calls(store: Store) -> Calls:
    return Calls(store)


@pytest.fixture
def space(store: Store) -> Space:
    made = open_space(store)
    made.register()
    return made


@pytest.fixture
def engine(store: Store, space: Space, calls: Calls) -> Iterator[Callable[..., FakeEngine]]:
    made: list[FakeEngine] = []

    def start(**changes: Any) -> FakeEngine:
        made.append(FakeEngine(store, **changes))
        return made[-1]

    yield start
    for one in made:
        one.half.shutdown()


def stored(space: Space, *names: str) -> list[SegmentId]:
    """Store the outputs of these pictures, of nobody's session; returns their segments."""
    for name in names:
        put(space, name)
    return [space.match(digest(key(name))).runs[0].segment for name in names]


def listed(store: Store, space: Space, session: SessionId = MINE) -> SessionListing | None:
    return store.maintenance.find_sessions(space.id, [session])[0]


def settled(store: Store) -> None:
    assert store.transfers.drain(PATIENCE_S)


def dropped(one: FakeEngine, name: str) -> None:
    """The encoder cache has given an item up, and the connector knows."""
    one.drop(name)
    one.step(ItemRequest("nobody", []))


def encode(store: Store, meta: ECStoreMetadata) -> None:
    """What the workers do with a step: all outputs are saved."""
    worker = ECWorker(store, dtype=torch.float32, device=lambda: torch.device("cpu"), saves=lambda: True)
    worker.use(meta)
    meta.held, meta.saves = {**meta.held, **meta.saves}, {}
    worker.save_held(meta, {name: torch.zeros(ROWS, WIDTH) for name in meta.held})
    settled(store)


@pytest.mark.parametrize("consumer", [True, False], ids=["both", "producer"])
def test_a_fetch_is_a_use_by_the_session_and_by_nobody_else(
    engine: Any, store: Store, space: Space, calls: Calls, consumer: bool
) -> None:
    segments, one = stored(space, "a", "b"), engine(consumer=consumer)
    request = ItemRequest("r", ["a", "b"], session_id="mine")
    assert one.run(request).encoded == set()
    one.finish(request)
    settled(store)
    assert sorted(calls.told) == [(MINE, (segment,), Hint()) for segment in sorted(segments)]
    assert not calls.touched and threading.get_ident() not in calls.threads
    # One without a session tells nothing, as before.
    assert engine(consumer=consumer).run(ItemRequest("s", ["a"])).encoded == set()
    settled(store)
    assert len(calls.told) == 2 and calls.touched == segments[:1]


def test_what_a_sessions_request_encodes_is_its_own(
    engine: Any, store: Store, space: Space, calls: Calls
) -> None:
    one, request = engine(), ItemRequest("r", ["a", "b"], session_id="mine", cache_salt="s")
    until(lambda: one.half.ensure_cache_available(request, 0))
    for index, name in enumerate("ab"):
        one.half.has_cache_item(name)
        one.half.update_state_after_alloc(request, index)
    encode(store, one.half.build_connector_meta(FakeStep()))
    mine = session_id(salt_id("s"), "mine")
    segments = [space.match(digest(key(name, "s"))).runs[0].segment for name in "ab"]
    assert store.maintenance.owners(space.id, segments) == [mine, mine]
    assert calls.told == []
    # Its end covers them, though the request that says so needs no item.
    end = ItemRequest(
        "end", [], session_id="mine", cache_salt="s", kv_transfer_params={"kv_hints": {"end": True}}
    )
    one.run(end)
    one.finish(end)
    settled(store)
    assert calls.told == [(mine, (), Hint(end=True))]
    found = listed(store, space, mine)
    assert found is not None and (found.state, found.segments) == ("ended", 2)
    # Whatever is older: they go first.
    assert [line.last_use_s for line in store.maintenance.get(space.id, segments) if line] == [60.0, 60.0]


def test_what_a_request_says_is_told_once_more_when_it_ends(
    engine: Any, store: Store, space: Space, calls: Calls
) -> None:
    segments, one = stored(space, "a", "b"), engine()
    hints = {"kv_hints": {"retain": 300, "priority": "low"}}
    request = ItemRequest("r", ["a", "b"], session_id="mine", kv_transfer_params=hints)
    one.run(request)
    settled(store)
    assert [hint for _, _, hint in calls.told] == [Hint(), Hint()]
    one.finish(request)
    settled(store)
    session, told, hint = calls.told[-1]
    assert (session, set(told), hint.priority) == (MINE, set(segments), "low")
    assert hint.retain_s == 300
    assert len(calls.told) == 3 and not calls.touched
    assert store.maintenance.retained(space.id)[NO_SALT] > 0


def test_what_is_staged_is_used_by_others_too(engine: Any, store: Store, space: Space, calls: Calls) -> None:
    one = engine()
    mine = ItemRequest("r", ["a"], session_id="mine")
    until(lambda: one.half.ensure_cache_available(mine, 0))
    one.half.has_cache_item("a")
    one.half.update_state_after_alloc(mine, 0)
    encode(store, one.half.build_connector_meta(FakeStep()))
    [segment] = [run.segment for run in space.match(digest(key("a"))).runs]
    dropped(one, "a")
    assert one.run(ItemRequest("s", ["a"], session_id="mine")).loads
    settled(store)
    assert calls.told == [(MINE, (segment,), Hint())]
    assert store.maintenance.owners(space.id, [segment]) == [MINE]
    # It is fetched no more, and is another's use all the same; of nobody's session it is so once.
    for number, (session, owner) in enumerate(
        ((None, NO_SESSION), (None, NO_SESSION), ("other", NO_SESSION))
    ):
        dropped(one, "a")
        assert one.run(ItemRequest(f"t{number}", ["a"], session_id=session)).loads
        settled(store)
        assert store.maintenance.owners(space.id, [segment]) == [owner]
    assert calls.told[1:] == [(OTHER, (segment,), Hint())]
    assert calls.touched == [segment]


def test_what_makes_no_sense_is_counted_once_and_forgotten(
    engine: Any, store: Store, space: Space, calls: Calls
) -> None:
    stored(space, "a")
    one = engine()
    request = ItemRequest("r", ["a"], session_id="mine", kv_transfer_params={"kv_hints": {"retian": 3}})
    one.run(request)
    one.finish(request)
    assert store.counters.snapshot()["hints_ignored"] == 1
    assert not one.half._uses._known
    # Without a name for its weights an engine leaves the store alone.
    one.half.enter(None)
    other = ItemRequest("s", ["a"], session_id="mine", kv_transfer_params={"kv_hints": {"end": True}})
    one.run(other)
    one.finish(other)
    settled(store)
    assert len(calls.told) == 1 and not one.half._uses._known
