"""S3: what S3Payloads, ranges and verification cost beside the same client's bare requests.

    python -m trials.benchmarks.bench_s3 [--server nginx|ceph] [--tls] [--busy] [--concurrency 1 8 32]

The far end is nginx serving files from memory, which is faster than any S3 server, so that the client is
what is measured; `--server ceph` takes a real S3 server. `--busy` runs a Python thread beside it that never
waits, as an engine's scheduler does. `--tls` goes over https. Concurrency is the number of requests under
way. All cases of one kind take turns within a round, and a ratio is the median over the rounds of case /
bare in the same round. MB are 10^6 bytes of slots. CPU is this process's alone, less the busy thread's.

    get   bare      obstore's ranged GETs of 8 MiB, the answers thrown away
          copied    and copied into the buffers they are wanted in, which nobody can do without
          boto3     its ranged GETs, read into the same buffers
          read      S3Payloads behind retries, breaker and ranges
          load      kvstore.store.reading.read_run over that: verified
    put   bare      obstore's PUTs of one buffer
          boto3     its PUTs of one buffer
          put       S3Payloads.put of header and slots, last: they are what is read
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import obstore

from kvstore import keys
from kvstore.build import open_store
from kvstore.format import segment as codec
from kvstore.format.keyring import NO_KEYS
from kvstore.index.port import Run
from kvstore.keys import SegmentId
from kvstore.payloads.buffers import pour
from kvstore.payloads.port import PayloadStore
from kvstore.payloads.s3.clients import Session
from kvstore.store import reading as reader
from schemas.namespace import GroupSpec
from schemas.records import SegmentRecord
from schemas.settings import S3Settings
from schemas.urls import s3_location
from tests.servers.s3.bucket import S3Bucket
from trials.benchmarks.bench_disk import NAMESPACE, SHAPE, SLOT_BYTES, Arena, machine

RANGE = 8 << 20


@dataclass(frozen=True)
class Result:
    """One case at one concurrency; medians over the rounds."""

    kind: str
    case: str
    concurrency: int
    mb_s: float
    ratio: float
    cpu_s_per_gb: float


class Bench:
    """Segments in a bucket and the ways to reach them, at one concurrency."""

    def __init__(self, url: str, s3: dict[str, Any], concurrency: int, slots: int, segments: int) -> None:
        self.slots, self.concurrency = slots, concurrency
        self.namespace = keys.namespace_id(NAMESPACE)
        self.keys = [keys.block_key(i.to_bytes(32, "big")) for i in range(slots)]
        self.segments = [SegmentId(i.to_bytes(8, "big")) for i in range(segments)]
        s3 = s3 | {
            "concurrency": concurrency,
            "range_bytes": RANGE,
            "read_timeout_s": 60,
            "stall_timeout_s": 60,
        }
        self.location = s3_location(url)
        self.store = open_store({"payloads": url, "index": "redis://127.0.0.1:1", "s3": s3})
        session = Session(self.location, S3Settings.model_validate(s3))
        self.bare, self.boto = session.obstore(60), session.boto()
        #: Threads that load whole segments, as many as `transfers.read_threads` or as it takes to keep
        #: `concurrency` ranges of a quarter of a segment under way.
        self.threads = max(4, concurrency // 4)
        self.arenas = [Arena(slots, seed) for seed in range(self.threads)]
        self.runs: list[Run] = []

    def close(self) -> None:
        self.store.close()

    def name(self, i: int) -> str:
        return keys.payload_name(self.namespace, self.segments[i], 0)

    def fill(self) -> None:
        for i, segment in enumerate(self.segments):
            encoded = self.encode(segment)
            self.store.payloads.put(self.name(i), encoded.buffers)
            record = SegmentRecord((encoded.part,), self.slots, "none", 0, raw_bytes=self.slots * SLOT_BYTES)
            self.runs.append(Run(0, segment, 0, self.slots, record))

    def encode(self, segment: SegmentId) -> codec.Encoded:
        views = self.arenas[0].views
        return codec.encode(
            [codec.Slot(key, view, "BF16", SHAPE) for key, view in zip(self.keys, views, strict=True)],
            namespace_json=keys.canonical_json(NAMESPACE),
            kind="kv",
            segment=segment,
            writer="bench",
        )

    # Every case: a list of tasks, each to be given the number of the thread that runs it, and how many
    # threads run them.

    def ranges(
        self, get: Callable[[str, int, int, int], object]
    ) -> tuple[list[Callable[[int], object]], int]:
        size = self.runs[0].record.parts[0].nbytes
        tasks = [
            lambda thread, i=i, at=at: get(
                self.location.root + self.name(i), at, min(RANGE, size - at), thread
            )
            for i in range(len(self.segments))
            for at in range(0, size, RANGE)
        ]
        return tasks, self.concurrency

    def bare_get(self, copied: bool) -> tuple[list[Callable[[int], object]], int]:
        buffers = [memoryview(bytearray(RANGE)) for _ in range(self.concurrency)]

        def get(key: str, at: int, length: int, thread: int) -> object:
            result = obstore.get(self.bare, key, options={"range": (at, at + length)})
            data = memoryview(result.bytes())
            assert data.nbytes == length
            return pour(data, [buffers[thread]]) if copied else None

        return self.ranges(get)

    def boto_get(self) -> tuple[list[Callable[[int], object]], int]:
        buffers = [memoryview(bytearray(RANGE)) for _ in range(self.concurrency)]

        def get(key: str, at: int, length: int, thread: int) -> object:
            wanted = {"Bucket": self.location.bucket, "Key": key, "Range": f"bytes={at}-{at + length - 1}"}
            body, got = self.boto.get_object(**wanted)["Body"], 0
            while count := body.readinto(buffers[thread][got : min(got + (512 << 10), length)]):
                got += count
            assert got == length
            return None

        return self.ranges(get)

    def read(self) -> tuple[list[Callable[[int], object]], int]:
        payloads = self.store.payloads
        return [
            lambda thread, i=i: payloads.read(self.name(i), self._start(i), self.arenas[thread].views)
            for i in range(len(self.segments))
        ], self.threads

    def load(self) -> tuple[list[Callable[[int], object]], int]:
        payloads = self.store.payloads
        end = float("inf")
        return [
            lambda thread, i=i: reader.read_run(
                payloads,
                NO_KEYS,
                self.namespace,
                self.runs[i],
                self.keys,
                self.arenas[thread].views,
                rank=0,
                end=end,
                gap_bytes=1 << 20,
            )
            for i in range(len(self.segments))
        ], self.threads

    def _start(self, i: int) -> int:
        return self.runs[i].record.parts[0].data_start

    def bare_put(self) -> tuple[list[Callable[[int], object]], int]:
        data = b"".join(self.encode(self.segments[0]).buffers)
        return [
            lambda thread, i=i: obstore.put(
                self.bare, f"{self.location.root}{self.name(i)}", data, use_multipart=False
            )
            for i in range(len(self.segments))
        ], self.concurrency

    def boto_put(self) -> tuple[list[Callable[[int], object]], int]:
        data = b"".join(self.encode(self.segments[0]).buffers)
        return [
            lambda thread, i=i: self.boto.put_object(
                Bucket=self.location.bucket, Key=f"{self.location.root}{self.name(i)}", Body=data
            )
            for i in range(len(self.segments))
        ], self.concurrency

    def put(self) -> tuple[list[Callable[[int], object]], int]:
        payloads: PayloadStore = self.store.payloads
        encoded = [self.encode(segment).buffers for segment in self.segments]
        return [
            lambda thread, i=i: payloads.put(self.name(i), encoded[i]) for i in range(len(self.segments))
        ], self.concurrency


def cases(bench: Bench) -> dict[str, dict[str, tuple[list[Callable[[int], object]], int]]]:
    return {
        "put": {"bare": bench.bare_put(), "boto3": bench.boto_put(), "put": bench.put()},
        "get": {
            "bare": bench.bare_get(copied=False),
            "copied": bench.bare_get(copied=True),
            "boto3": bench.boto_get(),
            "read": bench.read(),
            "load": bench.load(),
        },
    }


def measure(bench: Bench, rounds: int, busy: bool) -> list[Result]:
    """All cases, those of one kind taking turns."""
    results = []
    nbytes = len(bench.segments) * bench.slots * SLOT_BYTES
    for kind, made in cases(bench).items():
        rates: dict[str, list[float]] = {case: [] for case in made}
        cpu: dict[str, list[float]] = {case: [] for case in made}
        for number in range(-1, rounds):
            for case, (tasks, threads) in made.items():
                used = time.process_time()
                with _Busy(busy) as other:
                    wall = _round(tasks, threads)
                used = time.process_time() - used - other.cpu_s
                if number >= 0:  # the first round warms up
                    rates[case].append(nbytes / wall / 1e6)
                    cpu[case].append(used / nbytes * 1e9)
        for case in made:
            ratio = statistics.median(a / b for a, b in zip(rates[case], rates["bare"], strict=True))
            mb_s, spent = statistics.median(rates[case]), statistics.median(cpu[case])
            results.append(Result(kind, case, bench.concurrency, mb_s, ratio, spent))
    return results


def _round(tasks: Sequence[Callable[[int], object]], threads: int) -> float:
    """Seconds in which the threads do the tasks, each taking the next."""
    start = threading.Barrier(threads + 1)
    left: Iterator[Callable[[int], object]] = iter(tasks)
    lock = threading.Lock()

    def work(thread: int) -> None:
        start.wait()
        while True:
            with lock:
                task = next(left, None)
            if task is None:
                return
            task(thread)

    workers = [threading.Thread(target=work, args=(thread,)) for thread in range(threads)]
    for worker in workers:
        worker.start()
    start.wait()
    began = time.perf_counter()
    for worker in workers:
        worker.join()
    return time.perf_counter() - began


class _Busy:
    """A thread that holds the interpreter as much as it is let; `cpu_s` is what it used."""

    def __init__(self, wanted: bool) -> None:
        self.cpu_s = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._spin) if wanted else None

    def _spin(self) -> None:
        while not self._stop.is_set():
            sum(range(1000))
        self.cpu_s = time.thread_time()

    def __enter__(self) -> Self:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()


@contextmanager
def server(kind: str, tls: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """(payloads URL, s3 settings) of a place to put segments."""
    if kind == "nginx":
        from tests.servers.s3.nginx import NginxServer

        with NginxServer(tls=tls) as nginx:
            (nginx.root / "bucket").mkdir()
            settings = {"access_key_id": "nobody", "secret_access_key": "asks", "write_timeout_s": 60}
            if tls:
                settings["tls_ca"] = str(nginx.ca)
            yield f"s3://bucket/bench?endpoint={nginx.endpoint}&region=us-east-1", settings
        return
    from tests.servers.s3.ceph import CephServer

    with CephServer() as ceph:
        bucket: S3Bucket = ceph.new_bucket()
        yield bucket.url, bucket.settings["s3"] | {"write_timeout_s": 60}


@dataclass(frozen=True)
class Requests:
    """What the server sees of a prefill of 1,000 blocks that is saved, and loaded by another engine."""

    block_bytes: int
    segments: int
    puts: int
    gets: int
    others: int


def count_requests(block_bytes: int, blocks: int = 1000) -> Requests:
    """Through a proxy that counts, with the segments that the connector's planning makes."""
    from connectors.planning import saves_due
    from tests.servers.s3.proxy import S3Proxy
    from tests.servers.s3.servers import MotoServer

    shape = (1, 1, 16, block_bytes // 32)
    group = GroupSpec(kind="full", block_tokens=16, dtype="BF16", shape=shape)
    namespace = NAMESPACE.model_copy(update={"groups": (group,), "block_tokens": 16})
    hashes = [hashlib.sha256(i.to_bytes(8, "big")).digest() for i in range(blocks)]
    with MotoServer() as moto, S3Proxy(moto.endpoint) as proxy:
        bucket = replace(moto.new_bucket(), endpoint=proxy.endpoint)
        tree = {"payloads": bucket.url, "s3": bucket.settings["s3"] | {"read_timeout_s": 60}}
        with (
            tempfile.TemporaryDirectory() as folder,
            open_store(tree | {"index": f"sqlite://{folder}/i"}) as store,
        ):
            space = store.open(namespace, block_bytes=block_bytes)
            data = memoryview(os.urandom(block_bytes))
            per_segment = max(1, min(store.settings.segment.max_blocks, (32 << 20) // block_bytes))
            for run in saves_due(0, blocks, per_segment, final=True)[0]:
                slots = [codec.Slot(keys.block_key(hashes[i]), data, "BF16", shape) for i in run]
                space.save(slots, depth=run.start, chain=keys.digests(hashes[:1]))
            puts = proxy.counts["PUT"]
            found = space.match(keys.digests(hashes))
            pool = memoryview(bytearray(blocks * block_bytes))
            into = [pool[i * block_bytes : (i + 1) * block_bytes] for i in range(blocks)]
            assert found.blocks == blocks
            for each in found.runs:
                here = slice(each.start, each.start + each.count)
                space.load(each, [keys.block_key(one) for one in hashes[here]], into[here])
        others = sum(n for verb, n in proxy.counts.items() if verb not in ("PUT", "GET"))
        return Requests(block_bytes, len(found.runs), puts, proxy.counts["GET"], others)


def table(results: Sequence[Result]) -> str:
    lines = [f"{'':5}{'requests':>9}  {'case':<14}{'MB/s':>8}{'of bare':>9}{'CPU s/GB':>10}"]
    for each in results:
        lines.append(
            f"{each.kind:5}{each.concurrency:>9}  {each.case:<14}{each.mb_s:>8.0f}{each.ratio:>9.2f}"
            f"{each.cpu_s_per_gb:>10.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--server", choices=["nginx", "ceph"], default="nginx")
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--segments", type=int, default=8)
    parser.add_argument("--slots", type=int, default=64, help="of 512 KiB each")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only-requests", action="store_true", help="count requests, measure nothing")
    parser.add_argument("--json", metavar="FILE", help="also write the results there; - for stdout")
    given = parser.parse_args()

    results: list[Result] = []
    facts = machine(Path("/tmp"))
    requests = [count_requests(size) for size in (64 << 10, 512 << 10)]
    with ExitStack() as stack:
        if not given.only_requests:
            url, s3 = stack.enter_context(server(given.server, given.tls))
        for concurrency in () if given.only_requests else given.concurrency:
            print(f"{concurrency} requests at a time", file=sys.stderr)
            bench = Bench(url, s3, concurrency, given.slots, given.segments)
            bench.fill()
            results += measure(bench, given.rounds, given.busy)
            bench.close()
    document = {
        "machine": facts,
        "server": given.server,
        "tls": given.tls,
        "busy": given.busy,
        "segment_bytes": given.slots * SLOT_BYTES,
        "results": [asdict(each) for each in results],
        "requests_per_1000_blocks": [asdict(each) for each in requests],
    }
    if given.json == "-":
        print(json.dumps(document, indent=1))
        return
    print(", ".join(f"{key}: {value}" for key, value in facts.items()))
    print(f"{given.segments} segments of {given.slots * SLOT_BYTES >> 20} MiB, {given.rounds} rounds")
    print(table(results))
    for each in requests:
        print(
            f"1,000 blocks of {each.block_bytes >> 10} KiB: {each.puts} PUTs, {each.gets} GETs, "
            f"{each.others} others"
        )
    if given.json:
        Path(given.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
