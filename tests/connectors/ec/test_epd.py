"""Producers and consumers apart: waiting, failing one request alone, announcing. On a real store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

import prometheus_client as prom
import torch

from connectors.ec.messages import ECStoreMetadata, ECStoreWorkerMetadata
from connectors.ec.metrics import ECStorePromMetrics, ECStoreStats
from connectors.ec.worker import ECWorker
from connectors.engine.media import Media
from connectors.engine.new_weights import weights_are
from kvstore.errors import TransientError
from kvstore.keys import canonical_json, digest
from kvstore.store.store import Store
from tests.connectors.ec.world import (
    DESCRIPTION,
    PIXELS,
    ROWS,
    WIDTH,
    FakeEngine,
    ItemRequest,
    key,
    put,
)
from tests.store.world import make_store, open_space
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.engine

#: Of engines opened after `hasten`; of others it is out of reach.
DEADLINE_S = 1.0
#: The deadline of the others, so late that a busy machine is no reason to miss.
LATE_S = 60.0
CONSUMER = {"producer": False}
PRODUCER = {"consumer": False}


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    ec = {"staging_dir": str(tmp_path / "staging"), "absent_ttl_s": 0.1, "fetch_deadline_s": LATE_S}
    made = make_store(tmp_path / "store", ec=ec)
    yield made
    made.close()


@pytest.fixture
def engine(store: Store) -> Iterator[Callable[..., FakeEngine]]:
    made: list[FakeEngine] = []

    def open_engine(**changes: Any) -> FakeEngine:
        made.append(FakeEngine(store, **changes))
        return made[-1]

    yield open_engine
    for one in made:
        one.half.shutdown()


def announced(store: Store, *identifiers: str) -> dict[str, Any]:
    """What a producer of the same namespace says of items, as a proxy passes it on."""
    return {
        one: {"item_indices": [0], "metadata": {"grid": [1, 2, 2]}, "kvstore_namespace": open_space(store).id}
        for one in identifiers
    }


def hasten(store: Store) -> None:
    configure(store, fetch_deadline_s=DEADLINE_S)


def configure(store: Store, **ec: Any) -> None:
    """Of engines opened later."""
    made = store.settings.ec.model_copy(update=ec)
    object.__setattr__(store.settings, "ec", made)


def evict(store: Store, identifier: str) -> None:
    space = open_space(store)
    [run] = space.match(digest(key(identifier))).runs
    store.index.evict(space.id, [run.segment], delete_after_s=0.0, rule="admin")


def leftovers(one: FakeEngine) -> dict[str, Any]:
    """State that belongs to single requests or steps, and what is pinned."""
    half, promises = one.half, one.half._promises
    state = {name: getattr(half, name) for name in ("_waits", "_unavailable", "_loads", "_saves")}
    state |= {name: getattr(promises, name) for name in ("_promised", "_loading", "_expected")}
    return {name: value for name, value in (state | {"pins": half._staging._pins}).items() if value}


# ---- waiting ------------------------------------------------------------------------------------


def test_an_announced_item_is_waited_for(store: Store, engine: Any) -> None:
    one = engine(**CONSUMER)
    request = ItemRequest("r", ["a"], ec_transfer_params=announced(store, "a"))
    timer = threading.Timer(0.15, lambda: put(open_space(store), "a"))
    timer.start()
    step = one.run(request)
    timer.join()
    assert (set(step.loads), step.encoded) == ({"a"}, set())
    # Seldom enough: not once per pass of the scheduler.
    assert store.counters.snapshot()["match_calls"] < 20


@pytest.mark.parametrize(
    ("why", "waits"),
    [("announced", True), ("unannounced", False), ("elsewhere", False), ("hostile", False)],
)
def test_what_does_not_come_is_encoded(
    store: Store, engine: Any, caplog: pytest.LogCaptureFixture, why: str, waits: bool
) -> None:
    params: Any = announced(store, "a")
    if why == "elsewhere":
        params["a"]["kvstore_namespace"] = "0123456789abcdef"
    elif why == "unannounced":
        params = announced(store, "b") | {"a": {"metadata": {}}}
    elif why == "hostile":
        params = ["a"]
    if waits:
        hasten(store)
    one, began = engine(**CONSUMER), time.monotonic()
    request = ItemRequest("r", ["a"], ec_transfer_params=params)
    assert one.run(request).encoded == {"a"}
    assert time.monotonic() - began >= DEADLINE_S if waits else time.monotonic() - began < LATE_S
    assert ("namespaces diff" in caplog.text) is (why == "elsewhere")
    # Having waited once it doesn't again, wherever it is preempted.
    one.drop("a")
    one.step(ItemRequest("u", []))
    again = one.step(request) if waits else one.run(request)
    assert again is not None and again.encoded == {"a"}


def test_a_producer_waits_for_nothing_but_the_index(store: Store, engine: Any) -> None:
    params = announced(store, "a")
    assert engine(**PRODUCER).run(ItemRequest("r", ["a"], ec_transfer_params=params)).encoded == {"a"}


# ---- items that nobody here can encode ------------------------------------------------------------


def test_a_described_item_is_loaded(store: Store, engine: Any) -> None:
    one = engine(**CONSUMER)
    put(open_space(store), "a")
    step = one.run(ItemRequest("r", ["a"], brings=DESCRIPTION))
    assert (set(step.loads), step.encoded) == ({"a"}, set())


def test_a_described_item_is_pinned_from_the_answer_on(store: Store, engine: Any) -> None:
    """Between the two questions of one pass nothing may take its place: "no" would end the engine."""
    one = engine(**CONSUMER)
    put(open_space(store), "a")
    request = ItemRequest("r", ["a"], brings=DESCRIPTION)
    while not one.half.ensure_cache_available(request, 0):  # type: ignore[arg-type]
        time.sleep(0.001)
    folder = one.half._staging
    folder._capacity = folder.used_bytes
    with pytest.raises(Exception, match="don't fit"):
        folder.put("other", memoryview(bytes(1)))
    assert one.half.has_cache_item("a")
    one.half.update_state_after_alloc(request, 0)  # type: ignore[arg-type]
    one.finish(request)
    assert set(leftovers(one)) == {"_loads", "_loading", "_promised", "_expected", "pins"}


@pytest.mark.parametrize("trouble", ["absent", "corrupt", "missing", "size", "name", "index"])
def test_a_described_item_that_can_not_be_had_fails_its_request_alone(
    store: Store, engine: Any, trouble: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits = trouble in ("absent", "index")
    if waits:
        hasten(store)
    else:
        # What was found out counts, however late it is heard: asked again, the index knows nothing any more.
        configure(store, absent_ttl_s=LATE_S)
    one = engine(**CONSUMER)
    space = open_space(store)
    if trouble != "absent":
        put(space, "a", rows=ROWS + (trouble == "size"))
    for path in Path(store.payloads._root).glob("*/??/*"):  # type: ignore[attr-defined]
        if trouble == "missing":
            path.unlink()
        elif trouble == "corrupt":
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
    if trouble == "index":

        def broken(*_: Any, **__: Any) -> Any:
            raise TransientError("gone")

        monkeypatch.setattr(store.index, "match", broken)
    request = ItemRequest("r", ["a"], brings=DESCRIPTION)
    if trouble == "name":
        request.ec_transfer_params = {}  # nothing but the name says what it is
    took_s = one.fails(request)
    assert took_s >= DEADLINE_S if waits else took_s < LATE_S
    assert one.half.take_unavailable_requests() == set(), "told once"
    one.finish(request)
    assert leftovers(one) == {}
    # With the media it is no trouble at all.
    if trouble == "name":
        assert set(one.run(ItemRequest("s", ["a"])).loads) == {"a"}
    stats = one.half.take_stats()
    assert stats is not None
    assert stats["counts"]["unavailable_requests"] == 1


@pytest.mark.parametrize("brings", [PIXELS, DESCRIPTION], ids=["media", "description"])
def test_a_second_try_does_not_rely_on_what_the_first_one_found(
    store: Store, engine: Any, brings: Any
) -> None:
    configure(store, absent_ttl_s=100.0)
    one = engine(**CONSUMER)
    put(open_space(store), "a")
    for path in Path(store.payloads._root).glob("*/??/*"):  # type: ignore[attr-defined]
        path.unlink()
    one.fails(ItemRequest("r", ["a"], brings=DESCRIPTION))
    put(open_space(store), "a")
    step = one.run(ItemRequest("s", ["a"], brings=brings, ec_transfer_params=announced(store, "a")))
    assert (set(step.loads), step.encoded) == ({"a"}, set())


def test_an_engine_without_its_encoder_takes_no_deepstack_levels(store: Store, engine: Any) -> None:
    """vLLM leaves out what would take them apart along with the encoder."""
    space = open_space(store)
    put(space, "a")
    narrow = WIDTH // 2  # the language model's width: what is stored has a DeepStack level beside it
    request = ItemRequest("r", ["a"], brings=DESCRIPTION)
    assert set(engine(hidden=narrow, **CONSUMER).run(request).loads) == {"a"}
    engine(hidden=narrow, widths=lambda: {"image": narrow}, **CONSUMER).fails(request)


def test_a_described_item_outlives_a_reset(store: Store, engine: Any) -> None:
    one = engine(**CONSUMER)
    put(open_space(store), "a")
    one.run(ItemRequest("r", ["a"], brings=DESCRIPTION))
    one.cached.clear()
    step = one.run(ItemRequest("s", ["a"], brings=DESCRIPTION))
    assert (set(step.loads), step.encoded) == ({"a"}, set())


def test_a_clients_own_embeddings_are_neither_stored_nor_replaced(store: Store, engine: Any) -> None:
    put(open_space(store), "a")
    step = engine().run(ItemRequest("r", ["a"], brings={"image_embeds": b"...", **DESCRIPTION}))
    assert (step.loads, step.encoded, step.saves) == ({}, {"a"}, set())


# ---- what a producer says -------------------------------------------------------------------------


class DescribingMedia(Media):
    """Without vLLM's objects to read from."""

    def describe(self, features: Any) -> dict[str, dict[str, Any]]:
        return {one.identifier: {"item_indices": [0], "metadata": {"grid": [1]}} for one in features}


def test_a_producer_announces_what_is_stored_or_about_to_be(
    store: Store, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = open_space(store)
    put(space, "old")
    media = DescribingMedia({"image": {"grid"}})
    one = engine(media=media, **PRODUCER)
    request = ItemRequest("r", ["old", "new"])
    step = one.run(request)
    assert (step.encoded, step.saves) == ({"new"}, {"new"})
    said = one.finish(request)
    assert {name: entry["kvstore_namespace"] for name, entry in said.items()} == {
        "old": space.id,
        "new": space.id,
    }

    def broken(*_: Any, **__: Any) -> Any:
        raise TransientError("gone")

    monkeypatch.setattr(store.index, "match", broken)
    request = ItemRequest("s", ["lost"])
    one.run(request)
    # The save may work out, but nobody should rely on it: the media go along.
    assert one.finish(request)["lost"].get("metadata") == {"grid": [1]}
    assert engine(media=media, **CONSUMER).finish(request) is None
    assert engine(media=media).finish(request) is None


def test_a_producer_saves_again_what_it_holds_and_the_store_lost(store: Store, engine: Any) -> None:
    one = engine(media=DescribingMedia({"image": {"grid"}}), **PRODUCER)
    assert one.run(ItemRequest("r", ["a"])).saves == {"a"}
    put(open_space(store), "a")  # what the worker does
    time.sleep(0.05)
    assert one.run(ItemRequest("s", ["a"])).saves == set()
    evict(store, "a")
    time.sleep(0.05)
    request = ItemRequest("t", ["a"])
    step = one.run(request)
    assert (step.encoded, step.saves) == (set(), {"a"})
    assert "kvstore_namespace" in one.finish(request)["a"]
    # Dropped from the encoder cache it is encoded.
    one.drop("a")
    one.step(ItemRequest("u", []))
    time.sleep(0.05)
    step = one.run(ItemRequest("v", ["a"]))
    assert (step.encoded, step.saves) == ({"a"}, {"a"})


def test_a_producer_does_not_announce_what_it_never_held_and_the_store_lost(
    store: Store, engine: Any
) -> None:
    """vLLM believes it to be in the encoder cache, from when the store had it."""
    put(open_space(store), "a")
    one = engine(media=DescribingMedia({"image": {"grid"}}), **PRODUCER)
    assert one.run(ItemRequest("r", ["a"])).encoded == set()
    evict(store, "a")
    time.sleep(0.05)
    request = ItemRequest("s", ["a"])
    step = one.run(request)
    assert (step.encoded, step.saves) == (set(), set())
    assert one.finish(request) == {"a": {"item_indices": [0], "metadata": {}}}


def test_a_worker_saves_what_an_earlier_step_computed(store: Store) -> None:
    space = open_space(store)
    worker = ECWorker(store, dtype=torch.float32, device=lambda: torch.device("cpu"), saves=lambda: True)
    metadata = ECStoreMetadata(
        canonical_json(space.namespace), {}, {"computed now": key("new")}, {"held": key("held")}
    )
    worker.use(metadata)
    held = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)
    worker.save_held(metadata, {"held": held, "not asked for": held})
    store.transfers.drain(PATIENCE_S)
    assert store.counters.snapshot()["save_blocks{stored}"] == 1
    [run] = space.match(digest(key("held"))).runs
    data = memoryview(bytearray(held.numel() * 4))
    space.load(run, [key("held")], [data])
    assert torch.equal(torch.frombuffer(data, dtype=torch.float32).view_as(held), held)
    report = worker.take_report()
    assert report is not None and report.stats is not None
    assert report.stats["counts"]["saves{stored}"] == 1
    assert len(report.stats["seconds"]["save_seconds"]) == 1
    assert worker.take_report() is None


# ---- forgetting -----------------------------------------------------------------------------------


def test_a_reset_is_noticed_at_the_first_item_that_is_asked_for(store: Store, engine: Any) -> None:
    one = engine()
    names = ["a", "b", "c"]
    for name in names:
        assert one.run(ItemRequest(name, [name])).saves == {name}
        put(open_space(store), name)
    one.cached.clear()  # reset_encoder_cache: the connector is not told
    assert one.run(ItemRequest("r", ["a"])).encoded == {"a"}
    for name in names[1:]:
        step = one.run(ItemRequest(f"again {name}", [name]))
        assert (set(step.loads), step.encoded) == ({name}, set())


@pytest.mark.parametrize("brings", [PIXELS, DESCRIPTION], ids=["media", "description"])
@pytest.mark.parametrize("state", ["looking up", "reading", "ready", "promised", "given up"])
def test_an_aborted_request_leaves_nothing(
    store: Store, engine: Any, state: str, brings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if state == "given up":
        hasten(store)
    one = engine(**CONSUMER)
    go_on = threading.Event()
    verb = {"looking up": "match", "reading": "load"}.get(state)
    space = one.half._space
    if verb is not None:
        inner = getattr(space, verb)
        monkeypatch.setattr(space, verb, lambda *a, **k: (go_on.wait(PATIENCE_S), inner(*a, **k))[1])
    if state != "given up":
        put(open_space(store), "a")
    request = ItemRequest("r", ["a"], brings=brings, ec_transfer_params=announced(store, "a"))
    if state == "promised":
        while not one.half.ensure_cache_available(request, 0):  # type: ignore[arg-type]
            time.sleep(0.001)
        assert one.half.has_cache_item("a")
        # Not scheduled after all: the pass ends without it.
        one.step(ItemRequest("u", []))
    elif state == "given up":
        until = time.monotonic() + DEADLINE_S * 1.5
        while time.monotonic() < until:
            one.half.ensure_cache_available(request, 0)  # type: ignore[arg-type]
            time.sleep(0.001)
    else:
        one.step(request)
        if state == "ready":
            store.transfers.drain(PATIENCE_S)
    one.finish(request)
    go_on.set()
    store.transfers.drain(PATIENCE_S)
    one.step(ItemRequest("u", []))
    assert leftovers(one) == {}
    if state != "given up":
        # What was fetched in vain serves the next one.
        assert set(one.run(ItemRequest("s", ["a"])).loads) == {"a"}


def test_new_weights_have_other_outputs(store: Store, engine: Any) -> None:
    one, other = engine(), engine(media=DescribingMedia({"image": {"grid"}}), **PRODUCER)
    for name in ("a", "b"):
        put(open_space(store), name)
    assert set(one.run(ItemRequest("r", ["a"])).loads) == {"a"}
    old = one.half._space

    weights_are("unnamed-1")
    one.cached.clear()
    other.cached.clear()
    step = one.run(ItemRequest("s", ["a", "b"]))
    assert (step.loads, step.encoded, step.saves) == ({}, {"a", "b"}, {"a", "b"})
    new = one.half._space
    assert new.namespace == old.namespace.model_copy(update={"weights": "unnamed-1"})
    assert other.half._space.id == new.id
    # A fetch that began before it ends in nothing.
    put(new, "a")
    assert set(one.run(ItemRequest("t", ["a"])).loads) == set(), "in the encoder cache"

    assert other.run(ItemRequest("known", ["a"])).encoded == set(), "stored"
    assert other.half.take_stats()["counts"]["items{skipped}"] == 1
    weights_are(None)
    one.cached.clear()
    other.cached.clear()
    step = one.run(ItemRequest("u", ["a", "b"]))
    assert (step.loads, step.encoded, step.saves) == ({}, {"a", "b"}, set())
    one.fails(ItemRequest("v", ["a"], brings=DESCRIPTION))
    request = ItemRequest("w", ["a"])
    other.run(request)
    assert other.finish(request) == {"a": {"item_indices": [0], "metadata": {}}}
    # The namespace that was left is emptied by then: once, though both engines have left it.
    assert store.transfers.drain(PATIENCE_S)
    assert other.half.take_stats()["counts"] == {
        "items{encoder}": 1,
        "events{evicted_segments}": 1,
        "events{deleted_payloads}": 1,
    }
    assert store.maintenance.usage(new.id).segments == 0, "nobody else can read it"

    weights_are(old.namespace.weights)
    one.cached.clear()
    assert set(one.run(ItemRequest("x", ["a"])).loads) == {"a"}


def test_a_worker_saves_to_the_namespace_of_the_step(store: Store) -> None:
    worker = ECWorker(store, dtype=torch.float32, device=lambda: torch.device("cpu"), saves=lambda: True)
    spaces = [open_space(store), open_space(store, weights="v")]
    for space in spaces:
        metadata = ECStoreMetadata(canonical_json(space.namespace), {}, {"a": key("a")})
        worker.use(metadata)
        worker.save(metadata, {"a": torch.zeros(ROWS, WIDTH)}, "a")
    store.transfers.drain(PATIENCE_S)
    assert [store.maintenance.usage(space.id).segments for space in spaces] == [1, 1]


def test_outputs_that_cannot_be_cached_are_said_once(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    worker = ECWorker(store, dtype=torch.float32, device=lambda: torch.device("cpu"), saves=lambda: True)
    metadata = ECStoreMetadata(canonical_json(open_space(store).namespace), {}, {"a": key("a")})
    worker.use(metadata)
    for _ in range(3):
        worker.save(metadata, {"a": torch.zeros(ROWS, WIDTH, dtype=torch.float16)}, "a")
    assert caplog.text.count("are not cached") == 1


# ---- statistics -----------------------------------------------------------------------------------


def test_statistics_tell_where_items_came_from(store: Store, engine: Any) -> None:
    one = engine()
    put(open_space(store), "stored")
    one.run(ItemRequest("r", ["stored", "new"]))
    one.drop("stored")
    one.step(ItemRequest("u", []))
    one.run(ItemRequest("s", ["stored"]))
    stats = one.half.take_stats()
    assert stats is not None
    counts = stats["counts"]
    assert {
        name: counts[name] for name in counts if name.startswith(("items", "misses", "loaded", "fetched"))
    } == {
        "items{store}": 1,
        "fetched_items{disk}": 1,
        "items{staging}": 1,
        "items{encoder}": 1,
        "misses{absent}": 1,
        "loaded_bytes": 2 * ROWS * WIDTH * 4,
    }
    assert len(stats["seconds"]["fetch_seconds"]) == 1
    assert one.half.take_stats() is None


def report(counts: dict[str, int], seconds: Any = ()) -> dict[str, Any]:
    return {"counts": dict(counts), "seconds": dict(seconds), "gauges": {}}


def test_statistics_add_up_and_reach_prometheus() -> None:
    first = report({"items{store}": 2}, {"fetch_seconds": [0.5]})
    second = report({"items{store}": 1, "unavailable_requests": 1})
    merged = ECStoreWorkerMetadata({"a"}, first).aggregate(ECStoreWorkerMetadata({"b"}, second))
    assert isinstance(merged, ECStoreWorkerMetadata) and merged.loaded == {"a", "b"}
    total = ECStoreStats(merged.stats)
    assert total.reduce() == {
        "items{store}": 3,
        "unavailable_requests": 1,
        "mean fetch ms": 500.0,
        "max fetch ms": 500.0,
    }
    assert not total.is_empty()
    total.reset()
    assert total.is_empty()

    registry = prom.CollectorRegistry()
    kinds = {
        kind: lambda kind=kind, **k: kind(registry=registry, **k)
        for kind in (prom.Counter, prom.Gauge, prom.Histogram)
    }
    config: Any = type("Config", (), {"ec_transfer_config": None})()
    metrics = ECStorePromMetrics(config, kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    value = registry.get_sample_value
    labels = {"model_name": "m", "engine": "1"}
    assert value("vllm:kvstore_ec_misses_total", labels | {"reason": "corrupt"}) == 0
    metrics.observe(report({"items{store}": 3, "of a later version": 1}, {"fetch_seconds": [0.5]}), 1)
    assert value("vllm:kvstore_ec_items_total", labels | {"source": "store"}) == 3
    assert value("vllm:kvstore_ec_items_total", labels | {"engine": "0", "source": "store"}) == 0
    assert value("vllm:kvstore_ec_fetch_seconds_sum", labels) == 0.5
