"""Loads of one worker that fall behind: cut at whole blocks, in order, with what arrived; nothing else is."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.choice.cost import Prefill
from connectors.kv.messages import CUT, GroupLoad, KVStoreWorkerMetadata, Load
from connectors.kv.worker.worker import KVWorker
from kvstore.conformance.faulty import Plan, Rule
from kvstore.errors import HeldBack, TransientError
from kvstore.keys import SegmentId
from kvstore.store.space import Space
from kvstore.store.store import Store
from tests.connectors.groups import TOKENS, WORKERS
from tests.connectors.kv.worker.test_worker import BLOCKS, A, block, caches, finished
from tests.store.world import (
    GROUP,
    SLOT_BYTES,
    chain,
    content,
    make_store,
    match,
    open_space,
    slots,
    with_parts,
    with_scarce_reads,
)
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine

#: What computing a block takes at this speed is far less than a test waits for a read, and at this far more.
QUICK, SLOW = Prefill(1.0), Prefill(1e9)


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
    made = open_space(store)
    # Four segments of two blocks each.
    for stop in (2, 4, 6, 8):
        made.save(slots(A[:stop]))
    return made


def worker_of(store: Store, space: Space, *, by_request: bool = False) -> KVWorker:
    made = KVWorker(store, WORKERS, segment_blocks=[4], by_request=by_request)
    made.register(caches(), BLOCKS)
    made.use(space.namespace)
    return made


@pytest.fixture
def worker(store: Store, space: Space) -> KVWorker:
    return worker_of(store, space)


def load(space: Space, prefill: Prefill | None, name: str = "r") -> Load:
    runs = match(space, A).runs
    tiers = space.tiers(runs)
    group = GroupLoad(0, 0, runs, A, {0: list(range(5, 13))}, tiers, SLOT_BYTES)
    return Load(name, [group], prefill, 0, 8 * TOKENS)


def segments(space: Space) -> list[SegmentId]:
    return [run.segment for run in match(space, A).runs]


def hang(store: Store, plan: Plan, *names: str) -> threading.Event:
    """Reads of payloads with these in their names wait for the event."""
    go = threading.Event()
    store.payloads._sleep = lambda seconds: go.wait(PATIENCE_S)  # type: ignore[attr-defined]
    plan.replace(*(Rule("delay", ("read",), name, delay_s=1.0) for name in names))
    return go


def reported(worker: KVWorker) -> KVStoreWorkerMetadata:
    report = worker.take_report()
    assert report is not None
    return report


@pytest.mark.parametrize("hung", [0, 1, 2, 3])
def test_a_load_is_cut_before_the_first_piece_that_hangs_and_keeps_what_arrived(
    worker: KVWorker, space: Space, store: Store, plan: Plan, hung: int
) -> None:
    go = hang(store, plan, *(one.hex() for one in segments(space)[hung:]))
    now = time.monotonic()
    worker.reads._pace._clock = lambda: now
    worker.reads.start([load(space, Prefill(1000.0))])
    # No time passes until those have arrived that don't hang.
    [ticket] = worker.reads._live
    until(lambda: sum(ticket.left.values()) == (8 - 2 * hung) * SLOT_BYTES)
    now += 1000.0
    assert finished(worker) == {"r"}
    assert worker.reads.take_failed_blocks() == set(range(5 + 2 * hung, 13))
    report = reported(worker)
    assert report.failed_loads == {"r": {0: 2 * hung}} and report.load_reasons == {"r": CUT}
    assert not report.bad_segments and not report.load_seconds
    counters = store.counters.snapshot()
    assert counters[f"miss_blocks{{{CUT}}}"] == 8 - 2 * hung
    assert not counters["miss_blocks{deadline}"]
    assert [block(worker, 5 + i) for i in range(2 * hung)] == [content(one) for one in A[: 2 * hung]]
    # The blocks are computed by now; what the hung reads bring must not touch them.
    go.set()
    assert store.transfers.drain(PATIENCE_S)
    assert all(block(worker, 5 + i) == bytes(GROUP.slot_bytes) for i in range(2 * hung, 8))
    assert worker.reads.take_finished()[0] == set() and worker.reads.under_way == 0
    assert match(space, A).blocks == 8, "nothing is wrong with what is stored"
    done = sum(one.done_bytes for one in reported(worker).speeds[0].values())
    assert done == 8 * SLOT_BYTES, "each read is reported once"


@pytest.mark.parametrize("prefill", [None, SLOW])
def test_a_load_that_pays_is_waited_for(
    worker: KVWorker, space: Space, store: Store, plan: Plan, prefill: Prefill | None
) -> None:
    go = hang(store, plan, "")
    worker.reads.start([load(space, prefill)])
    looked = threading.Event()
    threading.Timer(0.3, looked.set).start()
    while not looked.wait(0.005):
        assert worker.reads.take_finished() == (set(), set())
    go.set()
    assert finished(worker) == {"r"}
    assert worker.reads.take_failed_blocks() == set()
    assert set(reported(worker).load_seconds) == {"r"}


def test_a_load_that_was_queued_behind_others_is_late_as_well(
    worker: KVWorker, space: Space, store: Store, plan: Plan
) -> None:
    """All threads are busy with another's reads."""
    go = hang(store, plan, "")
    worker.reads.start([load(space, None, "patient"), load(space, None, "patient too"), load(space, QUICK)])
    assert finished(worker) == {"r"}
    assert worker.reads.take_failed_blocks() == set(range(5, 13))
    go.set()
    assert finished(worker, 2) == {"patient", "patient too"}
    assert worker.reads.take_failed_blocks() == set()


def test_where_vllm_computes_all_of_a_failed_request_a_cut_counts_so(
    store: Store, space: Space, plan: Plan
) -> None:
    worker = worker_of(store, space, by_request=True)
    go = hang(store, plan, segments(space)[3].hex())
    worker.reads.start([load(space, Prefill(1000.0))])
    done: list[tuple[set[str], set[str]]] = []
    until(lambda: done.append(worker.reads.take_finished()) or done[-1][0])
    assert done[-1] == ({"r"}, {"r"}) and worker.reads.take_failed_blocks() == set()
    assert reported(worker).failed_loads == {"r": {0: 0}}
    go.set()


def test_where_all_would_be_computed_a_window_is_weighed_against_all_of_it(
    store: Store, space: Space, plan: Plan
) -> None:
    """Only the last blocks are loaded, and what precedes them would be computed as well."""
    worker = worker_of(store, space, by_request=True)
    go = hang(store, plan, segments(space)[3].hex())
    whole = load(space, SLOW)
    last = GroupLoad(0, 6, whole.groups[0].runs[3:], A[6:], {0: [11, 12]}, whole.groups[0].tiers, SLOT_BYTES)
    stop = 6 * TOKENS
    worker.reads.start([Load("all", [last], SLOW, 0, stop), Load("nothing", [last], SLOW, stop, stop)])
    ended: set[str] = set()
    until(lambda: ended.update(worker.reads.take_finished()[0]) or ended)
    assert ended == {"nothing"}
    assert reported(worker).failed_loads == {"nothing": {0: 0}}
    go.set()
    assert finished(worker) == {"all"}


def test_a_failure_is_no_cut(worker: KVWorker, space: Space, store: Store, plan: Plan) -> None:
    *_, last = segments(space)
    go = hang(store, plan, last.hex())
    first = segments(space)[0].hex()
    sleep = store.payloads._sleep  # type: ignore[attr-defined]
    plan.replace(Rule("transient", ("read",), first), Rule("delay", ("read",), last.hex(), delay_s=1.0))
    assert store.payloads._sleep is sleep  # type: ignore[attr-defined]
    now = time.monotonic()
    worker.reads._pace._clock = lambda: now
    worker.reads.start([load(space, Prefill(1000.0))])
    [ticket] = worker.reads._live
    until(lambda: ticket.reason)
    now += 1000.0
    assert finished(worker) == {"r"}
    report = reported(worker)
    assert report.failed_loads == {"r": {0: 0}}
    assert report.load_reasons == {"r": TransientError.reason}
    go.set()


@pytest.mark.parametrize("gap_blocks", [0, 1, 2, 3])
def test_no_bytes_are_read_again_as_the_gap_to_a_header(store: Store, gap_blocks: int) -> None:
    space = open_space(store)
    hashes = chain(*range(100, 108))
    space.save(slots(hashes))
    gapped = with_parts(store, gap_bytes=gap_blocks * SLOT_BYTES)
    worker = worker_of(gapped, space)
    worker.reads._pace.pieces = lambda tier, nbytes: 1000  # type: ignore[method-assign]
    runs = match(space, hashes).runs
    group = GroupLoad(0, 0, runs, hashes, {}, space.tiers(runs), SLOT_BYTES)
    pieces = worker.reads._pieces(group, may_be_cut=True)
    assert len(pieces) > 1 and [worker.reads._requests(one) for one in pieces[1:]] == [2] * (len(pieces) - 1)


def test_reads_for_the_sake_of_measuring_touch_no_block_and_report_what_they_took(
    worker: KVWorker, space: Space, store: Store, plan: Plan
) -> None:
    run = match(space, A).runs[0]
    probe = GroupLoad(0, 0, [run], A[:2], {}, space.tiers([run]), SLOT_BYTES)
    worker.reads.probe([probe])
    assert store.transfers.drain(PATIENCE_S)
    measured = reported(worker).speeds[0]["disk"]
    assert (measured.done_bytes, measured.count) == (0, 1), "no load has to wait for it"
    assert all(block(worker, number) == bytes(GROUP.slot_bytes) for number in range(BLOCKS))
    assert worker.reads.take_finished() == (set(), set()) and worker.memory.used_bytes["load"] == 0
    # Nor do those that fail, or find no memory.
    plan.replace(Rule("transient", ("read",)))
    worker.reads.probe([probe])
    assert store.transfers.drain(PATIENCE_S)
    held = worker.memory.loads.try_acquire(worker.memory.loads.size_bytes)
    worker.reads.probe([probe])
    assert store.transfers.drain(PATIENCE_S)
    assert held is not None
    worker.memory.loads.release(held)
    report = reported(worker)
    assert report.speeds[0]["disk"].count == 1, "what brought nothing says nothing"
    assert not report.failed_loads
    # They are no loads and no misses: those of whom no request asked are counted apart.
    counted = {name: count for name, count in store.counters.snapshot().items() if count}
    assert (counted["probe_blocks"], counted["probe_bytes"]) == (2, 2 * SLOT_BYTES)
    assert not [name for name in counted if name.startswith(("load_", "miss_"))]


def test_nothing_is_read_for_the_sake_of_measuring_while_reads_are_scarce(store: Store, space: Space) -> None:
    worker = worker_of(with_scarce_reads(store), space)
    run = match(space, A).runs[0]
    worker.reads.probe([GroupLoad(0, 0, [run], A[:2], {}, space.tiers([run]), SLOT_BYTES)])
    assert store.transfers.drain(PATIENCE_S)
    assert not store.counters.snapshot()["probe_blocks"]


def test_the_scheduler_is_told_once_that_reads_are_scarce(store: Store, space: Space) -> None:
    """What is fetched ahead is fetched by another process, whose own throttle knows nothing of it."""
    worker = worker_of(with_scarce_reads(store), space)
    assert reported(worker).reads_scarce == {0: True}
    assert worker.take_report() is None
    other = KVStoreWorkerMetadata(reads_scarce={1: False})
    both = KVStoreWorkerMetadata(reads_scarce={0: True}).aggregate(other)
    assert isinstance(both, KVStoreWorkerMetadata) and both.reads_scarce == {0: True, 1: False}


def test_a_load_that_is_held_back_tells_how_slow_the_store_is(
    worker: KVWorker, space: Space, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def held(*args: Any, **options: Any) -> None:
        raise HeldBack("not tried", 30.0)

    monkeypatch.setattr(store.payloads, "read", held)
    worker.reads.start([load(space, None)])
    assert finished(worker) == {"r"}
    report = reported(worker)
    assert report.load_reasons == {"r": "throttled"}
    assert report.speeds[0]["disk"].speed.seconds(2 * SLOT_BYTES) > 15.0


def test_a_slow_read_is_told_before_it_ends(worker: KVWorker, space: Space, store: Store, plan: Plan) -> None:
    worker.reads.start([load(space, None)])
    assert finished(worker) == {"r"}
    before = reported(worker).speeds[0]["disk"].speed
    go = hang(store, plan, "")
    worker.reads.start([load(space, None)])

    def told() -> bool:
        report = worker.take_report()
        news = report.speeds.get(0, {}).get("disk") if report is not None else None
        return news is not None and news.speed.seconds(8 * SLOT_BYTES) > 4 * before.seconds(8 * SLOT_BYTES)

    until(told)
    go.set()
    assert finished(worker) == {"r"}


@pytest.mark.parametrize("other", [CUT, "corrupt"])
def test_of_two_ranks_the_shorter_prefix_and_the_worse_reason_count(other: str) -> None:
    one = KVStoreWorkerMetadata(
        failed_loads={"r": {0: 6}}, load_reasons={"r": CUT}, load_seconds={"s": 1.0, "t": 3.0}
    )
    two = KVStoreWorkerMetadata(
        failed_loads={"r": {0: 2}}, load_reasons={"r": other}, load_seconds={"s": 2.0}
    )
    for both in (one.aggregate(two), two.aggregate(one)):
        assert isinstance(both, KVStoreWorkerMetadata)
        assert both.failed_loads == {"r": {0: 2}} and both.load_reasons == {"r": other}
        assert both.load_seconds == {"s": 2.0, "t": 3.0}
