"""The tier: what a hit costs beside bare preadv, and a miss beside a bare read of the shared store.

    python -m trials.benchmarks.bench_tier [--folder DIR] [--threads 1 2 4] [--json FILE]

    hit     the folder has the segments, in the page cache. bare: open, preadv, close of the same files.
    miss    the folder has nothing. bare: the shared store's read into the same buffers; it is a folder in the
            page cache here, so that the tier's own cost shows: a real one is ten times slower or more.
            "tier" serves the reader and queues the write to the folder, which runs outside the clock;
            "tier, filling" runs it inside, on two threads, as it is in life.
    save    bare: the shared store's put. tier: and the folder's, through; back: the folder's alone, with the
            upload outside the clock.

Into memory that has been used before. All cases of one kind take turns within a round; a ratio is the median
over the rounds of case / bare in the same round. MB are 10^6 bytes. Verification is bench_disk's business.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from kvstore.breaker import Breaker
from kvstore.keys import NamespaceId, SegmentId, payload_name
from kvstore.payloads.breaking import BreakingPayloads
from kvstore.payloads.local import LocalPayloads
from kvstore.payloads.tiered.ledger import Ledger
from kvstore.payloads.tiered.store import TieredPayloads
from kvstore.threads.transfers import Transfers
from schemas.settings import BreakerSettings, TransferSettings
from trials.benchmarks.bench_disk import SLOT_BYTES, Arena, _cpu_s, machine

Operation = Callable[[int], object]
NAMESPACE = NamespaceId("0" * 16)


class Queued:
    """Jobs to run later, when no clock does."""

    def __init__(self) -> None:
        self._jobs: list[Callable[[], None]] = []

    def __call__(self, _nbytes: int, job: Callable[[], None]) -> bool:
        self._jobs.append(job)
        return True

    def run(self) -> None:
        while self._jobs:
            self._jobs.pop()()


class Bench:
    """A shared store with one payload per segment, and tiers in front of it."""

    def __init__(self, root: Path, slots: int, segments: int) -> None:
        self.slots, self.nbytes = slots, slots * SLOT_BYTES
        self.names = [payload_name(NAMESPACE, SegmentId(i.to_bytes(8)), 0) for i in range(segments)]
        self.shared = LocalPayloads(root / "slow")
        self.folder = root / "fast"
        self.fast = BreakingPayloads(LocalPayloads(self.folder), Breaker("fast", BreakerSettings()))
        self.queued = Queued()
        self.transfers = Transfers(TransferSettings(write_bytes=4 << 30))
        self.tier = self.open(self.queued)
        self.back = self.open(self.queued, write="back")
        self.filling = self.open(self.transfers.write)
        arena = Arena(slots, seed=1)
        for name in self.names:
            self.shared.put(name, arena.views)
            assert self.tier.fill(name, self.nbytes)

    def open(self, later: Callable[[int, Callable[[], None]], bool], **options: str) -> TieredPayloads:
        ledger = Ledger(self.folder, 64 << 30)
        return TieredPayloads(
            self.fast,
            self.shared,
            ledger,
            later=later,
            memory_bytes=4 << 30,
            **options,  # type: ignore[arg-type]
        )

    def settle(self) -> None:
        """Let everything that is queued happen."""
        self.queued.run()
        self.transfers.drain(60)

    def empty(self) -> None:
        """The folder has none of the segments."""
        self.settle()
        for name in self.names:
            self.tier.drop_copy(name)

    def unsave(self) -> None:
        """No store has any of the segments of the saves."""
        self.settle()
        self.tier.delete([_saved(name) for name in self.names])


def _saved(name: str) -> str:
    return name[:-1] + "1"


# One operation on segment i, by a thread with an arena of its own.


def bare_hit(bench: Bench, arena: Arena) -> Operation:
    paths = [f"{bench.folder}/{name}" for name in bench.names]

    def read(i: int) -> None:
        fd = os.open(paths[i], os.O_RDONLY)
        try:
            assert os.preadv(fd, arena.views, 0) == bench.nbytes
        finally:
            os.close(fd)

    return read


def local_hit(bench: Bench, arena: Arena) -> Operation:
    return lambda i: bench.fast.read(bench.names[i], 0, arena.views)


def tier_read(bench: Bench, arena: Arena) -> Operation:
    return lambda i: bench.tier.read(bench.names[i], 0, arena.views, size=bench.nbytes)


def filling_read(bench: Bench, arena: Arena) -> Operation:
    return lambda i: bench.filling.read(bench.names[i], 0, arena.views, size=bench.nbytes)


def bare_miss(bench: Bench, arena: Arena) -> Operation:
    return lambda i: bench.shared.read(bench.names[i], 0, arena.views)


def bare_save(bench: Bench, arena: Arena) -> Operation:
    return lambda i: bench.shared.put(_saved(bench.names[i]), arena.views)


def tier_save(bench: Bench, arena: Arena) -> Operation:
    return lambda i: bench.tier.put(_saved(bench.names[i]), arena.views)


def back_save(bench: Bench, arena: Arena) -> Operation:
    return lambda i: bench.back.put(_saved(bench.names[i]), arena.views)


KINDS: dict[str, tuple[Callable[[Bench], None], dict[str, Callable[[Bench, Arena], Operation]]]] = {
    "hit": (Bench.settle, {"bare preadv": bare_hit, "LocalPayloads": local_hit, "tier": tier_read}),
    "miss": (
        Bench.empty,
        {"bare read": bare_miss, "tier": tier_read, "tier, filling": filling_read},
    ),
    "save": (Bench.unsave, {"bare put": bare_save, "through": tier_save, "back": back_save}),
}


@dataclass(frozen=True)
class Result:
    """One case at one number of threads; medians over the rounds."""

    kind: str
    case: str
    threads: int
    mb_s: float
    #: Against the bare calls of the same round.
    ratio: float
    ms_per_segment: float
    cpu_s_per_gb: float


def measure(bench: Bench, kind: str, threads: int, rounds: int) -> list[Result]:
    """All cases of one kind, taking turns."""
    prepare, cases = KINDS[kind]
    bare = next(iter(cases))
    arenas = [Arena(bench.slots, seed) for seed in range(threads)]
    operations = {case: [make(bench, arena) for arena in arenas] for case, make in cases.items()}
    walls: dict[str, list[float]] = {case: [] for case in cases}
    cpu: dict[str, list[float]] = {case: [] for case in cases}
    nbytes = len(bench.names) * bench.nbytes
    for number in range(-1, rounds):
        for case in cases:
            prepare(bench)
            wall, busy = _round(operations[case], len(bench.names))
            if number >= 0:  # the first round warms up
                walls[case].append(wall)
                cpu[case].append(busy / nbytes * 1e9)
    prepare(bench)
    if kind == "miss":
        for name in bench.names:
            bench.tier.fill(name, bench.nbytes)
    return [
        Result(
            kind,
            case,
            threads,
            nbytes / statistics.median(walls[case]) / 1e6,
            statistics.median(b / a for a, b in zip(walls[case], walls[bare], strict=True)),
            statistics.median(walls[case]) * threads / len(bench.names) * 1e3,
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


def overhead(bench: Bench, rounds: int = 2000) -> dict[str, float]:
    """Microseconds of a hit of 4 KiB, where the copy costs next to nothing."""
    into = [memoryview(bytearray(4096))]
    name, size = bench.names[0], bench.nbytes
    found = {}
    for case, read in {
        "LocalPayloads": lambda: bench.fast.read(name, 0, into),
        "tier": lambda: bench.tier.read(name, 0, into, size=size),
    }.items():
        times = []
        for _ in range(5):
            began = time.perf_counter()
            for _ in range(rounds):
                read()
            times.append((time.perf_counter() - began) / rounds * 1e6)
        found[case] = min(times)
    return found


def table(results: Sequence[Result]) -> str:
    lines = [f"{'':6}{'threads':>8}  {'case':<16}{'MB/s':>8}{'of bare':>9}{'ms each':>9}{'CPU s/GB':>10}"]
    for each in results:
        lines.append(
            f"{each.kind:6}{each.threads:>8}  {each.case:<16}{each.mb_s:>8.0f}{each.ratio:>9.2f}"
            f"{each.ms_per_segment:>9.1f}{each.cpu_s_per_gb:>10.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--folder", help="on the disk to measure; default: the temporary folder")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--segments", type=int, default=12, help="shared out among the threads")
    parser.add_argument("--slots", type=int, default=64, help="of 512 KiB each")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE", help="also write the results there; - for stdout")
    given = parser.parse_args()

    results: list[Result] = []
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="bench-tier-") as name:
        facts = machine(Path(name))
        bench = Bench(Path(name), given.slots, given.segments)
        for kind in KINDS:
            for threads in given.threads:
                print(f"{kind}, {threads} threads", file=sys.stderr)
                results += measure(bench, kind, threads, given.rounds)
        small = overhead(bench)
        bench.transfers.close()
    document = {
        "machine": facts,
        "segment_bytes": given.slots * SLOT_BYTES,
        "results": [asdict(each) for each in results],
        "hit_of_4_kib_us": small,
    }
    if given.json == "-":
        print(json.dumps(document, indent=1))
        return
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    print(f"{given.segments} segments of {given.slots * SLOT_BYTES >> 20} MiB, {given.rounds} rounds")
    print(table(results))
    print("a hit of 4 KiB: " + ", ".join(f"{case} {us:.1f} us" for case, us in small.items()))
    if given.json:
        Path(given.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
