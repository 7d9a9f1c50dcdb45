"""Saves and loads beside steps that are held up, and faults of order that must show there.

A scenario queues what an engine would, with one stream held up so that whatever doesn't wait for it comes
first: the engine's (`late` is false), or the side stream of the copies (`late` is true). Then it says which
bytes are wrong. The faults have the names that trials/accelerator/faults.py gives them, as far as they are of
this layer.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from connectors.ec.memory import ItemMemory
from connectors.engine.paging.pages import BITS
from connectors.engine.tensors import Chunk, Copied, PagedCache, Staging
from tests.connectors.engine.paging.pools import Pool, strided
from trials.gpu.machine import HOLD_MS, Machine
from trials.gpu.pools import placed, separate
from trials.gpu.report import Report, Wrong

CLEAN, PLANTED = "order", "planted faults"
_SIZES = {"B": 24, "H": 2, "N": 16, "C": 64, "L": 4}
_COUNT = 4

Scenario = Callable[[Machine, bool], list[str]]


def try_all(machine: Machine, report: Report) -> None:
    """Add the rows of this section: without a fault first, which warms the allocator up."""
    for name, scenario in SCENARIOS.items():
        report.row(CLEAN, name, lambda scenario=scenario: _clean(machine, scenario))
    for name, fault in FAULTS.items():
        report.row(PLANTED, name, lambda fault=fault: _found(machine, fault))


def _clean(machine: Machine, scenario: Scenario) -> str:
    for number in range(machine.tries):
        with machine.run(number) as said:
            said += scenario(machine, number % 2 > 0)
        if said:
            raise Wrong(f"run {number + 1}: {said[0]}")
    return f"right in {machine.tries} runs"


def _found(machine: Machine, fault: Fault) -> str:
    come_to = fault.place is None
    for number in range(machine.tries):
        with machine.run(number) as said:
            with machine.watched(), fault.planted(machine):
                said += SCENARIOS[fault.scenario](machine, number % 2 > 0)
            come_to |= fault.place in machine.places
        if said:
            return f"found in run {number + 1}: {said[0]}"
    raise Wrong(
        f"NOT FOUND in {machine.tries} runs" + ("" if come_to else ": its place is not come to any more")
    )


# ---- scenarios ---------------------------------------------------------------------------------------


class Reader:
    """Ends a load, as a transfer thread does."""

    @staticmethod
    def end(copied: Copied, staging: Staging, chunk: Chunk) -> None:
        copied.wait()
        staging.release(chunk)


def _cache(machine: Machine, layers: list[torch.Tensor]) -> tuple[PagedCache, Any]:
    """Returns a cache and its memory on the device, uint8 [layers, blocks, bytes]."""
    twin = placed(Pool({0: layers}, _SIZES["B"]), machine)
    cache = PagedCache(twin.device.tables, _SIZES["B"])
    pages = [layer.view(BITS[2]) for layer in twin.device.layers]
    return cache, pages


def _drawn(machine: Machine, shape: tuple[int, ...]) -> torch.Tensor:
    """Returns numbers that no run before had: memory that is used again must not hold the right ones."""
    return torch.randint(-(1 << 15), 1 << 15, shape, dtype=torch.int16)


def _up(machine: Machine, host: torch.Tensor) -> Any:
    """Returns them on the device, at once."""
    return machine.adopt(host)


def _saves(layers: Callable[[], list[torch.Tensor]], machine: Machine, late: bool) -> list[str]:
    """Steps write blocks before a save's gather and after it, and memory that is free is used at once."""
    cache, pages = _cache(machine, layers())
    shape = tuple(pages[0].shape)
    steps = [[_drawn(machine, shape) for _ in pages] for _ in range(3)]
    there = [[_up(machine, one) for one in step] for step in steps]
    staging = machine.keep(Staging(3 * _COUNT * cache.slot_bytes, cache.slot_bytes, pin=True))
    chunks = [staging.acquire(_COUNT * cache.slot_bytes, time.monotonic() + 10.0) for _ in range(3)]
    for chunk in chunks:
        chunk.tensor.fill_(0)
    tables = [[1, 5, 2, 9], [20, 3, 7, 23], [11, 12, 13, 0]]
    _write(pages, there[0])
    _settle(machine)
    machine.hold(cache._save_stream if late else machine.current)
    _write(pages, there[1])
    copies = []
    for chunk, blocks in zip(chunks, tables, strict=True):
        copies.append(cache.gather({0: blocks}, chunk))
        _scribble(machine, (_COUNT * cache.slot_bytes // 2,))
    _write(pages, there[2])
    if late:
        machine.pass_by(machine.current)
    said = []
    for number, (copied, chunk, blocks) in enumerate(zip(copies, chunks, tables, strict=True)):
        copied.wait()
        found = b"".join(chunk.views(_COUNT, cache.slot_bytes))
        wanted = [_bytes(step, blocks) for step in steps]
        if found != wanted[1]:
            said.append(f"save {number + 1} holds {_called(found, wanted, ('before', 'of', 'after'))}")
    return said


def _loads(layers: Callable[[], list[torch.Tensor]], machine: Machine, late: bool) -> list[str]:
    """A step reads blocks before they are loaded into, and the next one as soon as the load has ended."""
    cache, pages = _cache(machine, layers())
    shape = tuple(pages[0].shape)
    before = [_drawn(machine, shape) for _ in pages]
    _write(pages, [_up(machine, one) for one in before])
    staging = machine.keep(Staging(_COUNT * cache.slot_bytes, cache.slot_bytes, pin=True))
    slots = _drawn(machine, (_COUNT, len(pages), *shape[1:]))
    blocks = [6, 1, 23, 14]
    _settle(machine)
    machine.hold(cache._load_stream if late else machine.current)
    seen = [page.clone() for page in pages]
    mark = cache.mark()
    chunk = staging.acquire(_COUNT * cache.slot_bytes, time.monotonic() + 10.0)
    _fill(chunk, slots)
    copied = machine.elsewhere(lambda: cache.scatter({0: blocks}, chunk, mark))
    if late:
        # The engine's stream gets as far as it may before anybody waits.
        machine.pass_by(machine.current)
    machine.elsewhere(lambda: Reader.end(copied, staging, chunk))
    after = [page.clone() for page in pages]
    # The room is another load's.
    if (other := staging.try_acquire(_COUNT * cache.slot_bytes)) is not None:
        other.tensor.fill_(0x3C)
    if late:
        machine.pass_by(machine.current)
    said = []
    for i, page in enumerate(pages):
        if not torch.equal(machine.down(seen[i]), before[i]):
            said.append(f"the step before reads what is loaded, in layer {i}")
        expected = before[i].clone()
        expected[blocks] = slots[:, i]
        for where, there in (("the next step reads", after[i]), ("at last there are", page)):
            if not torch.equal(machine.down(there), expected):
                said.append(f"{where} other bytes than were loaded, in layer {i}")
    return said


def _write(pages: list[Any], numbers: list[Any]) -> None:
    """A step: write all blocks."""
    for page, one in zip(pages, numbers, strict=True):
        page.copy_(one)


def _scribble(machine: Machine, shape: tuple[int, ...]) -> None:
    """Take memory that is free, as an engine does, and write to it on the engine's stream."""
    taken = [machine.torch.empty(shape, dtype=torch.int16, device=machine.device) for _ in range(4)]
    for one in taken:
        one.fill_(0x5A5A)


def _settle(machine: Machine) -> None:
    machine.torch.cuda.synchronize()


def _bytes(step: list[torch.Tensor], blocks: list[int]) -> bytes:
    return torch.stack([torch.stack([layer[block] for layer in step]) for block in blocks]).numpy().tobytes()


def _fill(chunk: Chunk, slots: torch.Tensor) -> None:
    raw = slots.contiguous().numpy().tobytes()
    chunk.views(1, len(raw))[0][:] = raw


def _called(found: bytes, wanted: list[bytes], names: tuple[str, ...]) -> str:
    for one, name in zip(wanted, names, strict=True):
        if found == one:
            return f"what was there {name} the step"
    return "zeros" if not any(found) else "bytes of no step"


@dataclass
class Item:
    """What an ItemMemory reads of a staged item."""

    path: Path
    rows: int
    width: int
    dtype: str = "I16"

    @property
    def nbytes(self) -> int:
        return self.rows * self.width * 2

    def open(self) -> FileIO:
        return FileIO(self.path)


#: Of 64 KiB, which is page-locked memory's own pages (see Cuda).
_ROWS, _WIDTH = 64, 512


def _items_saved(machine: Machine, late: bool) -> list[str]:
    """An encoder writes an output, which is freed when its save has begun; its memory is used at once."""
    memory = machine.keep(ItemMemory(machine.device, 1 << 16))
    output = _drawn(machine, (_ROWS, _WIDTH))
    encoded = _up(machine, output)
    item = machine.torch.empty(output.shape, dtype=torch.int16, device=machine.device)
    item.fill_(0)
    _settle(machine)
    machine.hold(memory._stream if late else machine.current)
    item.copy_(encoded)
    copied = memory.save(item)
    assert copied is not None
    del item
    _scribble(machine, tuple(output.shape))
    if late:
        machine.pass_by(machine.current)
    found = bytes(copied.wait()[0])
    if found == output.numpy().tobytes():
        return []
    return [f"the item is saved as {'zeros' if not any(found) else 'other bytes'}"]


def _items_loaded(machine: Machine, late: bool) -> list[str]:
    """Items are loaded one after the other through room for one, used, and freed at once."""
    outputs = [_drawn(machine, (_ROWS, _WIDTH)) for _ in range(4)]
    with tempfile.TemporaryDirectory() as folder:
        memory = machine.keep(ItemMemory(machine.device, outputs[0].nbytes))
        items = []
        for number, output in enumerate(outputs):
            items.append(Item(Path(folder, str(number)), _ROWS, _WIDTH))
            items[-1].path.write_bytes(output.numpy().tobytes())
        # So that the side stream has memory of its own to give, with another item's bytes.
        memory.load(items.pop())  # type: ignore[arg-type]
        _settle(machine)
        machine.hold(memory._stream if late else machine.current)
        used: list[tuple[int, Any]] = []
        for number, item in enumerate(items):
            # Without room for it, an engine encodes it.
            if (there := memory.load(item)) is None:  # type: ignore[arg-type]
                continue
            used.append((number, there.clone()))
            del there
            if not late:
                # Its room is free, and the engine has not come to it.
                memory._stream.synchronize()
        if late:
            machine.pass_by(machine.current)
        wrong = [number for number, there in used if not torch.equal(machine.down(there), outputs[number])]
    return [f"the engine reads other bytes than item {number + 1} has" for number in wrong]


def _joined() -> list[torch.Tensor]:
    return strided("LBNHC", _SIZES, torch.bfloat16)


def _separate() -> list[torch.Tensor]:
    return separate(_SIZES, torch.bfloat16)


SCENARIOS: dict[str, Scenario] = {
    "saves beside steps that write": partial(_saves, _joined),
    "loads beside steps that read": partial(_loads, _joined),
    "saves beside steps that write, a memory for each layer": partial(_saves, _separate),
    "loads beside steps that read, a memory for each layer": partial(_loads, _separate),
    "items saved beside steps that write": _items_saved,
    "items loaded beside steps that read": _items_loaded,
}


# ---- faults ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fault:
    """A fault, and the scenario in which it shows."""

    scenario: str
    plant: Callable[[Machine], contextlib.AbstractContextManager[Any]]
    #: The call that it leaves out and the function that makes it, if it is one.
    place: tuple[str, str] | None = None

    @contextlib.contextmanager
    def planted(self, machine: Machine) -> Iterator[None]:
        with self.plant(machine):
            try:
                yield
            finally:
                machine.broken.clear()


def _without(call: str, function: str, scenario: str) -> Fault:
    @contextlib.contextmanager
    def plant(machine: Machine) -> Iterator[None]:
        machine.broken.add((call, function))
        yield

    return Fault(scenario, plant, (call, function))


def _changed(owner: type, method: str, change: Callable[..., Any], scenario: str) -> Fault:
    """`change` gets the machine, the method, and its arguments."""

    @contextlib.contextmanager
    def plant(machine: Machine) -> Iterator[None]:
        original = getattr(owner, method)
        with mock.patch.object(owner, method, lambda *args: change(machine, original, *args)):
            yield

    return Fault(scenario, plant)


def _beside(machine: Machine, gather: Any, *args: Any) -> Any:
    side = machine.torch.cuda.Stream(machine.device)
    side.wait_stream(machine.current)
    with machine.torch.cuda.stream(side):
        machine.hold(side, HOLD_MS / 2)
        return gather(*args)


def _let_go(machine: Machine, gather: Any, *args: Any) -> Any:
    copied = gather(*args)
    copied.buffer = None
    return copied


def _taken_for_done(machine: Machine, gather: Any, *args: Any) -> Any:
    return Copied(None, gather(*args).buffer)


def _reported(machine: Machine, scatter: Any, *args: Any) -> Any:
    scatter(*args)
    return Copied()


def _room_given_back(machine: Machine, end: Any, copied: Any, staging: Any, chunk: Any) -> None:
    staging.release(chunk)
    other = staging.try_acquire(chunk.tensor.nbytes)
    other.tensor.fill_(0x77)
    staging.release(other)
    copied.wait()


_SAVES, _LOADS, _OUT, _IN = (
    "saves beside steps that write",
    "loads beside steps that read",
    "items saved beside steps that write",
    "items loaded beside steps that read",
)
FAULTS: dict[str, Fault] = {
    "the copy to the host doesn't wait for the gather": _without("wait_stream", "PagedCache.gather", _SAVES),
    "a save's event is not recorded": _without("record", "PagedCache.gather", _SAVES),
    "nobody waits for a copy": _without("synchronize", "Copied.wait", _SAVES),
    "a write begins before its copy": _changed(PagedCache, "gather", _taken_for_done, _SAVES),
    "blocks are gathered on a side stream and not held": _changed(PagedCache, "gather", _beside, _SAVES),
    "a gather's buffer is freed at once": _changed(PagedCache, "gather", _let_go, _SAVES),
    "page numbers are overwritten while they are sent": _without("query", "Upload.send", _SAVES),
    "the event of page numbers is not recorded": _without("record", "Upload.send", _SAVES),
    "a load's event is not recorded": _without("record", "PagedCache.scatter", _LOADS),
    "a load is reported before it is done": _changed(PagedCache, "scatter", _reported, _LOADS),
    "a load's room is given back before it is done": _changed(Reader, "end", _room_given_back, _LOADS),
    "a load doesn't wait for the mark": _without("wait_event", "PagedCache.scatter", _LOADS),
    "the mark is not recorded": _without("record", "PagedCache.mark", _LOADS),
    "an item's copy doesn't wait for the encoder": _without("wait_stream", "ItemMemory.save", _OUT),
    "an item's event is not recorded": _without("record", "ItemMemory.save", _OUT),
    "an item is saved before its copy is there": _without("synchronize", "ItemCopy.wait", _OUT),
    "an item that is copied is not held": _without("record_stream", "ItemMemory.save", _OUT),
    "a loaded item's event is not recorded": _without("record", "ItemMemory.load", _IN),
    "an item is read before it is loaded": _without("wait_event", "ItemMemory.load", _IN),
    "a loaded item's room is given back at once": _without("query", "ItemMemory.load", _IN),
    "a loaded item is not held": _without("record_stream", "ItemMemory.load", _IN),
}
