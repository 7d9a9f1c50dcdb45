"""What looking after a large store costs: a million blocks in Redis and in files.

    python -m trials.benchmarks.bench_million [--json FILE] [--blocks N] [--folder DIR] [--jobs N]

Writes the payloads (segments of 64 blocks of two bytes: their headers are what counts, 28 KiB each), and then
times what an operator does: rebuild, status, eviction of one percent, reaping and sweeping, FLUSHALL and
another rebuild, fsck. Beside each step stands the longest that one command kept Redis busy, by its SLOWLOG.

Fails if anything is not exact: what the second rebuild restores must equal what was there, record by record
and entry by entry, and fsck must find nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import redis

from kvstore.admin.backends import Cache
from kvstore.admin.inspect.status import status
from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.fsck import fsck
from kvstore.admin.repair.rebuild import rebuild
from kvstore.build import load_settings
from kvstore.format import segment as codec
from kvstore.format.segment import Slot
from kvstore.keys import (
    SegmentId,
    block_key,
    canonical_json,
    digests,
    namespace_id,
    new_segment_id,
    payload_name,
)
from kvstore.metrics import Counters
from kvstore.payloads.local import LocalPayloads
from kvstore.store.housekeeping import Housekeeping
from schemas.namespace import GroupSpec, Namespace
from schemas.records import pack_record
from tests.index.redis.scripts import script_name
from tests.servers.redis import RedisServer

SEGMENT = 64
#: Segments of one chain.
_CHAIN = 64
_SHAPE = (1, 1, 1, 1)
NAMESPACE = Namespace(
    kind="kv", model="tiny", weights="w", dtype="bfloat16", block_tokens=1, hash_algo="sha256",
    hash_root="r", kv_dtype="auto", page_order="LHNC",
    groups=(GroupSpec(kind="full", block_tokens=1, dtype="BF16", shape=_SHAPE),),
)  # fmt: skip
#: From this on Redis keeps a command in its SLOWLOG.
_NOTED_US = 500


def hashes(number: int, blocks: int) -> list[bytes]:
    """Returns the block hashes of a chain."""
    found, parent = [], f"chain {number}".encode()
    for _ in range(blocks):
        parent = hashlib.sha256(parent).digest()
        found.append(parent)
    return found


def encoded_chain(number: int, segments: int, size: int) -> Iterator[tuple[SegmentId, codec.Encoded]]:
    """Yields the segments of a chain, of `size` blocks of two bytes each, with real headers."""
    chain, text = hashes(number, segments * size), canonical_json(NAMESPACE)
    for first in range(0, len(chain), size):
        some = chain[first : first + size]
        slots = [Slot(block_key(one), memoryview(one[:2]), "BF16", _SHAPE) for one in some]
        segment = new_segment_id(digests(chain[:1]))
        created_s = 1_700_000_000 + number
        yield (
            segment,
            codec.encode(
                slots,
                namespace_json=text,
                kind="kv",
                segment=segment,
                depth=first,
                created_s=created_s,
                writer="a benchmark",
            ),
        )


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    what: str
    seconds: float
    #: Of the commands of this step, the longest, in milliseconds; 0: none took half a millisecond.
    redis_ms: float
    #: Which that was, and how many took more than 10 ms.
    command: str
    over_10_ms: int
    note: str = ""


@dataclass
class Bench:
    server: RedisServer
    folder: Path
    blocks: int
    jobs: int
    rows: list[Row] = field(default_factory=list)

    def __post_init__(self) -> None:
        given = {
            "payloads": f"file://{self.folder}",
            "index": self.server.url,
            # Some blocks of this size are what sizes the index.
            "capacity_bytes": 2 * self.blocks,
            "redis": {"timeout_s": 10},
        }
        self.settings = load_settings(given, environ={})
        self.client: Any = redis.Redis.from_url(self.server.url, protocol=2)
        self.name = namespace_id(NAMESPACE)

    def run(self) -> None:
        self.client.config_set("slowlog-log-slower-than", _NOTED_US)
        self.client.config_set("slowlog-max-len", 10_000)
        self._step("write payloads", self._write)
        self._step("rebuild", self._rebuild)
        self._step("status, in a process", self._status)
        self._step("status", self._status_process)
        self._step("evict 1%", self._evict)
        self._step("reap and sweep", self._reap)
        before = self._snapshot()
        self.client.flushall()
        self._step("rebuild after FLUSHALL", self._rebuild)
        if self._snapshot() != before:
            raise SystemExit("what was rebuilt is not what was there")
        self._step("fsck", self._fsck)

    def _step(self, what: str, work: Callable[[], str]) -> None:
        self.client.slowlog_reset()
        began = time.perf_counter()
        note = work()
        seconds = time.perf_counter() - began
        slow = sorted(self.client.slowlog_get(10_000), key=lambda one: -one["duration"])
        took, name = (slow[0]["duration"] / 1000, script_name(slow[0]["command"])) if slow else (0.0, "")
        over = sum(one["duration"] > 10_000 for one in slow)
        self.rows.append(Row(what, seconds, took, name, over, note))
        print(self._line(self.rows[-1]), flush=True)

    def _line(self, row: Row) -> str:
        return f"{row.what:26}{row.seconds:9.2f} s  {row.redis_ms:8.2f} ms  {row.command:9} {row.note}"

    def _cache(self) -> Cache:
        return Cache(self.settings)

    def _write(self) -> str:
        payloads = LocalPayloads(str(self.folder))
        total = 0
        segments = self.blocks // SEGMENT
        for number in range(0, segments, _CHAIN):
            for name, encoded in encoded_chain(number // _CHAIN, min(_CHAIN, segments - number), SEGMENT):
                payloads.put(payload_name(self.name, name, 0), encoded.buffers)
                total += encoded.part.nbytes
        return f"{total / 1e6:.0f} MB"

    def _rebuild(self) -> str:
        with self._cache() as cache:
            report = rebuild(cache, apply=True, jobs=self.jobs)
        listed = report.namespaces[0].listed
        if report.ended != "complete" or report.left_out:
            raise SystemExit(f"rebuild: {report}")
        memory = self.client.info("memory")["used_memory"] / listed.blocks
        return f"{listed.segments} segments, {listed.blocks} blocks, {memory:.1f} bytes of Redis a block"

    def _status(self) -> str:
        with self._cache() as cache:
            report = status(cache, time.time())
        assert report.total is not None and report.total.blocks == self.blocks // SEGMENT * SEGMENT
        return f"{report.total.blocks} blocks"

    def _status_process(self) -> str:
        command = [sys.executable, "-m", "kvstore.cli", "status", "--json"]
        where = ["--payloads", f"file://{self.folder}", "--index", self.server.url]
        environ = {name: text for name, text in os.environ.items() if not name.startswith("KVSTORE_")}
        done = subprocess.run([*command, *where], check=True, capture_output=True, env=environ)
        assert json.loads(done.stdout)["total"]["blocks"] == self.blocks // SEGMENT * SEGMENT
        return "the whole command, Python's start included"

    def _evict(self) -> str:
        with self._cache() as cache:
            index = cache.made_index()
            usage = index.usage(self.name)
            keep, gone = usage.nbytes - usage.nbytes // 100, 0
            while step := index.cull(self.name, keep_bytes=keep, delete_after_s=0, limit=256, rule="admin"):
                gone += len(step)
            return f"{gone} segments"

    def _reap(self) -> str:
        with self._cache() as cache:
            index = cache.made_index()
            housekeeping = Housekeeping(index, cache.payloads, self.settings, Counters(), time.time)
            reaped = swept = idle = 0
            while some := housekeeping.reap(self.name):
                reaped += some
            # One that finds nothing has looked at a part of the entries.
            while idle * 4096 < 2 * self.blocks:
                some = housekeeping.sweep(self.name)
                swept, idle = swept + some, 0 if some else idle + 1
        return f"{reaped} payloads, {swept} entries"

    def _snapshot(self) -> tuple[Any, ...]:
        with self._cache() as cache:
            index = cache.made_index()
            records = sorted((one.segment, pack_record(one.record)) for one in index.segments(self.name))
            entries = sorted((one.digest, one.segment, one.slot) for one in index.entries(self.name))
            return index.usage(self.name), records, entries

    def _fsck(self) -> str:
        with self._cache() as cache:
            report = fsck(cache, depth=Depth(jobs=self.jobs))
        if report.ended != "complete" or report.found:
            raise SystemExit(f"fsck: {report}")
        return (
            f"clean: {report.namespaces[0].checked.segments} segments, {report.namespaces[0].entries} entries"
        )


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--blocks", type=int, default=1_000_000)
    parser.add_argument("--folder", type=Path, help="where the payloads go; default: a temporary one")
    parser.add_argument("--jobs", type=int, default=4)
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary, RedisServer(Path(temporary) / "redis") as server:
        # What a command took is not to hold what the server waited for a processor.
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, server.pid, -20)
        bench = Bench(server, given.folder or Path(temporary) / "cache", given.blocks, given.jobs)
        print(f"{'':26}{'took':>11}  {'Redis busy':>11}  command")
        with closing(bench.client):
            bench.run()
    if given.json is not None:
        rows = [asdict(row) for row in bench.rows]
        given.json.write_text(json.dumps({"blocks": given.blocks, "rows": rows}, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
