"""The worker's half alone, on the CPU: loads that hang, fail, are abandoned; layouts not understood."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")
pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.kv.messages import GroupLoad, Load, Save
from connectors.kv.worker.worker import KVWorker
from kvstore.breaker import Breaker
from kvstore.conformance.faulty import Plan, Rule
from kvstore.errors import ConfigError
from kvstore.keys import new_segment_id
from kvstore.payloads.breaking import BreakingPayloads
from kvstore.store.space import Space
from kvstore.store.store import Store
from schemas.settings import BreakerSettings
from tests.connectors.groups import LAYERS, WORKERS
from tests.store.world import GROUP, chain, content, make_store, match, open_space, slots, with_parts
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine

BLOCKS = 20
A = chain(*range(8))


@pytest.fixture
def plan() -> Plan:
    return Plan()


@pytest.fixture
def store(tmp_path: Path, plan: Plan) -> Iterator[Store]:
    made = make_store(tmp_path, plan=plan)
    yield made
    made.close()


@pytest.fixture
def space(store: Store) -> Space:
    return open_space(store)


def caches(
    dtype: Any = None, shape: tuple[int, ...] = (2, 8, 16), layers: Sequence[str] = LAYERS
) -> dict[str, Any]:
    return {name: torch.zeros(BLOCKS, *shape, dtype=dtype or torch.bfloat16) for name in layers}


@pytest.fixture
def worker(store: Store, space: Space) -> KVWorker:
    made = KVWorker(store, WORKERS, segment_blocks=[4])
    made.register(caches(), BLOCKS)
    made.use(space.namespace)
    return made


def load(space: Space, name: str = "r", blocks: int = 8) -> Load:
    runs = match(space, A[:blocks]).runs
    return Load(name, [GroupLoad(0, 0, runs, A[:blocks], {0: list(range(5, 5 + blocks))})])


def save(hashes: list[bytes], block_ids: list[int]) -> Save:
    return Save(0, new_segment_id(), 1_700_000_000, 0, hashes, {0: block_ids})


def finished(worker: KVWorker, count: int = 1) -> set[str]:
    done: set[str] = set()

    def enough() -> bool:
        done.update(worker.reads.take_finished()[0])
        return len(done) >= count

    until(enough)
    return done


def block(worker: KVWorker, number: int) -> bytes:
    chunk = worker.memory.loads.acquire(GROUP.slot_bytes, time.monotonic() + PATIENCE_S)
    worker.memory.caches[0].gather({0: [number]}, chunk).wait()
    data = bytes(chunk.views(1, GROUP.slot_bytes)[0])
    worker.memory.loads.release(chunk)
    return data


def test_what_one_worker_saves_another_loads(worker: KVWorker, space: Space, store: Store) -> None:
    space.save(slots(A))
    worker.reads.start([load(space)])
    assert finished(worker) == {"r"}
    assert worker.reads.take_failed_blocks() == set()
    assert [block(worker, 5 + i) for i in range(8)] == [content(one) for one in A]
    # And back: the same bytes under another chain.
    other = chain(*range(100, 104))
    one = save(other, [5, 6, 7, 8])
    worker.writes.start([one])
    assert store.transfers.drain(PATIENCE_S)
    assert worker.take_report().ended_saves == {one.segment: (1, True)}  # type: ignore[union-attr]
    assert match(space, other).blocks == 4


def test_a_part_that_is_damaged_is_reported_and_the_rest_is_there(
    worker: KVWorker, space: Space, tmp_path: Path
) -> None:
    space.save(slots(A[:4]))
    space.save(slots(A))
    [_, second] = match(space, A).runs
    path = next(tmp_path.glob(f"*/??/{second.segment.hex()}.0"))
    path.write_bytes(path.read_bytes()[:-1])
    worker.reads.start([load(space)])
    assert finished(worker) == {"r"}
    assert worker.reads.take_failed_blocks() == {9, 10, 11, 12}
    report = worker.take_report()
    assert report is not None
    assert (report.failed_loads, report.bad_segments) == ({"r": {0: 4}}, {second.segment})
    assert [block(worker, 5 + i) for i in range(4)] == [content(one) for one in A[:4]]


def test_a_read_that_hangs_ends_at_the_deadline_and_its_bytes_are_thrown_away(
    worker: KVWorker, space: Space, store: Store, plan: Plan
) -> None:
    space.save(slots(A))
    object.__setattr__(store.settings.kv, "load_deadline_s", 0.3)
    go = threading.Event()
    store.payloads._sleep = lambda seconds: go.wait(PATIENCE_S)  # type: ignore[attr-defined]
    plan.replace(Rule("delay", ("read",), delay_s=1.0))
    began = time.monotonic()
    worker.reads.start([load(space)])
    assert finished(worker) == {"r"}
    assert 0.2 < time.monotonic() - began < PATIENCE_S / 2
    assert worker.reads.take_failed_blocks() == set(range(5, 13))
    # The blocks belong to somebody else by now; what the hung reads bring must not touch them.
    go.set()
    assert store.transfers.drain(PATIENCE_S)
    assert all(block(worker, 5 + i) == bytes(GROUP.slot_bytes) for i in range(8))
    assert worker.reads.take_finished()[0] == set()
    object.__setattr__(store.settings.kv, "load_deadline_s", 30.0)


def test_reads_that_hang_are_not_waited_for_by_everybody(store: Store, plan: Plan) -> None:
    """A disk that hangs raises nothing: three loads find that out, and nothing is promised any more."""
    breaker = Breaker("payloads", BreakerSettings(failures=3, backoff_s=0.02, max_backoff_s=0.02))
    store = with_parts(
        store, payloads=BreakingPayloads(store.payloads, breaker, reads_probe=False), breaker=breaker
    )
    space, worker = open_space(store), KVWorker(store, WORKERS, segment_blocks=[4])
    worker.register(caches(), BLOCKS)
    worker.use(space.namespace)
    space.save(slots(A))
    object.__setattr__(store.settings.kv, "load_deadline_s", 0.1)
    go = threading.Event()
    store.payloads._inner._sleep = lambda seconds: go.wait(PATIENCE_S)  # type: ignore[attr-defined]
    plan.replace(Rule("delay", ("read", "put", "ping"), delay_s=1.0))
    found_out = 0
    while match(space, A).blocks == 8:
        worker.reads.start([load(space)])
        assert finished(worker) == {"r"}
        found_out += 1
    # Whichever ends by itself, too late before it began, has found out nothing.
    assert found_out >= 3
    assert worker.reads.take_failed_blocks() == set(range(5, 13))
    assert match(space, A).blocks == 0
    plan.replace()
    go.set()
    until(lambda: match(space, A).blocks == 8)
    assert store.transfers.drain(PATIENCE_S)
    object.__setattr__(store.settings.kv, "load_deadline_s", 30.0)


def test_abandoned_loads_count_as_failed(worker: KVWorker, space: Space) -> None:
    space.save(slots(A))
    worker.reads.start([load(space)])
    worker.reads.abandon()
    assert finished(worker) == {"r"}
    assert worker.reads.take_failed_blocks() == set(range(5, 13))


def test_an_engine_falls_asleep_when_no_copy_to_its_cache_is_under_way(
    worker: KVWorker, space: Space, monkeypatch: Any
) -> None:
    """From vLLM 0.33 on: after `unregister` the cache's memory is unmapped; a copy there ends the engine."""
    space.save(slots(A))
    cache, copying, go = worker.memory.caches[0], threading.Semaphore(0), threading.Event()
    scatter, asleep, late = cache.scatter, threading.Event(), []

    def slow(*copy: Any) -> Any:
        copying.release()
        assert go.wait(PATIENCE_S)
        late.append(asleep.is_set())
        return scatter(*copy)

    monkeypatch.setattr(cache, "scatter", slow)
    worker.reads.start([load(space)])
    assert copying.acquire(timeout=PATIENCE_S)
    worker.reads.start([load(space, "waits for a thread or for its copy")])

    def sleep() -> None:
        worker.unregister()
        asleep.set()

    sleeper = threading.Thread(target=sleep)
    sleeper.start()
    # Whatever comes from here on may not begin; what has begun is waited for.
    until(lambda: worker.reads._halted)
    assert not asleep.wait(0.05)
    go.set()
    sleeper.join(PATIENCE_S)
    assert asleep.is_set()
    assert finished(worker, 2) == {"r", "waits for a thread or for its copy"}
    assert worker.reads.take_failed_blocks() == set(range(5, 13))
    assert late and not any(late)
    worker.unregister()  # again changes nothing
    worker.restore()
    go.set()
    worker.reads.start([load(space, "after")])
    assert finished(worker) == {"after"}
    assert worker.reads.take_failed_blocks() == set()
    assert [block(worker, 5 + i) for i in range(8)] == [content(one) for one in A]


def test_an_engine_stays_awake_beside_a_copy_that_hangs(
    worker: KVWorker, store: Store, space: Space, monkeypatch: Any
) -> None:
    space.save(slots(A))
    cache, copying, go = worker.memory.caches[0], threading.Event(), threading.Event()
    scatter = cache.scatter

    def hangs(*copy: Any) -> Any:
        copying.set()
        assert go.wait(PATIENCE_S)
        return scatter(*copy)

    monkeypatch.setattr(cache, "scatter", hangs)
    object.__setattr__(store.settings.kv, "load_deadline_s", 0.05)
    worker.reads.start([load(space)])
    assert copying.wait(PATIENCE_S)
    with pytest.raises(TimeoutError, match="its memory must stay"):
        worker.unregister()
    go.set()
    assert finished(worker) == {"r"}
    object.__setattr__(store.settings.kv, "load_deadline_s", PATIENCE_S)
    worker.reads.take_failed_blocks()
    # It goes on, and may fall asleep later.
    worker.reads.start([load(space, "after")])
    assert finished(worker) == {"after"} and worker.reads.take_failed_blocks() == set()
    worker.unregister()


def test_saves_that_fail_fill_no_log(
    worker: KVWorker, store: Store, plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    plan.replace(Rule("permission", ("put",)))
    for number in range(10):
        worker.writes.start([save(chain(500 + number), [1])])
    assert store.transfers.drain(PATIENCE_S)
    assert store.counters.snapshot()["save_failures{permission}"] == 10
    assert [one.levelname for one in caplog.records if "not cached" in one.getMessage()].count("WARNING") == 1


def test_loads_that_fail_fill_no_log(
    worker: KVWorker, space: Space, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chains = [chain(500 + number, 1) for number in range(10)]
    loads = []
    for number, hashes in enumerate(chains):
        space.save(slots(hashes))
        loads.append(Load(str(number), [GroupLoad(0, 0, match(space, hashes).runs, hashes, {0: [5, 6]})]))
    for path in tmp_path.glob("*/??/*.0"):
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    for one in loads:
        worker.reads.start([one])
        assert finished(worker) == {one.request_id}
    first = loads[0].groups[0].runs[0].segment.hex()
    (said,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith(f"2 blocks of segment {first} are computed: ")
    assert [match(space, hashes).blocks for hashes in chains] == [0] * 10, "they are evicted all the same"


def test_a_save_waits_for_staging_and_a_place_in_the_queue_and_leaks_nothing(
    worker: KVWorker, store: Store, space: Space
) -> None:
    staging = worker.memory.saves
    held = staging.try_acquire(staging.size_bytes)
    one = save(A[:4], [1, 2, 3, 4])
    one.blocks_stay = True
    worker.writes.start([one])
    worker.writes.start([])
    assert worker.take_report() is None and worker.writes.waiting_blocks == 4
    assert held is not None
    staging.release(held)
    object.__setattr__(store.settings.transfers, "queue_jobs", 0)
    worker.writes.start([])
    assert worker.take_report() is None and staging.used_bytes == 0
    object.__setattr__(store.settings.transfers, "queue_jobs", 4096)
    worker.writes.start([])
    assert store.transfers.drain(PATIENCE_S)
    report = worker.take_report()
    assert report is not None and report.ended_saves == {one.segment: (1, True)}
    assert match(space, A).blocks == 4 and staging.used_bytes == 0


def test_a_tail_takes_as_much_staging_as_it_has_blocks(worker: KVWorker, store: Store) -> None:
    go = threading.Event()
    store.payloads._sleep = lambda seconds: go.wait(PATIENCE_S)  # type: ignore[attr-defined]
    store.payloads._plan.replace(Rule("delay", ("put",), delay_s=1.0))  # type: ignore[attr-defined]
    worker.writes.start([save(A[:4], [1, 2, 3, 4]), save(A[4:7], [5, 6, 7])])
    assert worker.memory.used_bytes == {"load": 0, "save": 7 * GROUP.slot_bytes}
    go.set()
    assert store.transfers.drain(PATIENCE_S)
    assert worker.memory.used_bytes == {"load": 0, "save": 0}


@pytest.mark.parametrize(
    "tensors",
    [
        lambda: caches(dtype=torch.float16),
        lambda: caches(shape=(8, 2, 16)),  # tokens before heads: the same number of bytes
        lambda: caches(shape=(2, 16, 8)),
        lambda: caches(shape=(1, 8, 16)),
    ],
)
def test_a_layout_that_is_not_understood_is_refused(store: Store, tensors: Any) -> None:
    with pytest.raises(ConfigError, match="layout not understood"):
        KVWorker(store, WORKERS, segment_blocks=[4]).register(tensors(), BLOCKS)


def test_the_scheduler_is_told_that_payloads_are_down_and_that_they_are_back(
    store: Store, plan: Plan
) -> None:
    settings = BreakerSettings(failures=1, backoff_s=0.02, max_backoff_s=0.02)
    breaker = Breaker("payloads", settings)
    payloads = BreakingPayloads(store.payloads, breaker, reads_probe=False)
    store = with_parts(store, payloads=payloads, breaker=breaker)
    space = open_space(store)
    worker = KVWorker(store, WORKERS, segment_blocks=[4])
    worker.register(caches(), BLOCKS)
    worker.use(space.namespace)
    space.save(slots(A))
    one = load(space)
    plan.replace(Rule("transient"))
    worker.reads.start([one])
    assert finished(worker) == {"r"}
    report = worker.take_report()
    assert report is not None and report.payloads_down == {0: True}
    again = worker.take_report()
    assert again is None  # said once
    plan.replace()
    # No load is needed for it to find out.
    end = time.monotonic() + PATIENCE_S
    while (report := worker.take_report()) is None and time.monotonic() < end:
        time.sleep(0.005)
    assert report is not None and report.payloads_down == {0: False}
