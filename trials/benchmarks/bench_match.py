"""What a prefix match costs, beside the plainest way to ask the same server for as many keys.

    python -m trials.benchmarks.bench_match [--json FILE] [--blocks N] [--repeat N]

Redis: RedisIndex.match against MGET of one string key per block, through the same client library with
the same options, over TCP loopback. SQLite: SqliteIndex.match against one SELECT ... WHERE digest IN
(...) over the same entries. The two of a pair take turns in one run, so their ratio means something
where the milliseconds don't. Segments have 64 blocks; chains rotate, so that the server's caches and
ours are as warm as in a fleet that asks for a dozen documents again and again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import redis

from kvstore.index.redis.index import RedisIndex
from kvstore.index.scripted.values import key, record_of
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.keys import NamespaceId, split_digests
from tests.index.contract.chains import chain, namespace, part_of, put_all, served
from tests.servers.redis import PATIENT, RedisServer

SIZES = (256, 2048, 8192)
SEGMENT = 64
TURN = 36


@dataclass(frozen=True)
class Row:
    """One line of the table: milliseconds, and the ratio of the medians to the bare call's."""

    what: str
    blocks: int
    p50_ms: float
    p99_ms: float
    bare_p50_ms: float | None = None
    ratio: float | None = None


def timed(calls: Sequence[Callable[[int], object]], repeat: int) -> list[list[float]]:
    """Sorted milliseconds of each call. The calls take turns of some dozens, the first two not counted.

    Turns, so that the machine's moods hit all of them; dozens, because a processor whose caches were
    just filled by another kind of call takes half as long again, and would be what is measured.
    """
    taken: list[list[float]] = [[] for _ in calls]
    for turn in range(-(-repeat // TURN)):
        for call, times in zip(calls, taken, strict=True):
            for i in range(TURN + 2):
                began = time.perf_counter()
                call(turn * TURN + i)
                if i >= 2:
                    times.append(1e3 * (time.perf_counter() - began))
    return [sorted(times) for times in taken]


def row(what: str, blocks: int, times: list[float], bare: list[float] | None = None) -> Row:
    p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
    if bare is None:
        return Row(what, blocks, p50, p99)
    bare_p50 = bare[len(bare) // 2]
    return Row(what, blocks, p50, p99, bare_p50, p50 / bare_p50)


def fill(index: RedisIndex | SqliteIndex, blocks: int) -> tuple[NamespaceId, list[bytes]]:
    """Chains of the largest size that together have about `blocks` blocks, stored whole."""
    name = index.register(namespace(), expected_blocks=blocks)
    chains = [chain(SIZES[-1], seed=str(i)) for i in range(max(1, blocks // SIZES[-1]))]
    for digests in chains:
        put_all(index, name, digests, [SEGMENT] * (SIZES[-1] // SEGMENT))
    return name, chains


def bench_redis(folder: Path, blocks: int, repeat: int) -> tuple[list[Row], dict[str, Any]]:
    rows = []
    with RedisServer(folder) as server, RedisIndex.from_settings(server.url, PATIENT) as index:
        bare = redis.Redis(port=server.port, protocol=2)
        before = bare.info("memory")["used_memory"]
        name, chains = fill(index, blocks)
        spent = bare.info("memory")["used_memory"] - before
        memory = {"blocks": index.usage(name).blocks, "bytes_per_block": spent / index.usage(name).blocks}
        for digests in chains:
            bare.mset(dict.fromkeys(split_digests(digests), bytes(10)))
        for size in SIZES:
            asked = [part_of(digests, 0, size) for digests in chains]
            keys = [split_digests(digests) for digests in asked]
            match, mget = timed(
                [
                    lambda i, asked=asked: index.match(name, asked[i % len(asked)]),
                    lambda i, keys=keys: bare.mget(keys[i % len(keys)]),
                ],
                repeat,
            )
            rows.append(row("redis, all present (bare: MGET)", size, match, mget))
        rows += redis_variants(index, name, chains, repeat)
        bare.close()
    return rows, memory


def redis_variants(index: RedisIndex, name: NamespaceId, chains: list[bytes], repeat: int) -> list[Row]:
    """The same without help: records not unpacked before, nothing stored, a chain that leaves halfway."""

    def forgetful(i: int) -> None:
        with mock.patch("kvstore.index.scripted.index.record_of", record_of.__wrapped__):  # type: ignore[attr-defined]
            index.match(name, chains[i % len(chains)])

    strange = chain(SIZES[-1], seed="strange")
    half = SIZES[-1] // 2 + SEGMENT // 2
    branch = chain(SIZES[-1] - half, seed="branch", after=part_of(chains[0], 0, half))
    assert served(index.match(name, branch)) == half
    cold, absent, diverging = timed(
        [forgetful, lambda i: index.match(name, strange), lambda i: index.match(name, branch)], repeat
    )
    return [
        row("redis, all present, no record cached", SIZES[-1], cold),
        row("redis, nothing present", SIZES[-1], absent),
        row("redis, leaves inside a segment halfway", SIZES[-1], diverging),
    ]


def bench_sqlite(folder: Path, blocks: int, repeat: int) -> tuple[list[Row], dict[str, Any]]:
    rows = []
    path = folder / "index.sqlite"
    with SqliteIndex(str(path)) as index:
        name, chains = fill(index, blocks)
        with index._database.reading("bench") as bare:
            ids = {text.decode(): number for number, text in bare.execute("SELECT id, name FROM keys")}
            entries = ids[key(name, "b:0")]
            bare.execute("COMMIT")  # each SELECT below is a transaction of its own, as a match is
            for size in SIZES:
                asked = [part_of(digests, 0, size) for digests in chains]
                keys = [
                    [word for one in split_digests(digests) for word in (entries, one)] for digests in asked
                ]
                places = ",".join(["(?, ?)"] * size)
                query = f"SELECT field, value FROM fields WHERE (key, field) IN (VALUES {places})"
                match, select = timed(
                    [
                        lambda i, asked=asked: index.match(name, asked[i % len(asked)]),
                        lambda i, keys=keys, query=query: bare.execute(query, keys[i % len(keys)]).fetchall(),
                    ],
                    repeat,
                )
                rows.append(row("sqlite, all present (bare: SELECT IN)", size, match, select))
            bare.execute("BEGIN")
        used = index.usage(name).blocks
    return rows, {"blocks": used, "bytes_per_block": path.stat().st_size / used}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the numbers here as well; - for stdout only")
    parser.add_argument("--blocks", type=int, default=100_000, help="blocks stored in each index")
    parser.add_argument("--repeat", type=int, default=500, help="matches of each size")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        redis_rows, redis_memory = bench_redis(Path(folder) / "redis", args.blocks, args.repeat)
        sqlite_rows, sqlite_memory = bench_sqlite(Path(folder), args.blocks, args.repeat)
    rows = redis_rows + sqlite_rows
    if args.json != "-":
        show(rows, redis_memory, sqlite_memory)
    if args.json:
        found = {"rows": [asdict(one) for one in rows], "redis": redis_memory, "sqlite": sqlite_memory}
        text = json.dumps(found, indent=2)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n")
    return 0


def show(rows: list[Row], redis_memory: dict[str, Any], sqlite_memory: dict[str, Any]) -> None:
    print(f"{'match':<42}{'blocks':>7}{'p50 ms':>9}{'p99 ms':>9}{'bare p50':>10}{'ratio':>7}")
    for one in rows:
        bare = f"{one.bare_p50_ms:10.3f}{one.ratio:7.2f}" if one.bare_p50_ms is not None else ""
        print(f"{one.what:<42}{one.blocks:>7}{one.p50_ms:9.3f}{one.p99_ms:9.3f}{bare}")
    for what, memory in (("redis", redis_memory), ("sqlite, on disk", sqlite_memory)):
        print(f"{what}: {memory['bytes_per_block']:.1f} bytes per block at {memory['blocks']} blocks")


if __name__ == "__main__":
    sys.exit(main())
