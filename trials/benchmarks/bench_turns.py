"""A conversation that grows turn by turn: how many segments it lies in, and what its match and load cost.

    python -m trials.benchmarks.bench_turns [--json FILE] [--turns N] [--tokens N] [--long N] [--matches N]

Each turn brings some tokens; what is new of it is saved when its prompt ends, as by the KV connector, in a
real Redis and a folder: *joined* is with the short segments before it, *apart* without them, and *at once* is
the whole chain in one turn. The time of a match is the server's own account of its script; all places are
asked in turns, so that their ratios mean something where the microseconds don't. A load takes as many GETs as
its match has runs. *written* is in bytes of the blocks, headers included.

A second table has no server: it is the rule alone (connectors.planning.joins_due), by how many blocks a turn
brings, on average: segments beside a chain that is saved at once, and how often a block is written.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import redis

from connectors.planning import joins_due, saves_due, tail_of
from kvstore.build import open_store
from kvstore.format.segment import Slot
from kvstore.index.port import Run
from kvstore.keys import SegmentId, block_key, digests
from kvstore.store.space import Space
from kvstore.store.store import Store
from schemas.namespace import GroupSpec, Namespace
from schemas.records import PartRecord, SegmentRecord
from tests.servers.redis import RedisServer
from tests.store.growing import grow

BLOCK, SEGMENT = 16, 64
SHAPE = (2, 1, BLOCK, 64)
GROUP = GroupSpec(kind="full", block_tokens=BLOCK, dtype="BF16", shape=SHAPE)
ROUNDS = 10


@dataclass
class Row:
    """One line of the table: a conversation at its end, and what it took to get there."""

    what: str
    blocks: int
    segments: int
    gets_per_turn: float
    written: float
    match_us: float = 0.0
    ratio: float = 0.0


@dataclass(frozen=True)
class Rule:
    """One line of the second table."""

    blocks_a_turn: float
    segments: float
    written: float


def chain(tokens: int, seed: str) -> list[bytes]:
    hashes, parent = [], seed.encode()
    for _ in range(tokens // BLOCK):
        parent = hashlib.sha256(parent).digest()
        hashes.append(parent)
    return hashes


def made(hashes: Sequence[bytes]) -> list[Slot]:
    data = memoryview(bytes(GROUP.slot_bytes))
    return [Slot(block_key(one), data, "BF16", SHAPE) for one in hashes]


def opened(store: Store, name: str) -> Space:
    namespace = Namespace(
        kind="kv", model=name, weights="w", dtype="bfloat16", block_tokens=BLOCK, hash_algo="sha256",
        groups=(GROUP,),
    )  # fmt: skip
    return store.open(namespace, block_bytes=GROUP.slot_bytes)


def converse(store: Store, space: Space, what: str, turns: Iterable[int], *, joining: bool) -> Row:
    """Saves a chain that has so many blocks after each turn."""
    hashes = chain(max(turns := list(turns)) * BLOCK, "conversation")
    before, gets, stored = store.counters.snapshot().get("save_bytes", 0), 0, 0
    for blocks in turns:
        found = space.match(digests(hashes[:blocks]))
        assert found.blocks == stored, found
        gets += len(found.runs)
        grow(space, hashes[:blocks], made, SEGMENT, found=found, joining=joining)
        stored = blocks
    runs = space.match(digests(hashes)).runs
    nbytes = store.counters.snapshot()["save_bytes"] - before
    return Row(what, stored, len(runs), gets / len(turns), nbytes / (stored * GROUP.slot_bytes))


def measure(server: RedisServer, places: Sequence[tuple[Row, Space]], matches: int) -> None:
    """Fills in what a match costs the server, and its ratio to the last place's."""
    raw = redis.Redis(port=server.port, protocol=2)
    spent = [0.0] * len(places)
    for _ in range(ROUNDS):
        for number, (row, space) in enumerate(places):
            packed = digests(chain(row.blocks * BLOCK, "conversation"))
            raw.config_resetstat()
            for _ in range(matches // ROUNDS):
                space.match(packed)
            spent[number] += raw.info("commandstats")["cmdstat_evalsha"]["usec"]
    raw.close()
    for (row, _), usec in zip(places, spent, strict=True):
        row.match_us = usec / (matches // ROUNDS * ROUNDS)
        row.ratio = row.match_us / (spent[-1] / (matches // ROUNDS * ROUNDS))


def by_rule(blocks_a_turn: float, total: int = 8192) -> Rule:
    """Grows a chain by turns that differ, without a store."""
    source, runs, blocks, written, left = random.Random(1), list[Run](), 0, 0, 0.0
    while blocks < total:
        left += blocks_a_turn * source.uniform(0.3, 1.7)
        new, left = int(left), left % 1
        olds = joins_due(new, tail_of(runs, blocks, SEGMENT), SEGMENT)
        due, blocks = saves_due(olds[0].start if olds else blocks, blocks + new, SEGMENT, final=True)
        runs = runs[: len(runs) - len(olds)] + [run_of(one) for one in due]
        written += sum(map(len, due))
    return Rule(blocks_a_turn, len(runs) / -(-blocks // SEGMENT), written / blocks)


def run_of(blocks: range) -> Run:
    record = SegmentRecord((PartRecord(4096, (1,) * len(blocks)),), len(blocks), "none", 0)
    return Run(blocks.start, SegmentId(blocks.start.to_bytes(8, "big")), 0, len(blocks), record)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the numbers here as well; - for stdout only")
    parser.add_argument("--turns", type=int, default=200, help="turns of the short conversation")
    parser.add_argument("--tokens", type=int, default=50, help="tokens that a turn brings")
    parser.add_argument("--long", type=int, default=131_072, help="tokens of the long conversation")
    parser.add_argument("--matches", type=int, default=200, help="matches of each place")
    args = parser.parse_args(argv)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder) / "redis") as server:
        settings = {"index": server.url, "payloads": f"file://{folder}/p", "redis": {"timeout_s": 30.0}}
        with open_store(settings) as store:
            for tokens in (args.turns * args.tokens, args.long):
                ends = [end // BLOCK for end in range(args.tokens, tokens + 1, args.tokens)]
                if tokens // BLOCK > ends[-1]:
                    ends.append(tokens // BLOCK)
                places = []
                for what, turns, joining in (
                    ("apart", ends, False),
                    ("joined", ends, True),
                    ("at once", ends[-1:], True),
                ):
                    space = opened(store, f"{what} {tokens}")
                    row = converse(store, space, f"{tokens} tokens, {what}", turns, joining=joining)
                    places.append((row, space))
                measure(server, places, args.matches)
                rows += [row for row, _ in places]
    rules = [by_rule(each) for each in (1, 2, 3.125, 5, 8, 13, 20, 30, 40, 50, 62, 100)]
    if args.json != "-":
        show(rows, rules)
    if args.json:
        text = json.dumps({"rows": [asdict(r) for r in rows], "rule": [asdict(r) for r in rules]}, indent=2)
        if args.json == "-":
            print(text)
        else:
            Path(args.json).write_text(text + "\n")
    return 0


def show(rows: Sequence[Row], rules: Sequence[Rule]) -> None:
    print(
        f"{'conversation':<26}{'blocks':>8}{'segments':>10}{'GETs a turn':>13}{'written':>9}"
        f"{'match, us':>11}{'ratio':>7}"
    )
    for one in rows:
        print(
            f"{one.what:<26}{one.blocks:>8}{one.segments:>10}{one.gets_per_turn:>13.1f}{one.written:>9.2f}"
            f"{one.match_us:>11.1f}{one.ratio:>7.2f}"
        )
    print(f"{'blocks a turn':<26}{'segments':>10}{'written':>9}")
    for rule in rules:
        print(f"{rule.blocks_a_turn:<26}{rule.segments:>10.2f}{rule.written:>9.2f}")


if __name__ == "__main__":
    sys.exit(main())
