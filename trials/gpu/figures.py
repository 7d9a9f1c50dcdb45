"""Figures: bytes per second beside a bare copy, launches, the engine's thread, and steps beside copies."""

from __future__ import annotations

import queue
import statistics
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from connectors.ec.memory import ItemMemory
from connectors.engine.tensors import Chunk, PagedCache, Staging
from tests.connectors.engine.paging.pools import Pool, strided
from trials.gpu.copies import way
from trials.gpu.machine import Machine
from trials.gpu.order import Item
from trials.gpu.pools import placed, separate
from trials.gpu.report import NotRun, Report, Wrong

RATES, THREADS, STEPS, LAUNCHES = (
    "GB/s to and from the device", "the calling thread", "steps beside copies", "launches for a segment"
)  # fmt: skip
#: Blocks of a segment, and segments of a pool.
SEGMENT, SEGMENTS = 16, 8
#: Copies that are under way at once.
AT_ONCE = (1, 2, 4)
GEOMETRIES = {"8B": {"L": 32, "H": 8, "N": 16, "C": 256}, "70B TP 8": {"L": 80, "H": 1, "N": 16, "C": 256}}
_TINY = {"L": 2, "H": 2, "N": 4, "C": 16}
#: Bytes per second that copies are held to beside steps.
_PACE = 4e9
#: Most segments that begin in one step and direction, however late they are.
_MOST = 4
_ITEM = (3662, 4096)

_ORDERS: dict[str, Callable[[dict[str, int]], list[torch.Tensor]]] = {
    "LBNHC": lambda sizes: strided("LBNHC", sizes, torch.bfloat16),
    "LBHNC": lambda sizes: strided("LBHNC", sizes, torch.bfloat16),
    "BLHNC": lambda sizes: strided("BLHNC", sizes, torch.bfloat16),
    "split kernel blocks": lambda sizes: strided("LBNHC", sizes, torch.bfloat16, ratio=2),
    "a memory for each layer": lambda sizes: separate(sizes, torch.bfloat16),
}


def try_all(machine: Machine, report: Report) -> None:
    """Add the rows of these sections."""
    for geometry in GEOMETRIES:
        for order in _ORDERS:
            name = f"{geometry}, {order}"
            report.row(RATES, name, lambda g=geometry, o=order: _rates(machine, g, o))
            report.row(THREADS, name, lambda g=geometry, o=order: _threads(machine, g, o))
    report.row(RATES, "an item of 30 MB", lambda: _item(machine))
    for step in ("prefill", "decode"):
        for beside in ("saves", "loads", "both"):
            report.row(STEPS, f"{step} beside {beside}", lambda s=step, b=beside: _steps(machine, s, b))
    # Last: a profiler that was there slows launches down.
    for geometry in GEOMETRIES:
        for order in _ORDERS:
            name = f"{geometry}, {order}"
            report.row(LAUNCHES, name, lambda g=geometry, o=order: _launches(machine, g, o))


@dataclass
class Bench:
    """A cache on the device, with room for copies of whole segments."""

    cache: PagedCache
    staging: Staging
    chunks: list[Chunk]
    #: Block ids of each segment, in no order.
    tables: list[dict[int, list[int]]]
    nbytes: int
    #: As many bytes on the device, for bare copies.
    bare: list[Any] = field(default_factory=list)


def _bench(machine: Machine, geometry: str, order: str, count: int = max(AT_ONCE)) -> Bench:
    """Returns a cache, and room for `count` segments."""
    sizes = (_TINY if machine.fake else GEOMETRIES[geometry]) | {"B": SEGMENT * SEGMENTS}
    cache = PagedCache(
        placed(Pool({0: _ORDERS[order](sizes)}, sizes["B"]), machine).device.tables, sizes["B"]
    )
    nbytes = SEGMENT * cache.slot_bytes
    staging = Staging(max(count * nbytes, 1 << 16), nbytes, pin=True)
    chunks = [staging.acquire(nbytes, time.monotonic() + 10.0) for _ in range(count)]
    drawn = torch.randperm(sizes["B"], generator=torch.Generator().manual_seed(0)).tolist()
    tables = [{0: drawn[i * SEGMENT : (i + 1) * SEGMENT]} for i in range(SEGMENTS)]
    bare = [machine.adopt(torch.zeros(nbytes, dtype=torch.uint8)) for _ in chunks[: max(AT_ONCE)]]
    return Bench(cache, staging, chunks, tables, nbytes, bare)


# ---- bytes per second --------------------------------------------------------------------------------


def _saved(bench: Bench, count: int) -> None:
    copies = [bench.cache.gather(bench.tables[i], bench.chunks[i]) for i in range(count)]
    for copied in copies:
        copied.wait()


def _loaded(bench: Bench, count: int) -> None:
    mark = bench.cache.mark()
    copies = [bench.cache.scatter(bench.tables[i], bench.chunks[i], mark) for i in range(count)]
    for copied in copies:
        copied.wait()


def _bare(machine: Machine, bench: Bench, count: int, *, out: bool) -> None:
    """Copies of as many bytes that are all in one place: cudaMemcpyAsync, and an event that blocks."""
    stream = bench.cache._save_stream if out else bench.cache._load_stream
    events = []
    with machine.torch.cuda.stream(stream):
        for i in range(count):
            host, there = bench.chunks[i].tensor, bench.bare[i]
            (host if out else there).copy_(there if out else host, non_blocking=True)
            events.append(machine.torch.cuda.Event(blocking=True))
            events[-1].record(stream)
    for event in events:
        event.synchronize()


def _turns(ways: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[float]]:
    """Returns seconds of each way, one after the other in each round; the first three rounds don't count."""
    seen: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 3):
        for name, call in ways.items():
            began = time.perf_counter()
            call()
            if number >= 3:
                seen[name].append(time.perf_counter() - began)
    return seen


def _p95(values: list[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.95 * len(values)))]


def _rates(machine: Machine, geometry: str, order: str) -> tuple[str, dict[str, Any]]:
    rounds = 2 if machine.fake else 40
    figures: dict[str, Any] = {}
    with machine.run(0) as said:
        bench = _bench(machine, geometry, order)
        for name, call, out in (("save", _saved, True), ("load", _loaded, False)):
            for count in AT_ONCE:
                ways = {
                    "ours": lambda call=call, count=count: call(bench, count),
                    "bare": lambda out=out, count=count: _bare(machine, bench, count, out=out),
                }
                seen, total = _turns(ways, rounds), count * bench.nbytes / 1e9
                middle = {one: total / statistics.median(times) for one, times in seen.items()}
                figures[f"{name} x{count}"] = {
                    "GB/s": round(middle["ours"], 2),
                    "p95 GB/s": round(total / _p95(seen["ours"]), 2),
                    "bare GB/s": round(middle["bare"], 2),
                    "of bare": round(middle["ours"] / middle["bare"], 3),
                }
        by = way(bench.cache)
    if said:
        raise Wrong(said[0])
    text = ", ".join(f"{name} {one['GB/s']:.1f} ({one['of bare']:.2f})" for name, one in figures.items())
    return f"{text} [of bare]; by {by}", figures


def _item(machine: Machine) -> tuple[str, dict[str, Any]]:
    rows, width = (8, 16) if machine.fake else _ITEM
    rounds = 2 if machine.fake else 40
    with machine.run(0) as said, tempfile.TemporaryDirectory() as folder:
        memory = ItemMemory(machine.device, 4 * rows * width * 2)
        item = Item(Path(folder, "item"), rows, width, "BF16")
        item.path.write_bytes(bytes(item.nbytes))
        raw = torch.zeros(item.nbytes, dtype=torch.uint8)
        there = machine.adopt(raw).view(torch.bfloat16).view(rows, width)
        staging = Staging(item.nbytes, 1, pin=True)
        chunk, plain = staging.acquire(item.nbytes, time.monotonic() + 10.0), machine.adopt(raw)
        own: dict[str, list[float]] = {"load": [], "save": [], "read": []}

        def load() -> None:
            began = time.perf_counter()
            tensor = memory.load(item)  # type: ignore[arg-type]
            own["load"].append(time.perf_counter() - began)
            assert tensor is not None
            machine.current.synchronize()

        def save() -> None:
            began = time.perf_counter()
            copied = memory.save(there)
            own["save"].append(time.perf_counter() - began)
            assert copied is not None
            copied.wait()
            copied.release()

        def read() -> None:
            began = time.perf_counter()
            with item.open() as file:
                file.readinto(chunk.views(1, item.nbytes)[0])
            own["read"].append(time.perf_counter() - began)

        def bare(target: Any, source: Any) -> None:
            target.copy_(source, non_blocking=True)
            event = machine.torch.cuda.Event(blocking=True)
            event.record(machine.current)
            event.synchronize()

        ways = {
            "load": load,
            "save": save,
            "read": read,
            "bare load": lambda: bare(plain, chunk.tensor[: item.nbytes]),
            "bare save": lambda: bare(chunk.tensor[: item.nbytes], plain),
        }
        seen = {
            name: item.nbytes / 1e9 / statistics.median(times) for name, times in _turns(ways, rounds).items()
        }
        thread = {f"{name} us": round(1e6 * statistics.median(times), 1) for name, times in own.items()}
    if said:
        raise Wrong(said[0])
    figures = {name: round(value, 2) for name, value in seen.items()} | thread
    text = (
        f"load {seen['load']:.1f} ({seen['load'] / seen['bare load']:.2f}), "
        f"save {seen['save']:.1f} ({seen['save'] / seen['bare save']:.2f}) [of bare]; engine's thread: load "
        f"{thread['load us']:.0f} us, of which the file {thread['read us']:.0f} us, "
        f"save {thread['save us']:.0f} us"
    )
    return text, figures


# ---- launches and threads ----------------------------------------------------------------------------


def _threads(machine: Machine, geometry: str, order: str) -> tuple[str, dict[str, Any]]:
    """Times what a save takes of the engine's thread, and a load of a transfer thread and of the engine's."""
    rounds = 3 if machine.fake else 200
    texts: list[str] = []
    figures: dict[str, Any] = {}
    with machine.run(0) as said:
        bench = _bench(machine, geometry, order)
        cache, chunk = bench.cache, bench.chunks[0]
        for name in ("save", "load", "mark"):
            wall, own = [], []
            for number in range(rounds):
                mark, copied = cache.mark(), None
                table = bench.tables[number % SEGMENTS]
                began, awake = time.perf_counter(), time.thread_time()
                if name == "save":
                    copied = cache.gather(table, chunk)
                elif name == "load":
                    copied = cache.scatter(table, chunk, mark)
                else:
                    cache.mark()
                own.append(time.thread_time() - awake)
                wall.append(time.perf_counter() - began)
                if copied is not None:
                    copied.wait()
            one = {"us": statistics.median(wall), "p95 us": _p95(wall), "cpu us": statistics.median(own)}
            figures[name] = {what: round(1e6 * seconds, 1) for what, seconds in one.items()}
            texts.append(f"{name} {figures[name]['us']:.0f} us (p95 {figures[name]['p95 us']:.0f})")
    if said:
        raise Wrong(said[0])
    return ", ".join(texts), figures


def _launches(machine: Machine, geometry: str, order: str) -> tuple[str, dict[str, Any]]:
    """Counts what the device runs for one segment: operations of each kind, and microseconds of each."""
    if machine.fake:
        raise NotRun("the fake accelerator has no profiler")
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    times, figures, texts = 4, {}, []
    with machine.run(0):
        bench = _bench(machine, geometry, order)
        for name, call in (("save", _saved), ("load", _loaded)):
            call(bench, 1)
            torch.cuda.synchronize()
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
                for _ in range(times):
                    call(bench, 1)
                torch.cuda.synchronize()
            counts: Counter[str] = Counter()
            took: Counter[str] = Counter()
            for event in seen.events() or ():
                if event.device_type == DeviceType.CUDA:
                    lowered = event.name.lower()
                    kind = next((one for one in ("memcpy", "memset") if lowered.startswith(one)), "kernel")
                    counts[kind] += 1
                    took[kind] += event.time_range.elapsed_us()
            if not counts:
                raise NotRun("the profiler has seen nothing: may this process trace the device?")
            figures[name] = {kind: [counts[kind] / times, took[kind] / times] for kind in sorted(counts)}
            parts = [f"{n:g} {kind} of {us:.0f} us" for kind, (n, us) in figures[name].items()]
            texts.append(f"{name} {' + '.join(parts)}")
    return "; ".join(texts), figures


# ---- steps beside copies -----------------------------------------------------------------------------


class Beside:
    """Saves and loads that go on beside steps, each direction at its pace."""

    def __init__(self, machine: Machine, bench: Bench, *, saves: bool, loads: bool) -> None:
        self._machine, self._bench = machine, bench
        self._saves, self._loads = saves, loads
        self.saved = self.loaded = self.late = 0
        self._copies: queue.Queue[tuple[Any, Chunk] | None] = queue.Queue()
        self._marks: queue.Queue[tuple[Any, Chunk, int] | None] = queue.Queue()
        self._began = time.perf_counter()
        self._threads = [threading.Thread(target=one) for one in (self._wait, self._load)]
        # The chunks of rates go back first.
        for chunk in bench.chunks:
            bench.staging.release(chunk)
        for thread in self._threads:
            thread.start()

    def step(self) -> None:
        """Begin what is due, on the engine's thread, behind a step."""
        bench, due = self._bench, (time.perf_counter() - self._began) * _PACE
        for _ in range(_MOST):
            if not self._saves or self.saved + bench.nbytes > due:
                break
            if (chunk := bench.staging.try_acquire(bench.nbytes)) is None:
                self.late += 1
                break
            table = bench.tables[self.saved // bench.nbytes % SEGMENTS]
            self._copies.put((bench.cache.gather(table, chunk), chunk))
            self.saved += bench.nbytes
        mark = bench.cache.mark()
        for _ in range(_MOST):
            if not self._loads or self.loaded + bench.nbytes > due:
                break
            if (chunk := bench.staging.try_acquire(bench.nbytes)) is None:
                self.late += 1
                break
            self._marks.put((mark, chunk, self.loaded // bench.nbytes))
            self.loaded += bench.nbytes

    def _load(self) -> None:
        """A transfer thread: begin copies to the device."""
        while (due := self._marks.get()) is not None:
            mark, chunk, number = due
            copied = self._bench.cache.scatter(self._bench.tables[number % SEGMENTS], chunk, mark)
            self._copies.put((copied, chunk))
        self._copies.put(None)

    def _wait(self) -> None:
        """The thread that waits for all of them."""
        while (one := self._copies.get()) is not None:
            one[0].wait()
            self._bench.staging.release(one[1])

    def end(self) -> tuple[float, float]:
        """Returns the GB/s of saves and loads that were reached."""
        self._marks.put(None)
        for thread in self._threads:
            thread.join()
        seconds = time.perf_counter() - self._began
        return self.saved / seconds / 1e9, self.loaded / seconds / 1e9


def _step(machine: Machine, kind: str) -> Callable[[], None]:
    """Returns what launches one step: a few large products, or many small ones."""
    fresh, where = machine.torch.zeros, {"dtype": torch.bfloat16, "device": machine.device}
    if machine.fake:
        wide, deep, times = 8, 8, 2
    else:
        wide, deep, times = (8192, 8192, 4) if kind == "prefill" else (64, 4096, 200)
    # Zeros would take less power than a model does.
    inputs = fresh(wide, deep, **where).normal_()
    weights = [fresh(deep, deep, **where).normal_() for _ in range(min(times, 8))]

    def launch() -> None:
        for i in range(times):
            machine.torch.mm(inputs, weights[i % len(weights)])

    return launch


def _run(machine: Machine, launch: Callable[[], None], count: int, beside: Beside | None) -> Iterator[float]:
    """Yields milliseconds from the end of one step to the end of the next, two being in flight."""
    ends: list[Any] = []
    for number in range(count):
        launch()
        ends.append(machine.torch.cuda.Event(enable_timing=True, blocking=True))
        ends[-1].record(machine.current)
        if beside is not None:
            beside.step()
        if number >= 2:
            ends[number - 2].synchronize()
    ends[-1].synchronize()
    for one, other in pairwise(ends[5:]):
        yield one.elapsed_time(other)


def _steps(machine: Machine, kind: str, what: str) -> tuple[str, dict[str, Any]]:
    with machine.run(0) as said:
        bench = _bench(machine, "8B", "LBNHC", 16)
        launch = _step(machine, kind)
        count = 10 if machine.fake else 60
        alone = list(_run(machine, launch, count, None))
        if not machine.fake:
            # As many as take a second.
            count = max(60, int(1000 / statistics.median(alone)))
        alone = list(_run(machine, launch, count, None))
        beside = Beside(machine, bench, saves=what in ("saves", "both"), loads=what in ("loads", "both"))
        try:
            with_copies = list(_run(machine, launch, count, beside))
        finally:
            out, back = beside.end()
        alone += _run(machine, launch, count, None)
        late = beside.late
    if said:
        raise Wrong(said[0])
    if not alone or not with_copies:
        raise NotRun("too few steps")
    one, other = statistics.median(alone), statistics.median(with_copies)
    figures = {
        "alone ms": round(one, 3),
        "alone p95 ms": round(_p95(alone), 3),
        "beside ms": round(other, 3),
        "beside p95 ms": round(_p95(with_copies), 3),
        "mean": round(statistics.fmean(with_copies) / statistics.fmean(alone), 4),
        "saves GB/s": round(out, 2),
        "loads GB/s": round(back, 2),
        "without room": late,
    }
    text = (
        f"{one:.2f} ms (p95 {_p95(alone):.2f}) alone, {other:.2f} ms (p95 {_p95(with_copies):.2f}) beside "
        f"{out:.1f} GB/s out, {back:.1f} GB/s in: {figures['mean']:.3f} times as long on average"
    )
    return text, figures
