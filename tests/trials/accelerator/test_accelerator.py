"""Both connectors over vLLM's scheduler on the fake accelerator: few runs here, many in `python -m
trials.accelerator`; and that the checker finds what is planted."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

torch = pytest.importorskip("torch", reason="the connectors' tests need the full set-up: make setup")
pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.ec.memory import ItemMemory
from connectors.ec.messages import StagedItem
from connectors.engine.paging.pages import GroupPages
from connectors.engine.tensors import Chunk, PagedCache
from connectors.kv.worker.memory import KVMemory
from kvstore.errors import ConfigError
from kvstore.keys import ContentKey
from tests.connectors.groups import LAYERS, WORKERS
from trials.accelerator.device import MODES, Accelerator
from trials.accelerator.engine import on, serve
from trials.accelerator.faults import FAULTS, NEEDLESS
from trials.accelerator.layouts import LAYOUTS
from trials.accelerator.plan import Found, Plan

pytestmark = pytest.mark.engine  # the full set-up, not an engine


def served(layout: str, seeds: range, **given: Any) -> Found:
    """What some runs have done, if nothing was wrong in any. Who is faster in one of them is chance."""
    total = Found()
    for seed in seeds:
        total += serve(Plan.of(seed, **given), LAYOUTS[layout])[0]
        assert total.reports == (), f"seed {seed}"
    return total


def test_nothing_wrong_is_read_or_saved() -> None:
    found = served("gqa LBNHC", range(4))
    assert found.loads and found.preemptions and found.blocks_saved > 100 and found.reads_checked > 1000
    assert found.handed_over and found.rejected


@pytest.mark.parametrize("layout", ["windows and full", "gdn and full"])
def test_nothing_wrong_is_read_or_saved_of_hybrids(layout: str) -> None:
    found = served(layout, range(2))
    assert found.loads and found.blocks_saved > 50


def test_nothing_wrong_is_read_or_saved_of_items() -> None:
    found = served("gqa LBNHC", range(3), items=True)
    assert found.items_loaded and found.items_saved


@pytest.mark.parametrize("waits", [True, False])
@pytest.mark.parametrize("joined", [True, False])
def test_a_scatter_that_fails_has_ended_its_writes(joined: bool, waits: bool) -> None:
    """One operation writes, or none; whatever may fail behind it, the writes are over when that is known."""
    write = GroupPages.write

    def failing(*args: Any) -> None:
        write(*args)
        raise torch.OutOfMemoryError("injected: no memory")

    accelerator = Accelerator(1, "lazy")
    if not waits:
        accelerator.broken.add(("synchronize", "Copied.wait"))
    with on(accelerator):
        pages = torch.zeros(2, 4, 1, 2, 8)
        if joined:
            layers = list(accelerator.adopt(pages))
        else:
            layers = [accelerator.adopt(one.clone()) for one in pages]
        cache = PagedCache({table: [layer] for table, layer in enumerate(layers)}, 4)
        chunk = Chunk(accelerator.torch.zeros(2 * cache.slot_bytes, dtype=torch.uint8, pin_memory=True))
        chunk.tensor.fill_(1)
        with mock.patch.object(GroupPages, "write", failing):
            with pytest.raises(torch.OutOfMemoryError):
                cache.scatter({0: [1, 2], 1: [2, 3]}, chunk, cache.mark()).wait()
        # From here on the blocks are another request's.
        for layer in layers:
            layer.raw.zero_()
        accelerator.finish_all()
        assert any(layer.raw.any() for layer in layers) != waits


def test_a_scatter_without_memory_writes_nothing() -> None:
    failed = 0
    for allocation in range(4):
        accelerator = Accelerator(allocation, "lazy")
        with on(accelerator):
            pages = accelerator.adopt(torch.zeros(2, 4, 1, 2, 8))
            cache = PagedCache({0: [pages[0]], 1: [pages[1]]}, 4)
            chunk = Chunk(accelerator.torch.zeros(2 * cache.slot_bytes, dtype=torch.uint8, pin_memory=True))
            chunk.tensor.fill_(1)
            accelerator.refuses = partial(next, iter(i == allocation for i in range(9)))
            try:
                cache.scatter({0: [1, 2], 1: [2, 3]}, chunk, cache.mark()).wait()
            except torch.OutOfMemoryError:
                failed += 1
                accelerator.finish_all()
                assert not pages.raw.any()
            accelerator.refuses = lambda: False
            # What it has taken for page numbers is free again.
            cache.scatter({0: [1, 2], 1: [2, 3]}, chunk, cache.mark())
            accelerator.finish_all()
            assert pages.raw[0, 1:3].all() and pages.raw[1, 2:].all()
    assert failed == 2, "it allocates room for the slots, and for page numbers"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str) -> None:
    # With drafts, with two ranks, and with hand-offs on two ranks.
    assert served(layout, range(1, 4)).blocks_saved


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    runs, said = FAULTS[name].found()
    assert runs, said


@pytest.mark.parametrize("held", [True, False])
def test_a_loaded_item_is_held_while_the_engine_reads_it(tmp_path: Path, held: bool) -> None:
    accelerator = Accelerator(1, "lazy")
    if not held:
        accelerator.broken.add(("record_stream", "ItemMemory.load"))
    file = tmp_path / "item"
    file.write_bytes(bytes([7]) * 64)
    item = StagedItem(ContentKey(b"key"), str(file), "U8", 4, 16, 64)
    with on(accelerator):
        memory = ItemMemory(torch.device("cuda:0"), 1 << 10)
        loaded = memory.load(item)
        read = accelerator.torch.zeros(4, 16, dtype=torch.uint8, pin_memory=True)
        # A forward pass reads it, and it leaves the encoder cache before that has run.
        read.copy_(loaded, non_blocking=True)
        del loaded
        again = memory.load(item)
        # What is on the side stream runs before what is on the engine's.
        memory._stream.synchronize()
        assert again is not None
        accelerator.finish_all()
    assert (read.flatten().tolist() == [7] * 64) == held


def test_every_wait_of_the_connectors_has_a_fault_that_leaves_it_out() -> None:
    places = {fault.place for fault in FAULTS.values()} | set(NEEDLESS)
    places.add(("record_stream", "ItemMemory.load"))  # the test above: in runs it shows too rarely
    for plan in (Plan.of(1), Plan.of(0, items=True)):
        _, accelerator = serve(plan, LAYOUTS["gqa LBNHC"])
        assert set(accelerator.places) <= places, "add it to FAULTS, or say in NEEDLESS why nobody needs it"
        at_start = {"PagedCache.layers_hold.<locals>.<genexpr>"}
        assert set(accelerator.stalls) <= at_start, "the thread that makes this copy waits for it"
        assert not accelerator.spins, "waiting for an event holds the driver's lock, but for a blocking one"


@pytest.mark.parametrize("who", ["kv", "ec"])
def test_memory_that_cannot_be_locked_is_an_error_of_the_configuration(who: str) -> None:
    accelerator = Accelerator(1, "eager")
    accelerator.torch.cuda.cudart().cudaHostRegister = lambda *_: 2
    said = rf"{who}\.staging_bytes: \d+ bytes of host memory can't be locked .*CUDA error 2"
    with on(accelerator), pytest.raises(ConfigError, match=said):
        if who == "ec":
            ItemMemory(torch.device("cuda:0"), 1 << 10)
        else:
            pages = torch.zeros(4, *WORKERS[0].shape[1:], dtype=torch.bfloat16)
            caches = {name: accelerator.adopt(pages.clone()) for name in LAYERS}
            KVMemory(WORKERS, [2], 1 << 20).register(caches, 4)


# ---- the device itself ------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_what_is_waited_for_has_run(mode: str) -> None:
    accelerator = Accelerator(1, mode)
    fake = accelerator.torch
    one, other = fake.cuda.Stream(), fake.cuda.Stream()
    ran: list[str] = []
    with fake.cuda.stream(one):
        accelerator.run(lambda: ran.append("first"))
    other.wait_stream(one)
    with fake.cuda.stream(other):
        accelerator.run(lambda: ran.append("second"))
        event = fake.cuda.Event()
        event.record()
        accelerator.run(lambda: ran.append("third"))
    event.synchronize()
    assert ran[:2] == ["first", "second"]


def test_the_lazy_one_runs_nothing_that_nobody_waits_for() -> None:
    accelerator = Accelerator(1, "lazy")
    fake = accelerator.torch
    host = fake.zeros(4, pin_memory=True)
    device = fake.zeros(4, device="cuda:0")
    device.fill_(7)
    host.copy_(device, non_blocking=True)
    assert host.tolist() == [0, 0, 0, 0]
    fake.cuda.current_stream().synchronize()
    assert host.tolist() == [7, 7, 7, 7]


@pytest.mark.parametrize("recorded", [False, True])
def test_freed_memory_is_poisoned_unless_its_use_was_recorded(recorded: bool) -> None:
    accelerator = Accelerator(1, "lazy")
    fake = accelerator.torch
    host, side = fake.zeros(4, pin_memory=True), fake.cuda.Stream()
    device = fake.zeros(4, device="cuda:0")
    side.wait_stream(fake.cuda.current_stream())
    with fake.cuda.stream(side):
        host.copy_(device, non_blocking=True)
        if recorded:
            device.record_stream(side)
    del device
    fake.empty(1, device="cuda:0").zero_()
    fake.cuda.current_stream().synchronize()
    side.synchronize()
    assert (host.tolist() == [0, 0, 0, 0]) == recorded


def test_a_pageable_copy_makes_its_thread_wait() -> None:
    accelerator = Accelerator(1, "lazy")
    ran: list[bool] = []
    accelerator.run(lambda: ran.append(True))
    accelerator.torch.zeros(4).to("cuda:0")
    assert ran and sum(accelerator.stalls.values()) == 1
