"""What a namespace in shards is worth: matches against one Redis, beside those against three masters.

    python -m trials.benchmarks.bench_shards [--json FILE] [--shards N ...] [--seconds S] [--clients N]

The same clients, processes of their own, ask each place in turns for the same chains. Where there are fewer
cores than servers and clients, matches per second say little, and the measure is what a server's thread has
to do: CPU seconds of the busiest master per match of all clients, from Redis's own INFO. Its inverse is how
many matches per second the place can answer when each master has a core of its own.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

import redis

from kvstore.index.redis.index import RedisIndex
from kvstore.index.sharding.index import ShardedIndex
from tests.index.contract.chains import chain, namespace, put_all, served
from tests.index.redis.cluster import RedisClusterServers
from tests.servers.redis import PATIENT, RedisServer

CHAINS = 480
SEGMENT = 64
TURNS = 3


@dataclass(frozen=True)
class Place:
    """Where a namespace lies."""

    what: str
    url: str
    ports: tuple[int, ...]
    shards: int


@dataclass
class Row:
    """One line of the table; CPU in microseconds per match."""

    what: str
    matches: int = 0
    seconds: float = 0.0
    cpu_us: float = 0.0
    busiest_cpu_us: float = 0.0

    @property
    def possible(self) -> float:
        """Matches per second at which the busiest master's core is full."""
        return 1e6 / self.busiest_cpu_us


def opened(place: Place) -> ShardedIndex:
    return ShardedIndex(RedisIndex.from_settings(place.url, PATIENT), shards=place.shards)


@cache
def asked_for(blocks: int) -> list[bytes]:
    return [chain(blocks, seed=str(number)) for number in range(CHAINS)]


def fill(place: Place, blocks: int) -> None:
    with opened(place) as index:
        name = index.register(namespace(), expected_blocks=CHAINS * blocks)
        for digests in asked_for(blocks):
            put_all(index, name, digests, [SEGMENT] * (blocks // SEGMENT))


def ask(place: Place, blocks: int, seconds: float, seed: int) -> int:
    """Matches for some seconds; returns how often. Runs in a process of its own."""
    order, chains, done = random.Random(seed), asked_for(blocks), 0
    with opened(place) as index:
        name = index.register(namespace(), expected_blocks=CHAINS * blocks)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            assert served(index.match(name, order.choice(chains))) == blocks
            done += 1
    return done


def cpu(ports: Sequence[int]) -> list[float]:
    """Returns the CPU seconds that each server has used."""
    used = []
    for port in ports:
        with redis.Redis(port=port, protocol=2) as client:
            told = client.info("cpu")
            used.append(told["used_cpu_user"] + told["used_cpu_sys"])
    return used


def measure(places: Sequence[Place], blocks: int, seconds: float, clients: int) -> list[Row]:
    rows = {place.what: Row(place.what) for place in places}
    used = {place.what: [0.0] * len(place.ports) for place in places}
    with multiprocessing.get_context("spawn").Pool(clients) as pool:
        for turn in range(TURNS):
            for place in places:
                before, began = cpu(place.ports), time.monotonic()
                jobs = [(place, blocks, seconds, clients * turn + number) for number in range(clients)]
                row = rows[place.what]
                row.matches += sum(pool.starmap(ask, jobs, chunksize=1))
                row.seconds += time.monotonic() - began
                spent = [b - a for a, b in zip(before, cpu(place.ports), strict=True)]
                used[place.what] = [a + b for a, b in zip(used[place.what], spent, strict=True)]
    for what, row in rows.items():
        row.cpu_us = sum(used[what]) / row.matches * 1e6
        row.busiest_cpu_us = max(used[what]) / row.matches * 1e6
    return list(rows.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--shards", type=int, nargs="+", default=[8, 24])
    parser.add_argument("--seconds", type=float, default=5.0, help="of one turn of each place")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--blocks", type=int, default=512)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        clusters = [RedisClusterServers(Path(folder) / f"cluster {shards}") for shards in given.shards]
        with RedisServer(Path(folder) / "single") as single:
            places = [Place("one Redis", single.url, (single.port,), 1)]
            try:
                for shards, cluster in zip(given.shards, clusters, strict=True):
                    cluster.__enter__()
                    what = f"three masters, {shards} shards"
                    places.append(Place(what, cluster.urls[0], tuple(cluster.ports), shards))
                for place in places:
                    fill(place, given.blocks)
                rows = measure(places, given.blocks, given.seconds, given.clients)
            finally:
                for cluster in clusters:
                    cluster.stop()
    print(f"{'matches of ' + str(given.blocks) + ' blocks':<28}{'per s':>8}{'CPU us':>9}", end="")
    print(f"{'busiest us':>12}{'possible per s':>16}{'ratio':>7}")
    for row in rows:
        ratio = row.possible / rows[0].possible
        print(f"{row.what:<28}{row.matches / row.seconds:>8.0f}{row.cpu_us:>9.1f}", end="")
        print(f"{row.busiest_cpu_us:>12.1f}{row.possible:>16.0f}{ratio:>7.2f}")
    if given.json is not None:
        given.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
