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

from connectors.kv_types import GroupLoad, Load, Save
from connectors.kv_worker import KVWorker
from kvstore.blobs.breaking import BreakingPayloads
from kvstore.blobs.faulty import Plan, Rule
from kvstore.breaker import Breaker
from kvstore.errors import ConfigError
from kvstore.keys import new_segment_id
from kvstore.store import Space, Store
from schemas.settings import BreakerSettings
from tests.connectors.groups import LAYERS, WORKERS
from tests.store.world import GROUP, chain, content, make_store, match, open_space, slots

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


def finished(worker: KVWorker, within_s: float = 5.0) -> set[str]:
    end = time.monotonic() + within_s
    while not (done := worker.take_finished()[0]) and time.monotonic() < end:
        time.sleep(0.001)
    return done


def block(worker: KVWorker, number: int) -> bytes:
    chunk = worker._load_staging.acquire(time.monotonic() + 1)  # type: ignore[union-attr]
    worker._caches[0].gather({0: [number]}, chunk).wait()
    data = bytes(chunk.views(1, GROUP.slot_bytes)[0])
    worker._load_staging.release(chunk)  # type: ignore[union-attr]
    return data


def test_what_one_worker_saves_another_loads(worker: KVWorker, space: Space, store: Store) -> None:
    space.save(slots(A))
    worker.start_loads([load(space)])
    assert finished(worker) == {"r"}
    assert worker.take_failed_blocks() == set()
    assert [block(worker, 5 + i) for i in range(8)] == [content(one) for one in A]
    # And back: the same bytes under another chain.
    other = chain(*range(100, 104))
    one = save(other, [5, 6, 7, 8])
    worker.start_saves([one])
    assert store.transfers.drain(5)
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
    worker.start_loads([load(space)])
    assert finished(worker) == {"r"}
    assert worker.take_failed_blocks() == {9, 10, 11, 12}
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
    store.payloads._sleep = lambda seconds: go.wait(20)  # type: ignore[attr-defined]
    plan.replace(Rule("delay", ("read",), delay_s=1.0))
    began = time.monotonic()
    worker.start_loads([load(space)])
    assert finished(worker) == {"r"}
    assert 0.2 < time.monotonic() - began < 3
    assert worker.take_failed_blocks() == set(range(5, 13))
    # The blocks belong to somebody else by now; what the hung reads bring must not touch them.
    go.set()
    assert store.transfers.drain(10)
    assert all(block(worker, 5 + i) == bytes(GROUP.slot_bytes) for i in range(8))
    assert finished(worker, 0.05) == set()
    object.__setattr__(store.settings.kv, "load_deadline_s", 30.0)


def test_abandoned_loads_count_as_failed(worker: KVWorker, space: Space) -> None:
    space.save(slots(A))
    worker.start_loads([load(space)])
    worker.abandon_loads()
    assert finished(worker) == {"r"}
    assert worker.take_failed_blocks() == set(range(5, 13))


def test_full_staging_drops_saves_and_leaks_nothing(worker: KVWorker, store: Store) -> None:
    staging = worker._save_staging
    assert staging is not None
    held = [staging.try_acquire() for _ in range(staging.chunks)]
    one = save(A[:4], [1, 2, 3, 4])
    worker.start_saves([one])
    assert store.counters.snapshot()["save_blocks{dropped}"] == 4
    assert worker.take_report().ended_saves == {one.segment: (1, False)}  # type: ignore[union-attr]
    for chunk in held:
        assert chunk is not None
        staging.release(chunk)
    # A full queue gives the chunk back too.
    object.__setattr__(store.settings.transfers, "write_bytes", 1)
    worker.start_saves([save(A[:4], [1, 2, 3, 4])])
    object.__setattr__(store.settings.transfers, "write_bytes", 512 << 20)
    assert store.transfers.drain(5)
    assert staging.free == staging.chunks


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
    store: Store, space: Space, worker: KVWorker, plan: Plan
) -> None:
    settings = BreakerSettings(failures=1, backoff_s=0.02, max_backoff_s=0.02)
    store.breaker = Breaker("payloads", settings)
    store.payloads = BreakingPayloads(store.payloads, store.breaker, reads_probe=False)
    space.save(slots(A))
    one = load(space)
    plan.replace(Rule("transient"))
    worker.start_loads([one])
    assert finished(worker) == {"r"}
    report = worker.take_report()
    assert report is not None and report.payloads_down == {0: True}
    again = worker.take_report()
    assert again is None  # said once
    plan.replace()
    # No load is needed for it to find out.
    end = time.monotonic() + 5
    while (report := worker.take_report()) is None and time.monotonic() < end:
        time.sleep(0.005)
    assert report is not None and report.payloads_down == {0: False}
