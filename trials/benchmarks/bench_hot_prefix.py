"""What a prefix that everybody asks for costs the shard that it is in: with replicas, with what processes
remember, and without either.

    python -m trials.benchmarks.bench_hot_prefix [--json FILE] [--blocks N ...] [--seconds S] [--clients N]

Clients, processes of their own, ask for prompts that begin with the same stored blocks and go on with a few
that nobody has: one call each, to a master with two replicas that follow it. Each way of asking has its
turns. Where there are fewer cores than servers and clients, times say how busy the machine is; the measure is
what a server's thread has to do: CPU seconds per match, from Redis's own INFO. The inverse of the busiest
one's is how many matches per second the shard can answer when each server has a core of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

from kvstore.index.near import NearRuns
from kvstore.index.redis.index import RedisIndex
from kvstore.index.sharding.index import ShardedIndex
from tests.index.contract.chains import chain, namespace, put_all, served
from tests.index.redis.scripted_sentinel import MASTER, ScriptedSentinel
from tests.servers.redis import RedisServer, patient
from tests.waiting import until
from trials.benchmarks.bench_shards import cpu

SEGMENT = 64
#: Blocks after the prefix, which are not stored.
OWN = 16
TURNS = 3
NEAR_S = 5.0


@dataclass(frozen=True)
class Way:
    """How matches are asked."""

    what: str
    read_from: str
    near_s: float


WAYS = (
    Way("the master alone", "master", 0.0),
    Way("two replicas", "replicas", 0.0),
    Way("what was there 5 s ago", "master", NEAR_S),
    Way("both", "replicas", NEAR_S),
)


@dataclass
class Row:
    """One line of the table; CPU in microseconds and times in milliseconds, per match."""

    blocks: int
    what: str
    matches: int = 0
    seconds: float = 0.0
    master_us: float = 0.0
    #: Of both replicas, and of the busiest of the three servers.
    replicas_us: float = 0.0
    busiest_us: float = 0.0
    #: CPU of the clients.
    client_us: float = 0.0
    p50_ms: float = 0.0
    p99_ms: float = 0.0
    took_ms: list[float] = field(default_factory=list)


def opened(url: str, way: Way, count: list[str]) -> ShardedIndex:
    leaf = RedisIndex.from_settings(url, patient(read_from=way.read_from), count=count.append)
    return ShardedIndex(leaf, near=NearRuns(way.near_s))


def ask(url: str, way: Way, blocks: int, seconds: float, seed: int) -> tuple[list[float], float]:
    """Matches for some seconds; returns what each took, in seconds, and CPU seconds. Runs in a process of its
    own."""
    counted: list[str] = []
    prefix, took = chain(blocks), []
    prompts = [prefix + chain(OWN, seed=f"{seed} {n}", after=prefix[-16:])[16:] for n in range(64)]
    with opened(url, way, counted) as index:
        name = index.register(namespace(), expected_blocks=1 << 20)
        # As in an engine that has been there for a while: it knows the replicas and has its connections.
        until(lambda: index.match(name, prompts[0]) and (way.read_from == "master" or counted))
        began, used = time.monotonic(), time.process_time()
        while (now := time.monotonic()) - began < seconds:
            assert served(index.match(name, prompts[len(took) % len(prompts)])) == blocks
            took.append(time.monotonic() - now)
        used = time.process_time() - used
    return took, used


def measure(url: str, ports: Sequence[int], blocks: int, seconds: float, clients: int) -> list[Row]:
    rows = {way: Row(blocks, way.what) for way in WAYS}
    used_s = {way: [0.0] * len(ports) for way in WAYS}
    with multiprocessing.get_context("spawn").Pool(clients) as pool:
        for turn in range(TURNS):
            for way, row in rows.items():
                before, began = cpu(ports), time.monotonic()
                jobs = [(url, way, blocks, seconds, clients * turn + number) for number in range(clients)]
                for took, used in pool.starmap(ask, jobs, chunksize=1):
                    row.took_ms += [1000 * one for one in took]
                    row.client_us += used
                row.seconds += time.monotonic() - began
                spent = [after - at for at, after in zip(before, cpu(ports), strict=True)]
                used_s[way] = [a + b for a, b in zip(used_s[way], spent, strict=True)]
    for way, row in rows.items():
        row.master_us, row.replicas_us = used_s[way][0], sum(used_s[way][1:])
        row.busiest_us = max(used_s[way])
        row.matches = len(row.took_ms)
        row.took_ms.sort()
        row.p50_ms, row.p99_ms = (row.took_ms[int(share * row.matches)] for share in (0.5, 0.99))
        row.took_ms = []
        for name in ("master_us", "replicas_us", "busiest_us", "client_us"):
            setattr(row, name, getattr(row, name) / row.matches * 1e6)
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--blocks", type=int, nargs="+", default=[128, 512, 2048], help="of the prefix")
    parser.add_argument("--seconds", type=float, default=4.0, help="of one turn of each way")
    parser.add_argument("--clients", type=int, default=2)
    given = parser.parse_args()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        options = ("--repl-diskless-sync-delay", "0")
        servers = [stack.enter_context(RedisServer(Path(folder) / str(n), *options)) for n in range(3)]
        master, *replicas = servers
        sentinel = stack.enter_context(ScriptedSentinel(master.port))
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/{MASTER}/0"
        for replica in replicas:
            replica.command("REPLICAOF", "127.0.0.1", str(master.port))
        for blocks in given.blocks:
            master.flush()
            with opened(url, WAYS[0], []) as index:
                name = index.register(namespace(), expected_blocks=1 << 20)
                put_all(index, name, chain(blocks), [SEGMENT] * (blocks // SEGMENT))
            until(lambda: all(b"master_link_status:up" in r.command("INFO", "replication") for r in replicas))
            rows += measure(url, [one.port for one in servers], blocks, given.seconds, given.clients)
    print(f"{'blocks':>6} {'asked':<24}{'master us':>10}{'replicas us':>12}{'client us':>10}", end="")
    print(f"{'p50 ms':>8}{'p99 ms':>8}{'possible per s':>16}")
    for row in rows:
        print(f"{row.blocks:>6} {row.what:<24}{row.master_us:>10.1f}{row.replicas_us:>12.1f}", end="")
        print(f"{row.client_us:>10.0f}{row.p50_ms:>8.2f}{row.p99_ms:>8.2f}{1e6 / row.busiest_us:>16.0f}")
    if given.json is not None:
        told = [{key: value for key, value in asdict(row).items() if key != "took_ms"} for row in rows]
        given.json.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
