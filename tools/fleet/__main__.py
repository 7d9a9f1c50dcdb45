"""A fleet in a box: hundreds of light engines over a Redis Cluster of six nodes and Ceph's S3 gateway.

    python -m tools.fleet [--engines 200] [--seconds 60] [--rate 0.2] [--shards 8] [--json FILE]

The requests are those of `tools.recording`: chats that share system prompts and grow turn by turn, and every
turn goes to another engine. Engines and servers share one machine, so the measure is what the servers did
for each request, in CPU seconds, calls, bytes and S3 requests, and not how fast they answered. docs/scale.md
scales that up.

Exits with 1 if any request failed.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import signal
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvstore.build import load_settings, open_index
from kvstore.index.maintenance import Usage
from kvstore.keys import namespace_id
from tests.servers.s3.ceph import CephServer
from tools.fleet.engine import NAMESPACE, Done, Request, run
from tools.fleet.servers import SixNodes, Told, janitor, told, watch, watched
from tools.recording import FLEETS, prompts

#: For so many seconds nobody asks anything, to see what servers take by themselves.
_IDLE_S = 10.0


@dataclass(frozen=True, slots=True)
class Call:
    """What engines call, by SLOWLOG: how often in a request, and the microseconds of the middle one, and of
    all of a request together, which a busy machine makes too large."""

    calls: float
    median_us: float
    sum_us: float


@dataclass
class Report:
    """What a fleet asked of its servers. All that is "a request" is of one of the engines' requests."""

    engines: int
    requests: int
    seconds: float
    failed: int
    #: Blocks of a request, and the shares of them that engines had themselves and that they loaded.
    blocks: float
    local: float
    loaded: float
    #: Of a request.
    loads: float
    commits: float
    redis_calls: float
    #: CPU of all masters, without what a node takes that has nothing to do, in milliseconds a second.
    redis_cpu_us: float
    idle_cpu_ms: float
    #: Of the master that did most; times the number of masters it would be `redis_cpu_us` if all did alike.
    busiest_cpu_us: float
    replicas_cpu_us: float
    redis_in_bytes: float
    redis_out_bytes: float
    s3_gets: float
    s3_puts: float
    s3_others: float
    s3_cpu_us: float
    #: Of the whole store at the end.
    stored_blocks: int
    stored_segments: int
    redis_bytes_per_block: float
    #: To one master from one engine.
    connections: float
    match_p50_ms: float
    match_p99_ms: float
    late_p99_s: float
    #: Of Redis, by name.
    calls: dict[str, Call]


def schedule(engines: int, seconds: float, rate: float, seed: int = 1) -> list[list[Request]]:
    """Returns each engine's requests: a turn goes to the next engine, in the order of the day."""
    draw = random.Random(seed)
    count = round(engines * seconds * rate)
    drawn = prompts(FLEETS[0], count, draw)[:count]
    found: list[list[Request]] = [[] for _ in range(engines)]
    for number, (_, hashes) in enumerate(drawn):
        found[number % engines].append(Request(number / count * seconds, tuple(hashes)))
    return found


def fleet(engines: int, seconds: float, rate: float, shards: int, processes: int) -> Report:
    """Runs a fleet over servers of its own."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        nodes = stack.enter_context(SixNodes(Path(folder)))
        s3 = stack.enter_context(CephServer())
        bucket = s3.new_bucket()
        settings: dict[str, Any] = {
            "payloads": bucket.url,
            "index": nodes.urls[0],
            # A machine that is busy with all of the fleet at once is no fault.
            "redis": {"shards": shards, "timeout_s": 30, "connect_timeout_s": 30},
            "transfers": {"read_threads": 1, "write_threads": 1},
            **bucket.settings,
        }
        settings["s3"] |= {"concurrency": 1, "stall_timeout_s": 30, "connect_timeout_s": 30}
        with open_index(load_settings(settings, environ={})) as index:
            # One of them registers: what so many do at once is another measurement.
            index.register(NAMESPACE, expected_blocks=1_000_000)
        stack.enter_context(janitor(settings, Path(folder) / "janitor.log"))
        empty = told(nodes, s3)
        requests = schedule(engines, seconds, rate)
        done = Done()
        context = multiprocessing.get_context("spawn")
        with context.Manager() as manager, context.Pool(processes) as pool:
            # The run begins when all have opened their stores, and is over before any closes its own.
            turn = manager.Barrier(processes + 1)
            jobs = [
                pool.apply_async(run, (settings, requests[part::processes], FLEETS[0].own_blocks, turn))
                for part in range(processes)
            ]
            turn.wait()
            idle = told(nodes, s3)
            time.sleep(_IDLE_S)
            before = told(nodes, s3)
            watch(nodes)
            turn.wait()
            turn.wait()
            after = told(nodes, s3)
            calls = watched(nodes)
            stored = told(nodes, s3).redis_bytes - empty.redis_bytes
            turn.wait()
            for job in jobs:
                done.add(job.get())
        with open_index(load_settings(settings, environ={})) as index:
            usage = index.usage(namespace_id(NAMESPACE))
        return _report(
            engines, done, (empty, idle, before, after), calls, stored / max(1, usage.blocks), usage
        )


def _report(
    engines: int,
    done: Done,
    looks: tuple[Told, Told, Told, Told],
    calls: dict[str, list[int]],
    bytes_per_block: float,
    usage: Usage,
) -> Report:
    empty, idle, before, after = looks
    seconds = after.at_s - before.at_s
    counts, each = done.counts, max(1, done.counts["requests"])
    masters = len(after.redis_cpu_s) // 2
    # What nodes do with nothing to do is not the requests'.
    idly = [b - a for a, b in zip(idle.redis_cpu_s, before.redis_cpu_s, strict=True)]
    part = seconds / (before.at_s - idle.at_s)
    used = [
        1e6 * (b - a - part * c) / each
        for a, b, c in zip(before.redis_cpu_s, after.redis_cpu_s, idly, strict=True)
    ]
    s3 = after.s3_requests - before.s3_requests
    return Report(
        engines=engines,
        requests=counts["requests"],
        seconds=seconds,
        failed=len(done.failures),
        blocks=counts["asked"] / each,
        local=counts["local"] / max(1, counts["asked"]),
        loaded=counts["found"] / max(1, counts["asked"]),
        loads=counts["loads"] / each,
        commits=counts["commits"] / each,
        redis_calls=(after.redis_calls - before.redis_calls) / each,
        redis_cpu_us=sum(used[:masters]),
        idle_cpu_ms=1e3 * sum(idly) / len(idly) / (before.at_s - idle.at_s),
        busiest_cpu_us=max(used[:masters]),
        replicas_cpu_us=sum(used[masters:]),
        redis_in_bytes=(after.redis_in - before.redis_in) / each,
        redis_out_bytes=(after.redis_out - before.redis_out) / each,
        s3_gets=s3["GET"] / each,
        s3_puts=s3["PUT"] / each,
        s3_others=(s3.total() - s3["GET"] - s3["PUT"]) / each,
        s3_cpu_us=1e6 * (after.s3_cpu_s - before.s3_cpu_s - part * (before.s3_cpu_s - idle.s3_cpu_s)) / each,
        stored_blocks=usage.blocks,
        stored_segments=usage.segments,
        redis_bytes_per_block=bytes_per_block,
        connections=(after.connections - empty.connections) / engines / masters,
        match_p50_ms=1e3 * _share(done.matches_s, 0.5),
        match_p99_ms=1e3 * _share(done.matches_s, 0.99),
        late_p99_s=_share(done.late_s, 0.99),
        calls={
            name: Call(len(times) / each, _share([float(one) for one in times], 0.5), sum(times) / each)
            for name, times in sorted(calls.items(), key=lambda one: -sum(one[1]))
        },
    )


def _share(times: list[float], share: float) -> float:
    return sorted(times)[int(len(times) * share)] if times else 0.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--engines", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rate", type=float, default=0.2, help="requests per second of each engine")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    # Whoever ends this ends its servers and engines.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    report = fleet(given.engines, given.seconds, given.rate, given.shards, given.processes)
    told_of = asdict(report)
    for name, call in told_of.pop("calls").items():
        if name.islower():
            print(f"{name:24}{call['calls']:8.3f} of {call['median_us']:8.1f} us, {call['sum_us']:10.1f} us")
    for name, value in told_of.items():
        print(
            f"{name.replace('_', ' '):24}"
            + (f"{value:14,.2f}" if isinstance(value, float) else f"{value:14,}")
        )
    if given.json is not None:
        given.json.write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    return 1 if report.failed else 0


if __name__ == "__main__":
    sys.exit(main())
