"""An item of a writer that nobody has compared: it is encoded once, and compared with what is staged."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

import torch

from connectors.ec.messages import ECStoreMetadata, ECStoreWorkerMetadata
from connectors.ec.worker import ECWorker
from kvstore.format.segment import Slot
from kvstore.keys import place_of, writer_id
from kvstore.store.store import Store
from kvstore.store.writers.known import MOST_REFUSED
from tests.connectors.ec.world import DESCRIPTION, ROWS, WIDTH, FakeEngine, ItemRequest, key, open_space
from tests.fake_vllm import FakeStep
from tests.store.world import make_store
from tests.waiting import PATIENCE_S, until

pytestmark = [pytest.mark.engine, pytest.mark.proves]

OUTPUT = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH) + 1
A_WRITER = writer_id("a writer")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with make_store(tmp_path, **options(tmp_path)) as made:
        write(tmp_path, "a writer", "a", "b")
        yield made


def options(root: Path) -> dict[str, Any]:
    return {"ec": {"staging_dir": str(root / "staging"), "fetch_deadline_s": 60.0}}


def write(root: Path, writer: str, *names: str) -> None:
    """Another engine stores the outputs of these pictures."""
    with make_store(root, **options(root)) as other:
        other.backends.writer.adopt(writer)
        for name in names:
            data = memoryview(bytearray(OUTPUT.numpy().tobytes()))
            open_space(other).save([Slot(key(name), data, "F32", (ROWS, WIDTH))])


def encoded(store: Store, engine: FakeEngine, name: str, output: torch.Tensor) -> ECStoreWorkerMetadata:
    """A request of an item that is encoded, with what the worker reports of it."""
    sent: list[ECStoreMetadata] = []
    build = engine.half.build_connector_meta

    def built(step: Any) -> ECStoreMetadata:
        sent.append(build(step))
        return sent[-1]

    engine.half.build_connector_meta = built  # type: ignore[method-assign]
    step = engine.run(ItemRequest(f"of {name}", [name]))
    engine.half.build_connector_meta = build  # type: ignore[method-assign]
    assert (step.encoded, step.loads, step.saves) == ({name}, {}, set())
    [metadata] = [one for one in sent if one.proofs]
    worker = ECWorker(store, dtype=torch.float32, device=lambda: torch.device("cpu"), saves=lambda: True)
    worker.use(metadata)
    worker.save(metadata, {name: output}, name)
    report: Any = until(lambda: one if (one := worker.take_report()) is not None and one.compared else None)
    engine.half.update_connector_output(_Output(report))  # type: ignore[arg-type]
    return report


class _Output:
    def __init__(self, meta: ECStoreWorkerMetadata) -> None:
        self.ec_connector_worker_meta = meta


def test_the_first_item_is_encoded_and_compared_and_the_next_one_is_loaded(store: Store) -> None:
    engine = FakeEngine(store)
    assert encoded(store, engine, "a", OUTPUT).compared == {key("a"): True}
    step = engine.run(ItemRequest("next", ["b"]))
    assert (step.encoded, set(step.loads)) == (set(), {"b"})
    assert store.transfers.drain(PATIENCE_S)
    assert store.index.verdicts(engine.half._space.id)[A_WRITER].state == "proven"  # type: ignore[union-attr]


def test_what_differs_is_not_loaded_and_its_writer_is_disputed(store: Store) -> None:
    engine = FakeEngine(store)
    assert encoded(store, engine, "a", OUTPUT * 2).compared == {key("a"): False}
    step = engine.run(ItemRequest("next", ["b"]))
    assert (step.encoded, step.loads) == ({"b"}, {})
    assert store.transfers.drain(PATIENCE_S)
    assert store.index.verdicts(engine.half._space.id)[A_WRITER].state == "disputed"  # type: ignore[union-attr]


def test_an_item_that_only_its_description_comes_of_is_loaded(store: Store) -> None:
    engine = FakeEngine(store, producer=False)
    step = engine.run(ItemRequest("described", ["a"], brings=DESCRIPTION))
    assert (step.encoded, set(step.loads)) == (set(), {"a"})


def test_an_engine_that_can_encode_loads_a_described_item(store: Store) -> None:
    """It has no pixels to encode: vLLM ends the engine if it hears "no" after the item was promised."""
    engine = FakeEngine(store)
    step = engine.run(ItemRequest("described", ["a"], brings=DESCRIPTION))
    assert (step.encoded, set(step.loads)) == (set(), {"a"})
    step = engine.run(ItemRequest("with pixels", ["b"]))
    assert (step.encoded, step.loads) == ({"b"}, {}), "its writer is still to be compared"


def test_an_item_that_was_promised_to_another_request_is_encoded_and_compared(store: Store) -> None:
    """In the pass in which a request with its description was promised it, and found no place."""
    engine = FakeEngine(store)
    half: Any = engine.half
    described, whole = ItemRequest("described", ["a"], brings=DESCRIPTION), ItemRequest("whole", ["a"])
    until(lambda: half.ensure_cache_available(described, 0))
    assert half.ensure_cache_available(whole, 0)
    assert not half.has_cache_item("a")
    half.update_state_after_alloc(whole, 0)
    meta = half.build_connector_meta(FakeStep())
    assert (set(meta.loads), set(meta.proofs)) == (set(), {"a"})


def test_a_described_item_of_a_writer_that_was_refused_is_not_loaded(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = FakeEngine(store)
    assert not engine.half.ensure_cache_available(ItemRequest("early", ["b"]), 0)
    until(lambda: engine.half._items.get(key("b")).outcome == "ready")  # type: ignore[union-attr]
    encoded(store, engine, "a", OUTPUT * 2)
    monkeypatch.setattr(engine.half, "_deadline_s", 0.2)
    engine.fails(ItemRequest("described", ["b"], brings=DESCRIPTION))


def test_an_engine_that_differs_from_all_leaves_the_namespace_alone(store: Store, tmp_path: Path) -> None:
    engine = FakeEngine(store)
    space = engine.half._space
    assert space is not None
    for number in range(MOST_REFUSED):
        assert engine.half._space is space
        write(tmp_path, f"writer {number}", f"picture {number}")
        assert encoded(store, engine, f"picture {number}", OUTPUT * 2).compared == {
            key(f"picture {number}"): False
        }
    step = engine.run(ItemRequest("next", ["b", "new"]))
    assert (step.encoded, step.loads, step.saves) == ({"b", "new"}, {}, set())
    engine.fails(ItemRequest("described", ["a"], brings=DESCRIPTION))
    assert store.transfers.drain(PATIENCE_S)
    assert {one.state for one in store.index.verdicts(space.id).values()} == {"disputed"}
    weights = space.namespace.weights
    engine.half.enter("others")
    assert engine.half._space is not None
    engine.half.enter(weights)
    assert engine.half._space is None, "it is not to differ from three more"


def test_an_engine_whose_own_writer_has_failed_leaves_the_namespace_alone(store: Store) -> None:
    engine = FakeEngine(store)
    space = engine.half._space
    assert space is not None and engine.run(ItemRequest("first", ["new"])).saves == {"new"}
    for place in ("one place", "another"):
        store.index.judge(space.id, store.backends.writer.id, "differs", by=place_of(place), stands=False)
    report = ECStoreWorkerMetadata(saved={key("new"): "refused"})
    engine.half.update_connector_output(_Output(report))  # type: ignore[arg-type]
    until(lambda: space.writers.own_failed)
    step = engine.run(ItemRequest("later", ["newer"]))
    assert (step.encoded, step.saves) == ({"newer"}, set())


def test_an_engine_that_agrees_with_one_writer_stays(store: Store, tmp_path: Path) -> None:
    engine = FakeEngine(store)
    encoded(store, engine, "a", OUTPUT)
    assert store.transfers.drain(PATIENCE_S)
    for number in range(MOST_REFUSED):
        write(tmp_path, f"writer {number}", f"picture {number}")
        encoded(store, engine, f"picture {number}", OUTPUT * 2)
    assert set(engine.run(ItemRequest("next", ["b"])).loads) == {"b"}
