"""What a store of millions of blocks costs, in Redis and in files: time, CPU, and memory of each command.

    python -m trials.benchmarks.bench_scale [--json FILE] [--blocks N ...] [--segment N] [--folder DIR]

The payloads have real headers and blocks of two bytes, so that no disk is what is measured. Commands are the
real ones, each in a process of its own that tells its own peak memory; the calls of engines (match, commit,
eviction) are made here. CPU seconds, of the process and of Redis's thread, are what stays true on a machine
that does other things. What a command costs at a hundred million blocks is read off the line through the last
two sizes; a call is taken to cost what it costs at the larger one.

Fails if something is not as it should be: fsck must find nothing, every match all of its chain.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import redis

from kvstore.admin.repair.entries import Blocks, compare
from kvstore.build import load_settings, open_index
from kvstore.keys import DIGEST_BYTES, SegmentId, digests, namespace_id, payload_name
from kvstore.payloads.local import LocalPayloads
from tests.index.contract.chains import chain, put, served
from tests.servers.redis import RedisServer
from trials.benchmarks.bench_million import NAMESPACE, encoded_chain, hashes

LARGE = 100_000_000
#: Bytes that a listing holds for each payload, and that fsck has for each block of the part that it compares.
LISTED, PART = 42, 8 * 26
#: Blocks of a chain, all of which a match asks for.
CHAIN = 2048
#: Matches and commits that are timed, and the share of all bytes that is evicted.
CALLS, EVICTED = 2000, 0.01
#: Runs a command, which tells the most memory that it has had. The kernel's own answer to whoever waits for a
#: process has the memory of its parent in it.
_CHILD = """
import atexit, re, runpy, sys
peak = lambda: re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]
atexit.register(lambda: print("peak", peak(), file=sys.stderr))
runpy.run_module("kvstore.cli", run_name="__main__", alter_sys=True)
"""
_NAME = namespace_id(NAMESPACE)


@dataclass
class Row:
    """One line of the table. Of calls, all but `calls` is of one; of a command it is of the whole."""

    what: str
    calls: int = 1
    seconds: float = 0.0
    p99_s: float | None = None
    #: CPU seconds of the command, and of Redis for it.
    cpu_s: float | None = None
    redis_cpu_s: float = 0.0
    #: The most memory of the command.
    peak_mib: float | None = None
    note: str = ""


@dataclass
class Bench:
    server: RedisServer
    folder: Path
    blocks: int
    segment: int
    jobs: int
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.given = {
            "payloads": f"file://{self.folder}",
            "index": self.server.url,
            # Some blocks of this size are what sizes the index.
            "capacity_bytes": 2 * self.blocks,
            "redis": {"timeout_s": 60},
        }
        self.client: Any = redis.Redis.from_url(self.server.url, protocol=2)
        self.chains = self.blocks // CHAIN

    @property
    def segments(self) -> int:
        return self.chains * CHAIN // self.segment

    def run(self) -> None:
        print(f"{self.chains * CHAIN:,} blocks in {self.segments:,} segments")
        self._write()
        listed = self._command("rebuild", "--apply", "--jobs", str(self.jobs))["namespaces"][0]["listed"]
        assert listed["segments"] == self.segments, listed
        memory = self.client.info("memory")["used_memory"]
        self._note(f"{memory / listed['blocks']:.1f} bytes of Redis a block")
        self._command("status")
        with open_index(load_settings(self.given, environ={})) as index:
            draw = random.Random(1)
            asked = [digests(hashes(draw.randrange(self.chains), CHAIN)) for _ in range(CALLS)]
            found = self._calls("match", [partial(index.match, _NAME, one) for one in asked])
            assert all(served(runs) == CHAIN for runs in found)
            report = self._command("fsck", "--jobs", str(self.jobs))
            assert report["ended"] == "complete" and not report["counts"], report
            self._command("fsck", "--list")
            self._evict(index)
            reaped = self._command("fsck", "--list", "--apply")["waste"]["namespaces"][0]
            self._note(f"{reaped['reaped']} payloads, {reaped['swept']} entries")
            new = [chain(CHAIN, seed=str(number)) for number in range(-(-CALLS * self.segment // CHAIN))]
            places = [(one, first) for one in new for first in range(0, CHAIN, self.segment)][:CALLS]
            self._calls(
                "commit",
                [partial(put, index, _NAME, one, first, self.segment) for one, first in places],
            )

    def _write(self) -> None:
        began = time.monotonic()
        with multiprocessing.get_context("spawn").Pool(2) as pool:
            write = partial(_written, str(self.folder), self.segment)
            nbytes = sum(pool.imap_unordered(write, range(self.chains), chunksize=16))
        print(f"{nbytes / 1e9:.2f} GB of payloads written in {time.monotonic() - began:.0f} s", flush=True)

    def _command(self, *words: str) -> Any:
        """Runs a command of `cache-admin` and returns its report."""
        environ = {name: text for name, text in os.environ.items() if not name.startswith("KVSTORE_")}
        environ |= {
            "KVSTORE_PAYLOADS": self.given["payloads"],
            "KVSTORE_INDEX": self.given["index"],
            "KVSTORE_CAPACITY_BYTES": str(self.given["capacity_bytes"]),
            "KVSTORE_REDIS__TIMEOUT_S": "60",
        }
        before, began = self._redis_cpu(), time.monotonic()
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as told:
            command = [sys.executable, "-c", _CHILD, *words, "--json"]
            process = subprocess.Popen(command, stdout=out, stderr=told, env=environ)
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            seconds = time.monotonic() - began
            for file in (out, told):
                file.seek(0)
            text = told.read().decode()
            if process.returncode:
                raise SystemExit(f"{' '.join(words)}: {process.returncode}\n{text}")
            self.rows.append(
                Row(
                    " ".join(word for word in words if not word.isdigit() and word != "--jobs"),
                    seconds=seconds,
                    cpu_s=usage.ru_utime + usage.ru_stime,
                    redis_cpu_s=self._redis_cpu() - before,
                    peak_mib=int(text.split("peak")[-1]) / 1024,
                )
            )
            self._show()
            return json.load(out)

    def _calls(self, what: str, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        found, taken, before = [], [], self._redis_cpu()
        for call in calls:
            began = time.monotonic()
            found.append(call())
            taken.append(time.monotonic() - began)
        used = (self._redis_cpu() - before) / len(calls)
        taken.sort()
        p50, p99 = taken[len(taken) // 2], taken[int(len(taken) * 0.99)]
        self.rows.append(Row(what, len(calls), p50, p99, redis_cpu_s=used))
        self._show()
        return found

    def _evict(self, index: Any) -> None:
        """Evicts as engines do, in steps; one call is a segment."""
        before, began, gone = self._redis_cpu(), time.monotonic(), 0
        usage = index.usage(_NAME)
        keep = int(usage.nbytes * (1 - EVICTED))
        while step := index.cull(_NAME, keep_bytes=keep, delete_after_s=0, limit=256, rule="capacity"):
            gone += len(step)
        seconds, used = time.monotonic() - began, self._redis_cpu() - before
        self.rows.append(Row("evict a segment", gone, seconds / gone, redis_cpu_s=used / gone))
        self._show()

    def _redis_cpu(self) -> float:
        told = self.client.info("cpu")
        return float(told["used_cpu_user"] + told["used_cpu_sys"])

    def _note(self, text: str) -> None:
        self.rows[-1].note = text
        print(f"    {text}", flush=True)

    def _show(self) -> None:
        row = self.rows[-1]
        if row.peak_mib is None:
            p99 = "" if row.p99_s is None else f", p99 {1e3 * row.p99_s:.2f} ms"
            print(f"{row.what:18}{1e3 * row.seconds:9.3f} ms{p99}, Redis {1e6 * row.redis_cpu_s:.0f} us CPU")
        else:
            print(f"{row.what:18}{row.seconds:9.1f} s, CPU {row.cpu_s:.1f} s, ", end="")
            print(f"Redis {row.redis_cpu_s:.1f} s CPU, at most {row.peak_mib:.0f} MiB")
        sys.stdout.flush()


def _written(folder: str, segment: int, number: int) -> int:
    """Writes the payloads of a chain, in a process of its own; returns how many bytes that was."""
    payloads, nbytes = LocalPayloads(folder), 0
    for name, encoded in encoded_chain(number, CHAIN // segment, segment):
        payloads.put(payload_name(_NAME, name, 0), encoded.buffers)
        nbytes += encoded.part.nbytes
    return nbytes


def compared(blocks: int) -> tuple[int, float, float]:
    """Compares so many blocks with as many entries, as fsck does and without a store: returns how many are
    hidden, CPU seconds, and the most memory that this process has had, in MiB."""
    draw, began = random.Random(1), time.process_time()
    with Blocks() as entries, Blocks() as truth:
        for number in range(blocks // 64):
            segment, some = SegmentId(number.to_bytes(8, "big")), draw.randbytes(64 * DIGEST_BYTES)
            truth.add_segment(segment, some)
            if number:
                entries.add_segment(segment, some)
        hidden = sum(len(one) // DIGEST_BYTES for one in compare(entries, truth).hidden.values())
    found = re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())
    assert found is not None
    return hidden, time.process_time() - began, int(found[1]) / 1024


def line(small: tuple[float, float], large: tuple[float, float], at: float) -> float:
    """Returns where the line through two points is."""
    (x, y), (x2, y2) = small, large
    return y + (y2 - y) * (at - x) / (x2 - x)


def extrapolated(small: Bench, large: Bench) -> list[Row]:
    """Returns what a hundred million blocks cost: time and CPU of commands on the line through both sizes;
    memory is what the larger one took and what is known to grow, since of the rest there is only noise."""
    rows = []
    for one, two in zip(small.rows, large.rows, strict=True):
        if two.peak_mib is None:
            rows.append(replace(two))
            continue
        told = {}
        for name in ("seconds", "cpu_s", "redis_cpu_s"):
            points = (small.blocks, getattr(one, name)), (large.blocks, getattr(two, name))
            told[name] = max(0.0, line(*points, LARGE))
        grown = LISTED * LARGE / large.segment * (two.what != "status")
        grown += PART * LARGE / 256 * (two.what == "fsck")
        rows.append(Row(one.what, **told, peak_mib=two.peak_mib + grown / 2**20))
    return rows


def table(small: Bench, large: Bench, beyond: Sequence[Row]) -> Iterator[str]:
    """Yields the rows of docs/scale.md: of each command CPU seconds, Redis's CPU seconds and MiB, each at the
    three sizes; of each call Redis's microseconds and the middle one's milliseconds, at the first two."""
    for rows in zip(small.rows, large.rows, beyond, strict=True):
        if rows[0].peak_mib is None:
            cells = [f"{1e6 * row.redis_cpu_s:.0f}" for row in rows[:2]]
            cells += [f"{1e3 * row.seconds:.2f}" for row in rows[:2]]
        else:
            cells = [f"{row.cpu_s:,.1f}" for row in rows]
            cells += [f"{row.redis_cpu_s:,.1f}" for row in rows]
            cells += [f"{row.peak_mib:,.0f}" for row in rows]
        yield f"| {rows[0].what} | {' | '.join(cells)} |"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", default=[20_480, 102_400])
    parser.add_argument("--segment", type=int, default=64, help="blocks of a segment")
    parser.add_argument("--folder", type=Path, help="where the payloads go; default: a temporary one")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--compare", type=int, nargs="+", help="only compare so many blocks, as fsck does")
    given = parser.parse_args(arguments)
    if given.compare:
        for blocks in given.compare:
            with multiprocessing.get_context("spawn").Pool(1) as pool:
                hidden, cpu_s, peak_mib = pool.apply(compared, (blocks,))
            assert hidden == 64
            print(f"{blocks:,} blocks compared: CPU {cpu_s:.1f} s, at most {peak_mib:.0f} MiB", flush=True)
        return 0
    benches, out = [], []
    for blocks in given.blocks:
        with (
            tempfile.TemporaryDirectory(dir=given.folder) as temporary,
            RedisServer(Path(temporary) / "redis") as server,
        ):
            bench = Bench(server, Path(temporary) / "cache", blocks, given.segment, given.jobs)
            bench.run()
            bench.client.close()
        benches.append(bench)
        out.append({"blocks": blocks, "rows": [asdict(row) for row in bench.rows]})
    if len(benches) > 1:
        print(f"{LARGE:,} blocks, by a line through the last two sizes:")
        rows = extrapolated(*benches[-2:])
        for row in rows:
            print(f"{row.what:18}{row.seconds:11.4f} s, Redis {row.redis_cpu_s:.6f} s CPU", end="")
            print("" if row.peak_mib is None else f", at most {row.peak_mib:.0f} MiB")
        print(*table(*benches[-2:], rows), sep="\n")
        out.append({"blocks": LARGE, "extrapolated": True, "rows": [asdict(row) for row in rows]})
    if given.json is not None:
        given.json.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
