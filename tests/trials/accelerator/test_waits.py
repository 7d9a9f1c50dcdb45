"""One thread for each direction waits for a device that takes its time, and no reader and no writer does."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")
pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.ec.memory import ItemMemory
from connectors.ec.messages import ECStoreMetadata
from connectors.ec.worker import ECWorker
from connectors.kv.messages import GroupLoad, Load, Save
from connectors.kv.worker.worker import KVWorker
from kvstore.keys import digests, new_segment_id
from kvstore.store.store import Store
from tests.connectors.groups import LAYERS, WORKERS
from tests.store.world import SHAPE, SLOT_BYTES, chain, content, item, make_store, match, open_space, slots
from tests.waiting import PATIENCE_S, until
from trials.accelerator.device import CUDA, MODES, Accelerator, Event
from trials.accelerator.engine import on

pytestmark = pytest.mark.engine  # the full set-up, not an engine

BLOCKS, PIECES = 64, 24
A = chain(*range(PIECES))


class World:
    """A worker's half whose paged cache is on a fake accelerator; every block is a piece of its own."""

    def __init__(self, folder: Path, accelerator: Accelerator, staged: int) -> None:
        self.store = make_store(
            folder,
            kv={"staging_bytes": staged * SLOT_BYTES},
            transfers={"read_threads": 2, "write_threads": 2, "drain_s": PATIENCE_S},
        )
        self.space = open_space(self.store)
        self.accelerator = accelerator
        _, heads, tokens, size = SHAPE
        self.pages = {name: torch.zeros(BLOCKS, heads, tokens, size, dtype=torch.bfloat16) for name in LAYERS}
        self.worker = KVWorker(self.store, WORKERS, segment_blocks=[1])
        self.worker.register({name: self.accelerator.adopt(one) for name, one in self.pages.items()}, BLOCKS)
        self.worker.use(self.space.namespace)
        self.accelerator.places.clear()

    def load(self, name: str = "r", pieces: int = PIECES, first: int = 0) -> None:
        """Start a load of the chain's first blocks."""
        runs, tables = match(self.space, A[:pieces]).runs, {0: list(range(first, first + pieces))}
        assert sum(run.count for run in runs) == pieces
        self.worker.reads.start([Load(name, [GroupLoad(0, 0, runs, A[:pieces], tables)])])

    def save(self, hashes: list[bytes]) -> None:
        """Start a save of each block alone, from the blocks from 0 on."""
        first = digests(hashes[:1])
        self.worker.writes.start(
            [
                Save(0, new_segment_id(first), 1_700_000_000, number, [one], {0: [number]}, chain=first)
                for number, one in enumerate(hashes)
            ]
        )

    def finished(self) -> set[str]:
        """Which loads have ended, once there are any."""
        return until(lambda: self.worker.reads.take_finished()[0])

    def enqueued(self) -> int:
        """How many copies to the device have begun."""
        return self.accelerator.places["wait_event", "PagedCache.scatter"]

    def block(self, number: int) -> bytes:
        """What the paged cache holds."""
        self.accelerator.finish_all()
        layers = [one[number].contiguous().view(torch.uint8).numpy().tobytes() for one in self.pages.values()]
        return b"".join(layers)

    def fill(self, hashes: list[bytes]) -> None:
        """Put blocks of a chain into the paged cache, from block 0 on."""
        for number, one in enumerate(hashes):
            whole = torch.frombuffer(bytearray(content(one)), dtype=torch.bfloat16).view(SHAPE)
            for page, part in zip(self.pages.values(), whole, strict=True):
                page[number] = part

    def used(self) -> dict[str, int]:
        return self.worker.memory.used_bytes


def _world(folder: Path, mode: str, staged: int) -> Iterator[World]:
    accelerator = Accelerator(1, mode)
    with on(accelerator):
        made = World(folder, accelerator, staged)
        made.space.save(slots(A))
        yield made
        for gate in list(accelerator.gates):
            accelerator.open(gate)
        made.store.close()
        assert made.used() == {"load": 0, "save": 0}
        assert accelerator.reports == []


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def world(tmp_path: Path, mode: str) -> Iterator[World]:
    yield from _world(tmp_path, mode, PIECES)


@pytest.fixture
def small(tmp_path: Path, mode: str) -> Iterator[World]:
    """A worker whose staging holds four pieces."""
    yield from _world(tmp_path, mode, 4)


def writers_are_free(store: Store) -> bool:
    """Whether as many writes run side by side as there are threads for them."""
    together = threading.Barrier(3)
    for _ in range(2):
        assert store.transfers.write(0, lambda: void(together.wait(PATIENCE_S)))
    try:
        together.wait(PATIENCE_S)
    except threading.BrokenBarrierError:
        return False
    return True


def void(_: object) -> None: ...


# ---- nobody but one ----------------------------------------------------------------------------------


def test_readers_go_on_while_a_step_runs(world: World) -> None:
    """Three threads may read; all pieces are read and their copies begun, and one thread waits for them."""
    gate = world.accelerator.gate()
    world.load()
    until(lambda: world.enqueued() == PIECES, say=world.enqueued)
    until(lambda: world.accelerator.asleep)
    assert world.worker.reads.take_finished() == (set(), set())
    assert world.used()["load"] == PIECES * SLOT_BYTES
    assert len(world.accelerator.asleep) == 1 and writers_are_free(world.store)
    world.accelerator.open(gate)
    # Without a step: nobody asks.
    until(lambda: world.used()["load"] == 0)
    assert world.finished() == {"r"} and world.worker.reads.take_failed_blocks() == set()
    assert [world.block(number) for number in range(PIECES)] == [content(one) for one in A]
    assert world.accelerator.asleep == set()


def test_writes_are_queued_when_their_copies_are_there(world: World) -> None:
    others = chain(*range(100, 100 + PIECES))
    world.fill(others)
    gate = world.accelerator.gate()
    world.save(others)
    until(lambda: world.accelerator.asleep)
    assert writers_are_free(world.store) and len(world.accelerator.asleep) == 1
    assert world.store.transfers.queued["writes"] >= PIECES - 1
    assert match(world.space, others).blocks == 0
    world.accelerator.open(gate)
    # Without a step: an engine that has nothing to do stores what it has computed.
    until(lambda: match(world.space, others).blocks == PIECES)
    until(lambda: world.used()["save"] == 0)
    assert world.store.counters.snapshot()["save_blocks{stored}"] == 2 * PIECES


def test_loads_end_while_saves_wait_for_a_later_step(world: World) -> None:
    others = chain(*range(100, 108))
    world.fill(others)
    first = world.accelerator.gate()
    world.load(first=30)
    second = world.accelerator.gate()
    world.save(others)
    until(lambda: len(world.accelerator.asleep) == 2)
    assert writers_are_free(world.store) and len(world.accelerator.asleep) == 2
    world.accelerator.open(first)
    assert world.finished() == {"r"}
    assert len(world.accelerator.asleep) == 1 and world.used()["save"]
    assert all(world.pages[name][30:54].any() for name in LAYERS)
    world.accelerator.open(second)
    until(lambda: match(world.space, others).blocks == 8)


def test_an_audit_is_compared_when_its_copy_is_there(world: World) -> None:
    world.fill(A)
    # One block of each of both sides.
    world.worker.memory.piece_bytes = 2 * SLOT_BYTES
    gate = world.accelerator.gate()
    runs = match(world.space, A[:8]).runs
    world.worker.audits.start([Load("r", [GroupLoad(0, 0, runs, A[:8], {0: list(range(8))})])])
    until(lambda: world.accelerator.asleep)
    assert writers_are_free(world.store) and len(world.accelerator.asleep) == 1
    world.accelerator.open(gate)
    assert world.store.transfers.drain(PATIENCE_S)
    report = world.worker.take_stats()
    assert report is not None and "audits{alike}" in str(report.data), report


def test_encoder_outputs_are_written_when_their_copies_are_there(tmp_path: Path, mode: str) -> None:
    accelerator = Accelerator(1, mode)
    with on(accelerator), make_store(tmp_path, transfers={"write_threads": 2}) as store:
        worker = ECWorker(
            store,
            dtype=torch.bfloat16,
            device=lambda: CUDA,
            saves=lambda: True,
            memory=ItemMemory(CUDA, 1 << 16),
        )
        kinds: dict[str, Any] = {"kind": "ec", "groups": (), "block_tokens": 0}
        metadata = ECStoreMetadata(namespace=open_space(store, **kinds).namespace.model_dump_json())
        metadata.held = {name: item(name) for name in "abcdef"}
        worker.use(metadata)
        outputs = {
            name: accelerator.torch.zeros(4, 8, dtype=torch.bfloat16, device="cuda:0") for name in "abcdef"
        }
        gate = accelerator.gate()
        worker.save_held(metadata, outputs)
        until(lambda: accelerator.asleep)
        assert writers_are_free(store) and len(accelerator.asleep) == 1
        accelerator.open(gate)
        assert store.transfers.drain(PATIENCE_S)
        report = worker.take_report()
        assert report is not None and report.saved == dict.fromkeys(metadata.held.values(), "stored")


def test_on_the_cpu_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with make_store(tmp_path) as store:
        for waits in ("in_turn", "_make_ready"):
            monkeypatch.setattr(store.transfers, waits, lambda *_: pytest.fail("it waits"))
        space, worker = open_space(store), KVWorker(store, WORKERS, segment_blocks=[1])
        worker.register(
            {name: torch.zeros(BLOCKS, *SHAPE[1:], dtype=torch.bfloat16) for name in LAYERS}, BLOCKS
        )
        worker.use(space.namespace)
        worker.writes.start([Save(0, new_segment_id(), 1_700_000_000, 0, A[:4], {0: [1, 2, 3, 4]})])
        until(lambda: match(space, A).blocks == 4)
        loaded = Load("r", [GroupLoad(0, 0, match(space, A).runs, A[:4], {0: [5, 6, 7, 8]})])
        worker.reads.start([loaded])
        until(lambda: worker.reads.take_finished()[0])


# ---- what ends badly ---------------------------------------------------------------------------------


def test_a_load_past_its_deadline_is_not_reported_before_its_copies_have_ended(small: World) -> None:
    """Four of its pieces are on the device behind a step, the others find no room by the deadline."""
    object.__setattr__(small.store.settings.kv, "load_deadline_s", 1.0)
    gate = small.accelerator.gate()
    small.load(pieces=12)
    [ticket] = small.worker.reads._live
    until(lambda: time.monotonic() >= ticket.end and len(ticket.failed) + small.enqueued() == 12)
    begun = small.enqueued()
    assert 0 < begun <= 4
    assert small.worker.reads.take_finished() == (set(), set())
    small.accelerator.open(gate)
    assert small.finished() == {"r"}
    failed = small.worker.reads.take_failed_blocks()
    assert len(failed) == 12 - begun and failed < set(range(12))
    # By now they are another request's.
    for page in small.pages.values():
        page.zero_()
    small.accelerator.finish_all()
    assert not any(page.any() for page in small.pages.values())
    assert small.worker.take_report().load_reasons == {"r": "capacity"}  # type: ignore[union-attr]


def test_a_load_that_is_read_past_its_deadline_is_reported_at_once(small: World) -> None:
    """What hangs in a read has begun no copy, and never will."""
    object.__setattr__(small.store.settings.kv, "load_deadline_s", 0.1)
    hold = threading.Event()
    read = small.store.payloads.read

    def hangs(*args: Any, **kwargs: Any) -> Any:
        assert hold.wait(PATIENCE_S)
        return read(*args, **kwargs)

    small.store.payloads.read = hangs  # type: ignore[method-assign]
    gate = small.accelerator.gate()
    small.load(pieces=2)
    assert small.finished() == {"r"}
    assert small.worker.reads.take_failed_blocks() == {0, 1}
    hold.set()
    assert small.store.transfers.drain(PATIENCE_S)
    assert small.enqueued() == 0 and small.used()["load"] == 0
    small.accelerator.open(gate)


def test_nobody_falls_asleep_over_copies_under_way(world: World) -> None:
    gate = world.accelerator.gate()
    world.load()
    until(lambda: world.enqueued() == PIECES)
    sleeper = threading.Thread(target=world.worker.unregister)
    sleeper.start()
    until(lambda: world.worker.reads._halted)
    sleeper.join(0.05)
    assert sleeper.is_alive()
    world.accelerator.open(gate)
    sleeper.join(PATIENCE_S)
    assert not sleeper.is_alive() and world.used()["load"] == 0
    # Its pages are unmapped.
    for page in world.pages.values():
        page.zero_()
    world.accelerator.finish_all()
    assert not any(page.any() for page in world.pages.values())
    assert world.finished() == {"r"} and world.worker.reads.take_failed_blocks() == set(range(PIECES))


def test_a_device_that_fails_costs_loads_and_saves_and_no_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Event) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Event, "synchronize", fails)
    others = chain(*range(100, 104))
    world.load(pieces=8, first=30)
    world.save(others)
    assert world.finished() == {"r"}
    assert world.worker.reads.take_failed_blocks() == set(range(30, 38))
    until(lambda: world.used() == {"load": 0, "save": 0})
    assert world.store.transfers.drain(PATIENCE_S)
    report = world.worker.take_report()
    assert report is not None and report.load_reasons == {"r": "error"}
    assert set(report.save_reasons.values()) == {"failed"} and len(report.save_reasons) == 4
    assert match(world.space, others).blocks == 0


def test_the_end_waits_for_what_is_under_way(world: World) -> None:
    others = chain(*range(100, 108))
    world.fill(others)
    gate = world.accelerator.gate()
    world.load(first=30)
    world.save(others)
    until(lambda: world.enqueued() == PIECES)
    ender = threading.Thread(target=world.worker.shutdown)
    ender.start()
    until(lambda: world.store.transfers._closing)
    assert world.used()["load"] and world.used()["save"]
    world.accelerator.open(gate)
    ender.join(PATIENCE_S)
    assert not ender.is_alive() and world.used() == {"load": 0, "save": 0}
    assert world.store.counters.snapshot()["save_blocks{stored}"] == PIECES + 8
    assert world.finished() == {"r"} and world.worker.reads.take_failed_blocks() == set()
