"""Each follower of the EC connector fails in each hook, one at a time: that costs what it does alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.ec.items import Items
from connectors.ec.messages import ECStoreWorkerMetadata
from connectors.ec.scheduler import ECScheduler
from connectors.engine.step import StepView
from kvstore.store.store import Store
from tests.connectors.broken import How, Planted, break_follower
from tests.connectors.ec.world import DESCRIPTION, FakeEngine, ItemRequest, Step, put
from tests.fake_vllm import FakeStep
from tests.store.world import make_store, open_space
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.engine


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    ec = {"staging_dir": str(tmp_path / "staging"), "fetch_deadline_s": PATIENCE_S}
    made = make_store(tmp_path / "store", ec=ec)
    put(open_space(made), "a")
    put(open_space(made), "b")
    yield made
    made.close()


def ended(one: FakeEngine, step: Step) -> None:
    """The workers report all that a step has had them do."""
    meta = ECStoreWorkerMetadata(
        {item.key for item in step.loads.values()}, None, dict.fromkeys(step.keys.values(), "stored")
    )
    one.half.update_connector_output(SimpleNamespace(ec_connector_worker_meta=meta))  # type: ignore[arg-type]


def serve(one: FakeEngine) -> list[tuple[set[str], set[str]]]:
    """What an engine meets: hits, a miss, a description, a session. Returns what is loaded and encoded."""
    found = []
    for round_ in range(3):
        for name, items, more in (
            ("hit", ["a"], {"session_id": "mine", "kv_transfer_params": {"kv_hints": {"end": True}}}),
            ("miss", [f"new{round_}"], {}),
            ("described", ["b"], {"brings": DESCRIPTION}),
        ):
            request = ItemRequest(f"{name}{round_}", items, **more)
            one.half.queued(request, 0)
            step = one.run(request)
            found.append((set(step.loads), step.encoded))
            ended(one, step)
            one.half.take_stats()
            one.drop(*items)
            one.finish(request)
    return found


def expected() -> list[tuple[set[str], set[str]]]:
    return [one for round_ in range(3) for one in (({"a"}, set()), (set(), {f"new{round_}"}), ({"b"}, set()))]


def kept(half: ECScheduler) -> dict[str, int]:
    """All that is kept of requests and loads."""
    return {
        "waits": len(half._waits),
        "uses": len(half._uses._known),
        "ahead": len(half._ahead._requests),
        "saving": len(half._observer._saving),
        "loading": len(half._promises._loading),
        "promised": len(half._promises._promised),
        "pins": len(half._staging._pins),
    }


@pytest.mark.parametrize("how", ["always", "once"])
def test_a_broken_follower_costs_what_it_does_and_nothing_else(
    store: Store, how: How, faults: Counter[str]
) -> None:
    first = FakeEngine(store)
    names = [type(one).__name__ for one in first.half.followers]
    first.half.shutdown = lambda: None  # type: ignore[method-assign]  # it would close the store
    fired = 0
    for number, name in enumerate(names):
        one = FakeEngine(store)
        raised = break_follower(list(one.half.followers)[number], how)
        assert serve(one) == expected(), name
        assert {what: count for what, count in kept(one.half).items() if count} == {}, name
        fired += sum(raised.values())
    assert fired > 10 and store.counters.snapshot()["follower_failures"] == fired


def test_a_step_that_can_not_be_planned_sends_its_loads_all_the_same(
    store: Store, monkeypatch: pytest.MonkeyPatch, faults: Counter[str]
) -> None:
    def fails(_: object) -> Any:
        raise Planted("freed")

    one = FakeEngine(store)
    monkeypatch.setattr(StepView, "free_encoder_mm_hashes", property(fails))
    assert [loads for loads, _ in serve(one)] == [loads for loads, _ in expected()]
    assert faults["ECScheduler._plan_step"] >= 9
    monkeypatch.undo()
    one.half.build_connector_meta(FakeStep())  # type: ignore[arg-type]
    # What was to be saved is not: the journal waits for word of so many at most.
    assert {what for what, count in kept(one.half).items() if count} == {"saving"}
    assert not (one.half._saves or one.half._saves_held or one.half._savers)


def test_a_look_up_that_can_not_be_made_fails_a_request_that_only_describes_its_item(
    store: Store, monkeypatch: pytest.MonkeyPatch, faults: Counter[str]
) -> None:
    """vLLM would encode what isn't there, and end the engine."""

    def fails(*_: object, **__: object) -> Any:
        raise Planted("look")

    monkeypatch.setattr(Items, "look", fails)
    one = FakeEngine(store)
    assert one.run(ItemRequest("r", ["a"])).encoded == {"a"}
    one.fails(ItemRequest("s", ["b"], brings=DESCRIPTION))
