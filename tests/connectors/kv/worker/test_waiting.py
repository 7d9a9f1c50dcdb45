"""A worker without room: saves wait as long as their requests have their blocks, and no longer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")
pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.kv.connector import KVStoreConnector
from connectors.kv.messages import KVStoreMetadata, Load, Save
from connectors.kv.worker.worker import KVWorker
from kvstore.conformance.faulty import Plan, Rule
from kvstore.keys import block_key, digest, new_segment_id
from kvstore.store.space import Space
from kvstore.store.store import Store
from tests.connectors.groups import LAYERS, WORKERS
from tests.store.world import SLOT_BYTES, chain, make_store, match, open_space
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.engine

BLOCKS = 20


def save(request: str, *steps: int, stays: bool = True) -> Save:
    hashes = chain(*steps)
    blocks = {0: [1 + step % 10 for step in steps]}
    return Save(0, new_segment_id(), 1_700_000_000, 0, hashes, blocks, request, stays, True, True)


def hand_over(worker: KVWorker, **seconds: float) -> None:
    worker.writes.begin_step((), seconds, ())


def lose(worker: KVWorker, *requests: str, flushes: list[Save] | None = None) -> None:
    worker.writes.begin_step(requests, {}, flushes or ())


@pytest.fixture
def plan() -> Plan:
    return Plan()


@pytest.fixture
def store(tmp_path: Path, plan: Plan) -> Iterator[Store]:
    made = make_store(tmp_path, plan=plan, kv={"staging_bytes": SLOT_BYTES})
    yield made
    made.close()


@pytest.fixture
def space(store: Store) -> Space:
    return open_space(store)


@pytest.fixture
def worker(store: Store, space: Space) -> KVWorker:
    """With memory for one block at a time."""
    made = KVWorker(store, WORKERS, segment_blocks=[1])
    made.register({name: torch.randn(BLOCKS, 2, 8, 16).to(torch.bfloat16) for name in LAYERS}, BLOCKS)
    made.use(space.namespace)
    return made


def until(worker: KVWorker, store: Store, names: set[str]) -> None:
    end = time.monotonic() + PATIENCE_S
    read: set[str] = set()
    while read != names and time.monotonic() < end:
        worker.writes.start([])  # every step
        read |= worker.writes.take_read()
        time.sleep(0.001)
    assert read == names
    assert store.transfers.drain(PATIENCE_S)


def test_saves_are_tried_in_order_and_dropped_with_their_blocks(
    worker: KVWorker, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, begun, dropped = [0], [], []

    def start(one: Save) -> bool | None:
        if one.request_id == "never":
            return None
        room[0] -= 1
        if room[0] >= 0:
            begun.append(one)
        return room[0] >= 0

    monkeypatch.setattr(worker.writes, "_start", start)
    monkeypatch.setattr(worker.writes, "_drop", dropped.append)
    a, b, more, c = saves = [save("a", 1), save("b", 2), save("a", 3), save("c", 4)]
    worker.writes.start(saves[:2])
    worker.writes.start(saves[2:])
    assert worker.writes.waiting_blocks == 4 and not dropped
    # Nothing was to be read of d; c has waited long enough.
    hand_over(worker, a=60.0, b=60.0, c=0.0, d=60.0)
    assert worker.writes.take_read() == {"c", "d"} and dropped == [c]
    room[0] = 1
    worker.writes.start([])
    assert begun == [a] and worker.writes.take_read() == set()
    room[0] = 1
    worker.writes.start([])
    assert begun == [a, b] and worker.writes.take_read() == {"b"}
    lose(worker, "a", "e")
    assert dropped == [c, more] and worker.writes.take_read() == {"a"}
    assert worker.writes.take_read() == set()
    room[0] = 0
    worker.writes.start([a])
    worker.writes.give_up()
    assert dropped[-1] is a
    # One that will never have room is in nobody's way.
    room[0] = 1
    never, other = save("never", 1), save("b", 2)
    worker.writes.start([never, other])
    assert (dropped[-1], begun[-1], worker.writes.waiting_blocks) == (never, other, 0)


def test_comparisons_find_room_before_what_can_wait(
    worker: KVWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[str] = []
    room = [False]
    monkeypatch.setattr(
        worker.writes, "_start", lambda one: begun.append(one.request_id) or True if room[0] else False
    )
    monkeypatch.setattr(worker.audits, "start", lambda audits: begun.append(audits[0].request_id))
    worker.writes.start([save("waits", 1)])
    room[0] = True
    made: Any = object.__new__(KVStoreConnector)
    made._worker = worker
    work = KVStoreMetadata(
        saves=[save("saves", 3)],
        flushes=[save("flushed", 2, stays=False)],
        audits=[Load("compared", [])],
    )
    made._get_connector_metadata = lambda: work
    made.handle_preemptions(work)
    made.wait_for_save()
    assert begun == ["flushed", "compared", "waits", "saves"]


def test_nothing_is_stored_behind_what_a_request_loses_when_it_ends(
    worker: KVWorker, space: Space, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as busy:
        busy.setattr(worker.memory.saves, "try_acquire", lambda nbytes: None)
        worker.writes.start([save("r", 1)])
    last, others = save("r", 2, stays=False), save("s", 3, stays=False)
    lose(worker, "r", "s", flushes=[last, others])
    assert store.transfers.drain(PATIENCE_S)
    assert [match(space, one.hashes).blocks for one in (last, others)] == [0, 1]
    assert store.counters.snapshot()["save_blocks{dropped}"] == 2


def test_blocks_are_kept_until_there_was_room_to_read_them(
    worker: KVWorker, space: Space, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves = [save("r", step) for step in range(4)]
    # Another engine is at one of them, and nobody knows when it will be done.
    space.register()
    store.index.claim(space.id, digest(block_key(saves[2].hashes[0])), new_segment_id(), 60.0)
    other = save("x", 9)
    other.handed_over = other.insist = other.blocks_stay = False
    with monkeypatch.context() as busy:
        busy.setattr(worker.memory.saves, "try_acquire", lambda nbytes: None)
        worker.writes.start([*saves, other])
    hand_over(worker, r=30.0)
    assert store.counters.snapshot()["save_blocks{dropped}"] == 1, "its blocks won't be there"
    until(worker, store, {"r"})
    assert all(match(space, one.hashes).blocks == 1 for one in saves)
    report = worker.take_report()
    assert report is not None and not report.failed_handoffs
    assert {one.segment for one in saves} <= set(report.ended_saves)


def test_a_hand_off_that_failed_is_reported(
    worker: KVWorker, space: Space, store: Store, plan: Plan, monkeypatch: Any
) -> None:
    there = save("a", 1)
    worker.writes.start([there])
    assert store.transfers.drain(PATIENCE_S)
    again = save("a", 1)
    worker.writes.start([again])
    assert store.transfers.drain(PATIENCE_S)
    report = worker.take_report()
    assert report is not None and report.ended_saves[again.segment] == (1, False)
    assert not report.failed_handoffs, "it is stored already"

    plan.replace(Rule("transient", verbs=("put",)))
    worker.writes.start([save("b", 2)])
    assert store.transfers.drain(PATIENCE_S)
    # And one whose blocks are gone before there was room.
    busy, late = save("c", 3), save("d", 4)
    monkeypatch.setattr(worker.memory.saves, "try_acquire", lambda nbytes: None)
    worker.writes.start([busy, late])
    lose(worker, "d")
    monkeypatch.undo()
    plan.replace()
    hand_over(worker, c=30.0)
    until(worker, store, {"c"})
    report = worker.take_report()
    assert report is not None and report.failed_handoffs == {"b", "d"}
    assert report.aggregate(type(report)(failed_handoffs={"z"})).failed_handoffs == {"b", "d", "z"}
    # Another namespace: what waits was meant for the last one.
    monkeypatch.setattr(worker.memory.saves, "try_acquire", lambda nbytes: None)
    worker.writes.start([save("e", 5)])
    monkeypatch.undo()
    worker.use(space.namespace.model_copy(update={"weights": "others"}))
    report = worker.take_report()
    assert report is not None and report.failed_handoffs == {"e"}


def test_a_block_that_was_handed_out_again_is_not_tried_again(
    worker: KVWorker, space: Space, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's second model runner may have zeroed it by the time that a connector hears of the preemption."""
    connector: Any = object.__new__(KVStoreConnector)
    connector._worker = worker
    with monkeypatch.context() as busy:
        busy.setattr(worker.memory.saves, "try_acquire", lambda nbytes: None)
        worker.writes.start([late := save("r", 1)])
    connector.handle_preemptions(KVStoreMetadata(lost_blocks={"r"}))
    assert store.transfers.drain(PATIENCE_S)
    assert match(space, late.hashes).blocks == 0
    report = worker.take_report()
    assert report is not None and report.failed_handoffs == {"r"}
