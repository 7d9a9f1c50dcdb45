"""A worker without room for a hand-off's saves: they wait, their blocks with them, and not for ever."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")
pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.kv.connector import KVStoreConnector
from connectors.kv.messages import KVStoreMetadata, Save
from connectors.kv.worker.backlog import KeptSaves
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


def test_saves_are_tried_in_order_and_given_up_with_their_blocks() -> None:
    room, started, dropped = [0], [], []

    def start(one: Save) -> bool:
        room[0] -= 1
        if room[0] >= 0:
            started.append(one)
        return room[0] >= 0

    kept = KeptSaves(start, dropped.append)
    saves = [save("a", 1), save("b", 2), save("a", 3), save("c", 4)]
    kept.add(saves[:2])
    kept.add(saves[2:])
    assert kept.blocks == 4
    kept.finished({"a": 60.0, "b": 60.0, "c": 0.0, "d": 60.0})
    # Nothing was to be read of d; c has waited long enough.
    assert kept.take_read() == {"c", "d"} and dropped == saves[3:]
    room[0] = 1
    kept.add([])
    assert started == saves[:1] and kept.take_read() == set()
    room[0] = 1
    kept.add([])
    assert started == saves[:2] and kept.take_read() == {"b"}
    kept.release({"a", "e"})
    assert dropped == [saves[3], saves[2]] and kept.take_read() == {"a"}
    assert kept.take_read() == set()
    room[0] = 0
    kept.add([saves[0]])
    kept.give_up()
    assert dropped[-1] is saves[0]
    room[0] = 9
    kept.add([])
    assert len(started) == 2


def test_a_save_that_will_never_have_room_is_in_nobodys_way() -> None:
    never, started, dropped = save("a", 1), [], []

    def start(one: Save) -> bool | None:
        if one is never:
            return None
        started.append(one)
        return True

    kept = KeptSaves(start, dropped.append)
    kept.add([never, other := save("b", 2)])
    assert (dropped, started, kept.blocks) == ([never], [other], 0)


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
        read |= worker.writes.kept.take_read()
        time.sleep(0.001)
    assert read == names
    assert store.transfers.drain(PATIENCE_S)


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
    worker.writes.kept.finished({"r": 30.0})
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
    worker.writes.kept.release({"d"})
    monkeypatch.undo()
    plan.replace()
    worker.writes.kept.finished({"c": 30.0})
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
    connector.handle_preemptions(KVStoreMetadata(released={"r"}))
    assert store.transfers.drain(PATIENCE_S)
    assert match(space, late.hashes).blocks == 0
    report = worker.take_report()
    assert report is not None and report.failed_handoffs == {"r"}
