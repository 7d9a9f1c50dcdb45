"""The EC scheduler's half alone: which items are saved, on a real store; vLLM drives it in tests/e2e."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from kvstore.breaker import Breaker
from kvstore.errors import TransientError
from kvstore.keys import digest, item_key
from kvstore.store import Store
from tests.connectors.ec_world import FakeEngine, FakeRequest, put
from tests.store.world import make_store, open_space

pytestmark = pytest.mark.engine


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    made: list[Store] = []

    def store(**settings: Any) -> Store:
        ec = {"staging_dir": str(tmp_path / "staging"), "absent_ttl_s": 0.1}
        made.append(make_store(tmp_path / "store", ec=ec, **settings))
        return made[-1]

    yield store
    for one in made:
        one.close()


@pytest.fixture
def engine() -> Iterator[Callable[..., FakeEngine]]:
    made: list[FakeEngine] = []

    def scheduler(store: Store, **changes: Any) -> FakeEngine:
        made.append(FakeEngine(store, **changes))
        return made[-1]

    yield scheduler
    for one in made:
        one.half.shutdown()


def test_metrics_say_what_is_down_and_which_namespace_it_is(opened: Any, engine: Any) -> None:
    store = opened()
    store.breaker = Breaker("payloads", store.settings.breaker)
    store.index_breaker = Breaker("index", store.settings.breaker)
    half = engine(store).half
    assert half.take_stats()["gauges"] == {f"namespace{{{open_space(store).id}}}": 1}
    for name, breaker in (("payloads_down", store.breaker), ("index_down", store.index_breaker)):
        for _ in range(store.settings.breaker.failures):
            with pytest.raises(TransientError), breaker.guard():
                raise TransientError("down")
        store.counters.miss("breaker_open", 1)
        assert half.take_stats()["gauges"] == {name: 1}
    # Told when it is over, whatever else happens.
    breaker = store.index_breaker = Breaker("index", store.settings.breaker)
    assert breaker.is_closed
    assert half.take_stats()["gauges"] == {"index_down": 0}
    half.enter(None)
    assert half.take_stats()["gauges"] == {"namespace{}": 1}


SECOND_USE = {"admission": {"second_use": True}}


def not_admitted(store: Store) -> int:
    return store.counters.snapshot()["save_blocks{not_admitted}"]


def test_everything_is_saved_without_second_use(
    opened: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(admission={"min_blocks": 100})
    monkeypatch.setattr(store.index, "note", lambda *_, **__: pytest.fail("noted"))
    assert engine(store).run(FakeRequest("r", ["a", "b"])).saves == {"a", "b"}


def test_an_item_is_saved_on_its_second_use(opened: Any, engine: Any) -> None:
    store, other = opened(**SECOND_USE), opened(**SECOND_USE)
    here, there = engine(store), engine(other)
    assert here.run(FakeRequest("r", ["a", "b"])).saves == set()
    assert not_admitted(store) == 2
    # On another engine; and here, where the first one's output is gone.
    assert there.run(FakeRequest("s", ["b", "c"])).saves == {"b"}
    assert not_admitted(other) == 1
    here.drop("a", "b")
    time.sleep(0.15)
    here.step(FakeRequest("u", []))
    assert here.run(FakeRequest("t", ["a", "d"])).saves == {"a"}


def test_a_consumer_notes_though_it_saves_nothing(opened: Any, engine: Any) -> None:
    store = opened(**SECOND_USE)
    assert engine(store, producer=False).run(FakeRequest("r", ["a"])).saves == set()
    assert not_admitted(store) == 0
    assert engine(opened(**SECOND_USE)).run(FakeRequest("s", ["a"])).saves == {"a"}


def test_a_producer_saves_what_it_is_sent(opened: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent there for others, so a second use is certain."""
    store = opened(**SECOND_USE)
    monkeypatch.setattr(store.index, "note", lambda *_, **__: pytest.fail("noted"))
    assert engine(store, consumer=False).run(FakeRequest("r", ["a"])).saves == {"a"}
    assert (not_admitted(store), store.counters.snapshot()["note_failures"]) == (0, 0)


def test_a_request_that_waits_is_not_its_own_first_use(opened: Any, engine: Any) -> None:
    """It looks its items up again and again, and again after a preemption."""
    store = opened(**SECOND_USE)
    one, request = engine(store), FakeRequest("r", ["a"])
    for _ in range(20):
        one.half.ensure_cache_available(request, 0)
        time.sleep(0.02)
    assert store.counters.snapshot()["match_calls"] >= 3
    for _ in range(3):
        assert one.run(request).saves == set()
        one.drop("a")
        one.step(FakeRequest("u", []))
        time.sleep(0.15)
    # Another one that waits for it as well is a use of its own.
    assert one.run(FakeRequest("s", ["a"])).saves == {"a"}


def test_what_is_stored_and_damaged_is_saved_anew(opened: Any, engine: Any) -> None:
    store = opened(**SECOND_USE)
    put(open_space(store), "a")
    for path in Path(store.payloads._root).glob("*/??/*"):
        path.unlink()
    assert engine(store).run(FakeRequest("r", ["a"])).saves == {"a"}
    assert store.counters.snapshot()["miss_blocks{missing}"] == 1


def test_a_hit_is_a_use(opened: Any, engine: Any) -> None:
    store = opened(**SECOND_USE)
    space = open_space(store)
    put(space, "a")
    assert engine(store).run(FakeRequest("r", ["a"])).saves == set()
    assert not_admitted(store) == 0
    store.transfers.drain(5.0)
    assert space.note(digest(item_key("a"))) == 1


def test_an_index_that_fails_admits_nothing(
    opened: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(**SECOND_USE)
    open_space(store).note(digest(item_key("a")))

    def broken(*_: Any, **__: Any) -> int:
        raise TransientError("gone")

    monkeypatch.setattr(store.index, "note", broken)
    assert engine(store).run(FakeRequest("r", ["a"])).saves == set()
    counts = store.counters.snapshot()
    assert (counts["note_failures"], counts["save_blocks{not_admitted}"]) == (1, 1)
