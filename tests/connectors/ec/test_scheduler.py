"""The EC scheduler's half alone: which items are saved, on a real store; vLLM drives it in tests/e2e."""

from __future__ import annotations

import os
import sys
import threading
import time
import tracemalloc
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.ec.items import Item
from connectors.ec.messages import ECStoreMetadata, ECStoreWorkerMetadata, StagedItem
from connectors.ec.worker import ECWorker
from kvstore.breaker import Breaker
from kvstore.errors import TransientError
from kvstore.index.port import CommitState
from kvstore.keys import ContentKey, SaltId, digest, new_segment_id, payload_name, salt_id
from kvstore.store.store import Store
from schemas.records import PartRecord, SegmentRecord
from tests.connectors.ec.world import (
    DESCRIPTION,
    PIXELS,
    ROWS,
    WIDTH,
    FakeEngine,
    ItemRequest,
    Step,
    key,
    put,
    told,
)
from tests.fake_vllm import FakeStep
from tests.store.world import make_store, open_space, with_parts
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Store]]:
    made: list[Store] = []

    def store(*, ec_staging: str = "256MiB", **settings: Any) -> Store:
        ec = {"staging_dir": str(tmp_path / "staging"), "absent_ttl_s": 0.1, "fetch_deadline_s": 60.0}
        ec["staging_bytes"] = ec_staging
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
    store, now = opened(), [0.0]
    payloads, index = (Breaker(name, store.settings.breaker, lambda: now[0]) for name in ("one", "other"))
    store = with_parts(store, breaker=payloads, index_breaker=index)
    half = engine(store).half
    assert half.take_stats()["gauges"] == {f"namespace{{{open_space(store).id}}}": 1}
    for name, breaker in (("payloads_down", payloads), ("index_down", index)):
        for _ in range(store.settings.breaker.failures):
            with pytest.raises(TransientError), breaker.guard():
                raise TransientError("down")
        store.counters.miss("breaker_open", 1)
        assert half.take_stats()["gauges"] == {name: 1}
    # Told when it is over, whatever else happens.
    now[0] += store.settings.breaker.max_backoff_s
    with index.guard():
        pass
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
    assert engine(store).run(ItemRequest("r", ["a", "b"])).saves == {"a", "b"}


def test_an_item_is_saved_on_its_second_use(opened: Any, engine: Any) -> None:
    store, other = opened(**SECOND_USE), opened(**SECOND_USE)
    here, there = engine(store), engine(other)
    assert here.run(ItemRequest("r", ["a", "b"])).saves == set()
    assert not_admitted(store) == 2
    # On another engine; and here, where the first one's output is gone.
    assert there.run(ItemRequest("s", ["b", "c"])).saves == {"b"}
    assert not_admitted(other) == 1
    here.drop("a", "b")
    time.sleep(0.15)
    here.step(ItemRequest("u", []))
    assert here.run(ItemRequest("t", ["a", "d"])).saves == {"a"}


def test_a_consumer_notes_though_it_saves_nothing(opened: Any, engine: Any) -> None:
    store = opened(**SECOND_USE)
    assert engine(store, producer=False).run(ItemRequest("r", ["a"])).saves == set()
    assert not_admitted(store) == 0
    assert engine(opened(**SECOND_USE)).run(ItemRequest("s", ["a"])).saves == {"a"}


def test_a_producer_saves_what_it_is_sent(opened: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is sent there for others, so a second use is certain."""
    store = opened(**SECOND_USE)
    monkeypatch.setattr(store.index, "note", lambda *_, **__: pytest.fail("noted"))
    assert engine(store, consumer=False).run(ItemRequest("r", ["a"])).saves == {"a"}
    assert (not_admitted(store), store.counters.snapshot()["note_failures"]) == (0, 0)


def test_a_request_that_waits_is_not_its_own_first_use(opened: Any, engine: Any) -> None:
    """It looks its items up again and again, and again after a preemption."""
    store = opened(**SECOND_USE)
    one, request = engine(store), ItemRequest("r", ["a"])

    def looked_up() -> bool:
        one.half.ensure_cache_available(request, 0)
        return store.counters.snapshot()["match_calls"] >= 3

    until(looked_up)
    for _ in range(3):
        assert one.run(request).saves == set()
        one.drop("a")
        one.step(ItemRequest("u", []))
        time.sleep(0.15)
    # Another one that waits for it as well is a use of its own.
    assert one.run(ItemRequest("s", ["a"])).saves == {"a"}


def test_a_request_waits_for_an_item_once(opened: Any, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if there is no place for it in the batch of the step in which the item's deadline has passed."""
    store, hangs = opened(), threading.Event()
    monkeypatch.setattr(store.index, "match", lambda *_, **__: hangs.wait(PATIENCE_S) and [])
    one, request = engine(store), ItemRequest("r", ["a"])
    one.half._deadline_s = 0.3
    object.__setattr__(one.half._items._settings, "fetch_deadline_s", 0.3)
    assert not one.half.ensure_cache_available(request, 0)
    until(lambda: one.half.ensure_cache_available(request, 0))
    time.sleep(0.15)
    assert one.half.ensure_cache_available(request, 0)
    # Another one may wait, and meanwhile the first one still doesn't.
    time.sleep(0.15)
    assert not one.half.ensure_cache_available(ItemRequest("s", ["a"]), 0)
    assert one.half.ensure_cache_available(request, 0)
    assert one.run(request).encoded == {"a"}
    hangs.set()


@pytest.mark.parametrize("brings", [PIXELS, DESCRIPTION], ids=["media", "description"])
def test_an_item_whose_staging_write_hangs_is_given_up(
    opened: Any, engine: Any, monkeypatch: pytest.MonkeyPatch, brings: Any
) -> None:
    store, writes, hangs = opened(), threading.Event(), threading.Event()
    put(open_space(store), "a")
    one, request = engine(store), ItemRequest("r", ["a"], brings=brings)
    staging = one.half._staging
    write = staging.put

    def slow(*given: Any) -> Any:
        writes.set()
        assert hangs.wait(PATIENCE_S)
        return write(*given)

    monkeypatch.setattr(staging, "put", slow)
    assert not one.half.ensure_cache_available(request, 0)
    assert writes.wait(PATIENCE_S)
    one.half._deadline_s = 0.1
    object.__setattr__(one.half._items._settings, "fetch_deadline_s", 0.1)
    if brings is PIXELS:
        assert one.run(request).encoded == {"a"}
    else:
        one.fails(request)
    one.finish(request)
    # The writer finds out, keeps no pin, and the item is there for the next.
    hangs.set()
    assert store.transfers.drain(PATIENCE_S)
    assert not staging._pins and staging.used_bytes == ROWS * WIDTH * 4
    one.half._deadline_s = 60.0
    object.__setattr__(one.half._items._settings, "fetch_deadline_s", 60.0)

    def loaded() -> bool:
        one.drop("a")
        return set(one.run(ItemRequest("s", ["a"], brings=brings)).loads) == {"a"}

    # A read that hung has closed the way to the payloads for a while.
    until(loaded)


def test_an_item_that_has_to_go_again_and_again_is_waited_for_until_the_deadline(
    opened: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened()
    put(open_space(store), "a")
    one = engine(store)
    monkeypatch.setattr(one.half._staging, "pin", lambda name: False)
    one.half._deadline_s = 0.2
    assert one.fails(ItemRequest("r", ["a"], brings=DESCRIPTION)) >= 0.2


def test_an_item_stays_that_is_handed_out_while_the_report_of_another_is_lost(
    opened: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of vLLM's model runners loses what the workers report of steps without tokens."""
    store = opened()
    put(open_space(store), "a")
    one, ages = engine(store), 0.0
    now = time.monotonic
    monkeypatch.setattr("connectors.ec.promises.time.monotonic", lambda: now() + ages)
    assert one.run(ItemRequest("r", ["a"])).loads
    one.drop("a")
    ages = 61.0
    [item] = one.run(ItemRequest("s", ["a"])).loads.values()
    one.half._staging.clear()
    assert Path(item.path).exists() and list(one.half._staging._pins.values()) == [1]
    # The report of the second one is not taken for the first one's, which has none.
    one.half.update_connector_output(SimpleNamespace(ec_connector_worker_meta=loaded_by_workers(item)))
    assert not one.half._staging._pins and not one.half._promises._loading


def test_the_workers_find_what_they_were_handed_though_its_file_is_gone(
    opened: Any, engine: Any, tmp_path: Path
) -> None:
    store = opened()
    space = open_space(store)
    put(space, "a")
    put(space, "b")
    one = engine(store)
    step = one.run(ItemRequest("r", ["a"]))
    [item] = step.loads.values()
    Path(item.path).unlink()
    device = torch.device("cpu")
    worker = ECWorker(store, dtype=torch.float32, device=lambda: device, saves=lambda: False)
    cache: dict[str, torch.Tensor] = {}
    worker.load(ECStoreMetadata(None, step.loads), cache)
    assert cache["a"].shape == (ROWS, WIDTH) and not cache["a"].any()
    report = worker.take_report()
    one.half.update_connector_output(SimpleNamespace(ec_connector_worker_meta=report))
    assert not held_open(item)
    # Handed out and never reported: the engine's end lets go of it.
    [item] = one.run(ItemRequest("s", ["b"])).loads.values()
    assert held_open(item)
    one.half._promises.close()
    assert not held_open(item)


@pytest.mark.parametrize("brings", [PIXELS, DESCRIPTION], ids=["media", "description"])
def test_what_was_promised_under_several_names_is_loaded_under_each(
    opened: Any, engine: Any, brings: Any
) -> None:
    """vLLM asks for all items of a request before it makes room for any. One that lacks then ends it."""
    store = opened()
    put(open_space(store), "cat")
    one = engine(store)
    params = {name: told("cat")["cat"] for name in "xyz"}

    def of(name: str, *names: str) -> ItemRequest:
        return ItemRequest(
            name, list(names), brings=brings, pictures=["cat"] * len(names), ec_transfer_params=params
        )

    until(lambda: one.half.ensure_cache_available(of("warm", "x"), 0))
    one.half.build_connector_meta(FakeStep())
    # Another request of the same pass asks for it after it was handed over, and it is aborted, too.
    for request in (of("r", "x", "y"), of("s", "z")):
        assert one.half.ensure_cache_available(request, 0)
        for feature in request.mm_features:
            assert one.half.has_cache_item(feature.identifier)
        for i in range(len(request.mm_features)):
            one.half.update_state_after_alloc(request, i)
        one.finish(request)
    loads = one.half.build_connector_meta(FakeStep()).loads
    assert {name: item.key for name, item in loads.items()} == dict.fromkeys("xyz", key("cat"))
    # A report of the workers' names it once.
    assert list(one.half._staging._pins.values()) == [1]
    item = loads["x"]
    one.half.update_connector_output(SimpleNamespace(ec_connector_worker_meta=loaded_by_workers(item)))
    assert not one.half._staging._pins and not one.half._promises._loading and not held_open(item)


def test_one_name_that_is_left_alone_takes_no_promise_of_another(opened: Any, engine: Any) -> None:
    store = opened()
    put(open_space(store), "dog")
    one, request = engine(store), ItemRequest("r", ["x", "x", "y"], pictures=["dog", "cat", "dog"])
    until(lambda: one.half.ensure_cache_available(request, 0))
    assert [one.half.has_cache_item(name) for name in "xy"] == [False, True]
    for index in (0, 2):
        one.half.update_state_after_alloc(request, index)
    assert one.half.build_connector_meta(FakeStep()).loads["y"].key == key("dog")


def held_open(item: StagedItem) -> bool:
    """Whether this process has the item's file open."""
    links = [os.readlink(one) for one in Path("/proc/self/fd").iterdir() if one.is_symlink()]
    return any(item.path in link for link in links)


def loaded_by_workers(item: StagedItem) -> ECStoreWorkerMetadata:
    """What workers report that have loaded it."""
    return ECStoreWorkerMetadata({item.key})


def test_what_is_stored_and_damaged_is_saved_anew_and_fills_no_log(
    opened: Any, engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = opened(**SECOND_USE)
    for name in "abcde":
        put(open_space(store), name)
    for path in Path(store.payloads._root).glob("*/??/*"):
        path.unlink()
    one = engine(store)
    for name in "abcde":
        assert one.run(ItemRequest(name, [name])).saves == {name}
    assert store.counters.snapshot()["miss_blocks{missing}"] == 5
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert " are computed: " in said and "missing" in said


@pytest.mark.parametrize("ahead_s", [-3600, 3600])
def test_what_was_erased_is_staged_no_more(
    opened: Any, engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead_s: int
) -> None:
    """The fetched copies are not in the index's reach: this engine gives them up by itself, whatever time it
    has itself."""
    monkeypatch.setattr("connectors.ec.items._ERASED_S", 0.02)
    now = [1_700_000_000.0]
    store = opened(clock=lambda: now[0])
    space = open_space(store)
    put(space, "a", salt="hers")
    put(space, "a", salt="his")
    one = engine(with_parts(store, clock=lambda: now[0] + ahead_s))
    hers, his = salt_id("hers"), key("a", "his")

    def run(name: str, salt: str) -> Step:
        step = one.run(ItemRequest(name, ["a"], cache_salt=salt))
        taken = ECStoreWorkerMetadata({item.key for item in step.loads.values()})
        one.half.update_connector_output(SimpleNamespace(ec_connector_worker_meta=taken))
        one.drop("a")
        one.step(ItemRequest("none", []))
        return step

    def staged() -> set[str]:
        return {path.name for path in (tmp_path / "staging").glob("*/*") if path.name != ".lock"}

    def step_until(condition: Callable[[], bool]) -> None:
        until(lambda: one.step(ItemRequest("none", [])) and condition())

    for again in range(2):
        assert [run(f"{salt}{again}", salt).encoded for salt in ("hers", "his")] == [set(), set()]
    assert len(staged()) == 2
    store.maintenance.forbid(space.id, hers)
    gone = [listing.segment for listing in store.maintenance.of_salt(space.id, hers)]
    store.index.evict(space.id, gone, delete_after_s=0.0, rule="erased")
    step_until(lambda: not staged())
    assert run("hers2", "hers").encoded == {"a"}
    # What was not erased is fetched again, not encoded.
    fetched = run("his2", "his")
    assert (fetched.encoded, fetched.loads["a"].key) == (set(), his)
    # As long as another engine's clock may still be at what was erased, it may be brought here once more.
    step_until(lambda: not staged())
    now[0] += 120
    run("his3", "his")
    step_until(lambda: one.half._items._done == store.maintenance.forbidden(space.id))
    run("his4", "his")
    kept = staged()
    one.half._items._due = 0.0
    one.step(ItemRequest("none", []))
    assert store.transfers.drain(PATIENCE_S)
    assert staged() == kept != set()


@pytest.mark.parametrize(
    ("stored", "raw", "payload"),
    [
        # More than these bytes can decompress to; more than the staging folder holds; and what is neither,
        # with and without a payload that knows better.
        (128, 3 << 30, False),
        (3 << 30, 3 << 30, False),
        (1 << 30, 1 << 30, False),
        (8 << 20, 1 << 30, False),
        (1 << 30, 1 << 30, True),
    ],
)
def test_no_memory_is_taken_on_the_indexs_word(
    opened: Any, engine: Any, stored: int, raw: int, payload: bool
) -> None:
    store = opened(ec_staging="2GiB")
    space, segment, packed = open_space(store), new_segment_id(), digest(key("a"))
    if payload:
        put(space, "other")
        other = space.match(digest(key("other"))).runs[0].segment
        ours, theirs = payload_name(space.id, segment, 0), payload_name(space.id, other, 0)
        data = memoryview(bytearray(1 << 16))
        size = store.payloads.read(theirs, 0, [data])
        store.payloads.put(ours, [data[:size]])
    space.register()
    record = SegmentRecord((PartRecord(4096, (stored,)),), 1, "lz4", 0, raw_bytes=raw)
    assert store.index.commit(space.id, segment, packed, record, rank=0, ranks=1) is CommitState.VISIBLE
    one = engine(store)
    tracemalloc.start()
    try:
        assert one.run(ItemRequest("r", ["a"])).encoded == {"a"}
        assert tracemalloc.get_traced_memory()[1] < 32 << 20
    finally:
        tracemalloc.stop()


def test_a_large_item_is_read_after_its_header(opened: Any, engine: Any) -> None:
    store, reads, rows = opened(), [], (5 << 20) // (WIDTH * 4)
    put(open_space(store), "a", rows=rows)
    read = store.payloads.read

    def noted(name: str, offset: int, into: Any, **more: Any) -> Any:
        reads.append(sum(view.nbytes for view in into))
        return read(name, offset, into, **more)

    payloads = SimpleNamespace(read=noted, close=store.payloads.close, tier=store.payloads.tier)
    object.__setattr__(store.backends, "payloads", payloads)
    assert set(engine(store).run(ItemRequest("r", ["a"], rows=rows)).loads) == {"a"}
    assert reads == [4096, 4096 + (5 << 20)]


def test_an_item_larger_than_the_staging_folder_stays_stored(opened: Any, engine: Any) -> None:
    store = opened(ec_staging="64KiB")
    put(open_space(store), "a", rows=(1 << 20) // (WIDTH * 4))
    assert engine(store).run(ItemRequest("r", ["a"])).encoded == {"a"}
    assert store.counters.snapshot()["miss_blocks{capacity}"] == 1
    assert open_space(store).match(digest(key("a"))).blocks == 1


def test_a_hit_is_a_use(opened: Any, engine: Any) -> None:
    store = opened(**SECOND_USE)
    space = open_space(store)
    put(space, "a")
    assert engine(store).run(ItemRequest("r", ["a"])).saves == set()
    assert not_admitted(store) == 0
    store.transfers.drain(PATIENCE_S)
    assert space.note(digest(key("a"))) == 1


def test_an_index_that_fails_admits_nothing(
    opened: Any, engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = opened(**SECOND_USE)
    open_space(store).note(digest(key("a")))

    def broken(*_: Any, **__: Any) -> int:
        raise TransientError("gone")

    monkeypatch.setattr(store.index, "note", broken)
    assert engine(store).run(ItemRequest("r", ["a"])).saves == set()
    counts = store.counters.snapshot()
    assert (counts["note_failures"], counts["save_blocks{not_admitted}"]) == (1, 1)


# ---- names and what they stand for --------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["trust", "refuse"])
def test_a_forged_name_is_stored_and_found_as_what_it_is(opened: Any, engine: Any, mode: str) -> None:
    """A dog under the cat's name, in any mode: it is saved as a dog, and the cat is not found."""
    store = opened(identity={"client_uuids": mode})
    here, there = engine(store), engine(store)
    made = here.run(ItemRequest("f", ["cat"], pictures=["dog"]))
    assert (made.encoded, made.keys) == ({"cat"}, {"cat": key("dog")})
    put(open_space(store), "dog")
    assert there.run(ItemRequest("r", ["cat"])).encoded == {"cat"}
    made = engine(store).run(ItemRequest("s", ["mine"], pictures=["dog"]))
    assert (made.encoded, made.loads["mine"].key) == (set(), key("dog"))


def test_salted_requests_share_with_nobody(opened: Any, engine: Any) -> None:
    store = opened()
    put(open_space(store), "cat", salt="one")
    put(open_space(store), "dog")
    for name, salt, shared in (("cat", "one", True), ("cat", "two", False), ("cat", None, False),
                               ("dog", None, True), ("dog", "", True), ("dog", "one", False)):  # fmt: skip
        made = engine(store).run(ItemRequest("r", [name], cache_salt=salt))
        assert (made.encoded == set()) is shared, (name, salt)
        if not shared:
            assert made.keys == {name: key(name, salt or "")}


def test_saves_name_the_salt_of_their_own_request(opened: Any, engine: Any) -> None:
    """One picture under two salts and under none, and a picture more, in one step of vLLM's."""
    one = engine(opened())
    salts: dict[ContentKey, SaltId] = {}
    for number, salt in enumerate(("hers", "his", None, "")):
        for name in ("cat", f"picture {number}"):
            request = ItemRequest(f"r{number}{name}", [f"{name} {salt}"], pictures=[name], cache_salt=salt)
            until(lambda request=request: one.half.ensure_cache_available(request, 0))
            one.half.has_cache_item(f"{name} {salt}")
            one.half.update_state_after_alloc(request, 0)
            salts[key(name, salt or "")] = salt_id(salt or "")
    meta = one.half.build_connector_meta(FakeStep())
    assert set(meta.saves.values()) == set(salts)
    assert {item: user.salt for item, user in meta.users.items()} == {
        item: salt for item, salt in salts.items() if salt
    }
    # The next step's know nothing of these.
    assert one.half.build_connector_meta(FakeStep()).users == {}


def test_each_request_is_promised_its_own_item(opened: Any, engine: Any) -> None:
    """Two requests call two pictures alike, and both are stored; vLLM's question names no request."""
    store = opened()
    for name in ("cat", "dog"):
        put(open_space(store), name)
    one = engine(store)
    cat, dog = ItemRequest("c", ["x"], pictures=["cat"]), ItemRequest("d", ["x"], pictures=["dog"])
    assert one.run(cat).loads["x"].key == key("cat")
    one.drop("x")
    one.step(ItemRequest("u", []))
    assert one.run(dog).loads["x"].key == key("dog")
    one.drop("x")
    one.step(ItemRequest("u", []))
    # Both are asked for in one pass, before either is scheduled: the last one that was asked for counts.
    assert one.half.ensure_cache_available(cat, 0)
    assert one.half.ensure_cache_available(dog, 0)
    assert one.half.has_cache_item("x")
    one.half.update_state_after_alloc(dog, 0)
    made = one.half.build_connector_meta(FakeStep())  # type: ignore[arg-type]
    assert made.loads["x"].key == key("dog")


def test_nothing_is_promised_for_a_request_that_was_not_asked_for(opened: Any, engine: Any) -> None:
    store = opened()
    put(open_space(store), "cat")
    one = engine(store)
    until(lambda: one.half.ensure_cache_available(ItemRequest("r", ["cat"]), 0))
    assert one.half.ensure_cache_available(ItemRequest("s", []), 0)
    assert not one.half.has_cache_item("cat")


def test_one_name_for_two_pictures_of_a_request_is_left_alone(opened: Any, engine: Any) -> None:
    store = opened()
    put(open_space(store), "dog")
    request = ItemRequest("r", ["x", "x"], pictures=["cat", "dog"])
    made = engine(store).run(request)
    # vLLM encodes the first, and takes its output for both.
    assert (made.encoded, made.loads, made.keys) == ({"x"}, {}, {"x": key("cat")})


def test_what_is_saved_is_what_was_encoded(opened: Any, engine: Any) -> None:
    """A later request calls another picture so, while the first one's output is in the encoder cache."""
    store = opened()
    one = engine(store, consumer=False)
    assert one.run(ItemRequest("r", ["x"], pictures=["cat"])).keys == {"x": key("cat")}
    time.sleep(0.05)
    made = one.run(ItemRequest("s", ["x"], pictures=["dog"]))
    assert (made.encoded, made.saves) == (set(), set()), "it holds no dog"
    time.sleep(0.05)
    assert one.run(ItemRequest("t", ["x"], pictures=["cat"])).keys == {"x": key("cat")}, "but a cat"


def test_names_of_any_length_cost_no_memory(opened: Any, engine: Any) -> None:
    """A thousand requests, each with a picture whose name is a MiB long; counted by what the maps hold."""
    one = engine(opened())
    one.run(ItemRequest("w", ["warm"]))
    name = "x" * (1 << 20)
    held = []
    for number in range(1000):
        request = ItemRequest(f"r{number}", [name], pictures=["cat"])
        request.mm_features[0].identifier = f"{number}{name}"
        assert one.step(request) is not None
        one.cached.clear()
        one.finish(request)
        held.append(held_bytes(one.half))
    assert max(held) - held[0] < 10_000
    assert max(held) < 1 << 20
    stats = one.half.take_stats()
    assert stats is not None
    assert stats["counts"]["misses{unnamed}"] == 1000


def held_bytes(half: Any) -> int:
    """The bytes of all that an engine's half holds of items: keys and values of its maps, and of theirs."""
    parts = (half, half._promises, half._items, half._observer, half._contents, half._staging)
    seen: set[int] = set()

    def size(value: Any) -> int:
        if id(value) in seen:
            return 0
        seen.add(id(value))
        if isinstance(value, dict):
            return sys.getsizeof(value) + sum(size(key) + size(one) for key, one in value.items())
        if isinstance(value, list | set | tuple | frozenset | deque):
            return sys.getsizeof(value) + sum(map(size, value))
        if isinstance(value, Item | StagedItem):
            return sum(size(getattr(value, name)) for name in type(value).__slots__)
        return sys.getsizeof(value) if isinstance(value, str | bytes) else 0

    return sum(size(value) for part in parts for value in vars(part).values())
