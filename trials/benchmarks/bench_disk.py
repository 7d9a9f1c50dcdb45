"""Local disk: what LocalPayloads and verification cost beside the bare system calls.

    python -m trials.benchmarks.bench_disk [--folder DIR] [--threads 1 2 4] [--json FILE]

Puts go to fresh files. Loads go into memory that has been used before; "load" comes from the page cache,
where a bare read is a copy in memory and a checksum, at the same speed, can't be free; "cold" comes from
the disk, the page cache dropped before every round. All
cases of one kind take turns within a round, so that a drifting machine meets them alike; a ratio is
the median over the rounds of case / bare in the same round. MB are 10^6 bytes of slots, headers not
counted.

To add a case: a function that takes a Bench and an Arena and returns one operation on segment i,
and a line in PUTS or LOADS.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import resource
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from kvstore import keys
from kvstore.format import segment as codec
from kvstore.format.keyring import NO_KEYS
from kvstore.index.port import Run
from kvstore.keys import SegmentId
from kvstore.payloads.local import LocalPayloads
from kvstore.store import reading as reader
from schemas.namespace import GroupSpec, Namespace
from schemas.records import SegmentRecord

SLOT_BYTES = 512 << 10
SHAPE = (32, 8, 8, 128)
NAMESPACE = Namespace(
    kind="kv",
    model="bench",
    weights="0" * 16,
    dtype="bfloat16",
    block_tokens=8,
    hash_algo="sha256",
    page_order="LHNC",
    groups=(GroupSpec(kind="full", block_tokens=8, dtype="BF16", shape=SHAPE),),
)

Operation = Callable[[int], object]


class Arena:
    """One thread's memory: a page-aligned view per slot, touched before any clock runs."""

    def __init__(self, slots: int, seed: int) -> None:
        pool = memoryview(mmap.mmap(-1, slots * SLOT_BYTES))
        rng = np.random.default_rng(seed)
        np.frombuffer(pool, np.uint8)[:] = rng.integers(0, 256, pool.nbytes, np.uint8)
        self.views = [pool[i * SLOT_BYTES : (i + 1) * SLOT_BYTES] for i in range(slots)]


class Bench:
    """A folder with one payload per segment, and what each case needs to know of them."""

    def __init__(self, folder: Path, slots: int, segments: int) -> None:
        self.folder = folder
        self.slots = slots
        self.payloads = LocalPayloads(folder / "cache")
        self.namespace = keys.namespace_id(NAMESPACE)
        self.namespace_json = keys.canonical_json(NAMESPACE)
        self.keys = [keys.block_key(i.to_bytes(32, "big")) for i in range(slots)]
        self.segments = [SegmentId(i.to_bytes(8, "big")) for i in range(segments)]
        arena = Arena(slots, seed=1)
        self.runs = []
        for segment in self.segments:
            encoded = self.encode(arena, segment)
            self.payloads.put(self.name(segment), encoded.buffers)
            record = SegmentRecord((encoded.part,), slots, "none", 0, raw_bytes=slots * SLOT_BYTES)
            self.runs.append(Run(0, segment, 0, slots, record))
        self.start = self.runs[0].record.parts[0].data_start

    def encode(self, arena: Arena, segment: SegmentId) -> codec.Encoded:
        slots = [
            codec.Slot(key, view, "BF16", SHAPE) for key, view in zip(self.keys, arena.views, strict=True)
        ]
        return codec.encode(
            slots,
            namespace_json=self.namespace_json,
            kind="kv",
            segment=segment,
            writer="bench",
        )

    def sync(self) -> None:
        """Bring everything to the disk: pages that aren't there yet can't be dropped."""
        os.sync()

    def forget(self) -> None:
        """Drop the segments from the page cache."""
        for segment in self.segments:
            fd = os.open(self.folder / "cache" / self.name(segment), os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)

    def name(self, segment: SegmentId) -> str:
        return keys.payload_name(self.namespace, segment, 0)


# Puts. Each writes segment i, header and slots, under a name that isn't there.


def bare_write(bench: Bench, arena: Arena) -> Operation:
    """open, pwritev, rename: what an atomic write can't do without."""
    buffers = bench.encode(arena, bench.segments[0]).buffers
    folder = bench.folder / "bare"
    folder.mkdir(exist_ok=True)

    def put(i: int) -> None:
        temporary = f"{folder}/{i}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            os.pwritev(fd, buffers, 0)
        finally:
            os.close(fd)
        os.rename(temporary, f"{folder}/{i}")

    return put


def local_put(bench: Bench, arena: Arena) -> Operation:
    buffers = bench.encode(arena, bench.segments[0]).buffers
    payloads = LocalPayloads(bench.folder / "local")
    return lambda i: payloads.put(_put_name(bench, i), buffers)


def encode_and_put(bench: Bench, arena: Arena) -> Operation:
    payloads = LocalPayloads(bench.folder / "encoded")
    segment = bench.segments[0]
    return lambda i: payloads.put(_put_name(bench, i), bench.encode(arena, segment).buffers)


def _put_name(bench: Bench, i: int) -> str:
    return bench.name(SegmentId((i % 256).to_bytes(1, "big") + i.to_bytes(7, "big")))


# Loads. Each fills the arena with all slots of segment i.


def bare_read(bench: Bench, arena: Arena) -> Operation:
    """open and one preadv of everything."""
    paths = [bench.folder / "cache" / bench.name(segment) for segment in bench.segments]
    size = bench.slots * SLOT_BYTES

    def load(i: int) -> None:
        fd = os.open(paths[i], os.O_RDONLY)
        try:
            done = os.preadv(fd, arena.views, bench.start)
        finally:
            os.close(fd)
        assert done == size

    return load


def local_read(bench: Bench, arena: Arena) -> Operation:
    names = [bench.name(segment) for segment in bench.segments]
    return lambda i: bench.payloads.read(names[i], bench.start, arena.views)


def verified_run(bench: Bench, arena: Arena) -> Operation:
    """kvstore.store.reading.read_run, as the store loads."""
    end = float("inf")
    return lambda i: reader.read_run(
        bench.payloads,
        NO_KEYS,
        bench.namespace,
        bench.runs[i],
        bench.keys,
        arena.views,
        rank=0,
        end=end,
        gap_bytes=0,
    )


def pieces_run(bench: Bench, arena: Arena) -> Operation:
    """Pieces of 4 MiB, each checked right after it was read: what `read_run` does not do."""
    names = [bench.name(segment) for segment in bench.segments]
    head = memoryview(bytearray(bench.start))
    step = (4 << 20) // SLOT_BYTES

    def load(i: int) -> None:
        bench.payloads.read(names[i], 0, [head])
        header = codec.parse_header(head, namespace=bench.namespace)
        for first in range(0, bench.slots, step):
            views = arena.views[first : first + step]
            bench.payloads.read(names[i], bench.start + first * SLOT_BYTES, views)
            for slot, view in zip(header.meta.slots[first : first + step], views, strict=True):
                codec.decode_slot(view, slot, None)

    return load


PUTS: dict[str, Callable[[Bench, Arena], Operation]] = {
    "bare": bare_write,
    "LocalPayloads.put": local_put,
    "encode + put": encode_and_put,
}
LOADS: dict[str, Callable[[Bench, Arena], Operation]] = {
    "bare": bare_read,
    "LocalPayloads.read": local_read,
    "read_run": verified_run,
    "verified in pieces": pieces_run,
}


@dataclass(frozen=True)
class Result:
    """One case at one number of threads; medians over the rounds."""

    kind: str
    case: str
    threads: int
    mb_s: float
    #: Against the bare system calls of the same round.
    ratio: float
    cpu_s_per_gb: float


def measure(bench: Bench, kind: str, threads: int, rounds: int) -> list[Result]:
    """All cases of one kind, taking turns."""
    cases = PUTS if kind == "put" else LOADS
    if kind == "cold":
        bench.sync()
    arenas = [Arena(bench.slots, seed) for seed in range(threads)]
    operations = {case: [make(bench, arena) for arena in arenas] for case, make in cases.items()}
    rates: dict[str, list[float]] = {case: [] for case in cases}
    cpu: dict[str, list[float]] = {case: [] for case in cases}
    for number in range(-1, rounds):
        for case in cases:
            if kind == "cold":
                bench.forget()
            wall, busy = _round(operations[case], len(bench.segments))
            if kind == "put":
                for folder in ("bare", "local", "encoded"):
                    shutil.rmtree(bench.folder / folder, ignore_errors=True)
                (bench.folder / "bare").mkdir()
            if number >= 0:  # the first round warms up
                nbytes = len(bench.segments) * bench.slots * SLOT_BYTES
                rates[case].append(nbytes / wall / 1e6)
                cpu[case].append(busy / nbytes * 1e9)
    return [
        Result(
            kind,
            case,
            threads,
            statistics.median(rates[case]),
            statistics.median(a / b for a, b in zip(rates[case], rates["bare"], strict=True)),
            statistics.median(cpu[case]),
        )
        for case in cases
    ]


def _round(operations: Sequence[Operation], segments: int) -> tuple[float, float]:
    """Wall and CPU seconds in which the threads share the segments out among them."""
    start = threading.Barrier(len(operations) + 1)

    def work(thread: int) -> None:
        start.wait()
        for i in range(thread, segments, len(operations)):
            operations[thread](i)

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(len(operations))]
    for worker in workers:
        worker.start()
    start.wait()
    began, used = time.perf_counter(), _cpu_s()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began, _cpu_s() - used


def _cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def machine(folder: Path) -> dict[str, str]:
    """What the numbers depend on."""
    model = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    within = [each for each in mounts if folder.resolve().is_relative_to(each[1])]
    return {
        "cpu": f"{os.cpu_count()} x {model}",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "file system": max(within, key=lambda each: len(each[1]))[2] if within else "unknown",
        "load": " ".join(f"{load:.1f}" for load in os.getloadavg()),
    }


def table(results: Sequence[Result]) -> str:
    lines = [f"{'':6}{'threads':>8}  {'case':<22}{'MB/s':>8}{'of bare':>9}{'CPU s/GB':>10}"]
    for each in results:
        lines.append(
            f"{each.kind:6}{each.threads:>8}  {each.case:<22}{each.mb_s:>8.0f}{each.ratio:>9.2f}"
            f"{each.cpu_s_per_gb:>10.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", help="on the disk to measure; default: the temporary folder")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--segments", type=int, default=16, help="shared out among the threads")
    parser.add_argument("--slots", type=int, default=64, help="of 512 KiB each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", help="also write the results there; - for stdout")
    given = parser.parse_args()

    results: list[Result] = []
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="bench-disk-") as name:
        facts = machine(Path(name))
        bench = Bench(Path(name), given.slots, given.segments)
        for kind in ("put", "load", "cold"):
            for threads in given.threads:
                print(f"{kind}, {threads} threads", file=sys.stderr)
                results += measure(bench, kind, threads, given.rounds)
    document = {
        "machine": facts,
        "segment_bytes": given.slots * SLOT_BYTES,
        "results": [asdict(each) for each in results],
    }
    if given.json == "-":
        print(json.dumps(document, indent=1))
        return
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    print(f"{given.segments} segments of {given.slots * SLOT_BYTES >> 20} MiB, {given.rounds} rounds")
    print(table(results))
    if given.json:
        Path(given.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
