"""docs/scale.md: every number of its tables follows from what was measured and the formulas beside them."""

from __future__ import annotations

import re
from math import ceil
from pathlib import Path

import pytest

from kvstore.rules.segments import ENTRY_BYTES, SEGMENT_BYTES
from schemas.settings import RedisSettings
from tests.test_docs_numbers import STANDARD, number, rows, written
from trials.benchmarks.bench_scale import LISTED, PART

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "scale.md").read_text(encoding="utf-8")
MEASURED = {row[0]: number(row[1]) for row in rows("request", PAGE)}

#: Requests per second of a replica, how full a core may be, and what S3 takes per second and prefix.
RATE, FULL, GETS, PUTS = 5, 0.5, 5500, 3500
#: Processes of a replica that speak to Redis, and seconds between two looks of each at the layout.
PROCESSES, LOOK_S = 2, 10
#: Shards to a master, so that slots can be moved.
SPREAD = 4
MOST_SHARDS = next(one.le for one in RedisSettings.model_fields["shards"].metadata if hasattr(one, "le"))


def masters(replicas: int) -> int:
    cpu_s = MEASURED["CPU of the masters, us"] / 1e6
    return ceil(replicas * RATE * cpu_s * MEASURED["busiest master to the mean"] / FULL)


def shards(replicas: int) -> int:
    return 1 if masters(replicas) == 1 else min(MOST_SHARDS, SPREAD * masters(replicas))


def test_the_fleets() -> None:
    seen = []
    for replicas, requests, cores, nodes, parts, gbits, gets, puts, prefixes, dollars in rows("fleets", PAGE):
        count = int(number(replicas))
        seen.append(count)
        asked = count * RATE
        assert written(requests, asked)
        assert written(cores, asked * MEASURED["CPU of the masters, us"] / 1e6)
        assert written(nodes, masters(count)) and written(parts, shards(count))
        moved = MEASURED["bytes to the masters"] + MEASURED["bytes from the masters"]
        assert written(gbits, asked * moved * 8 / 1e9)
        assert written(gets, asked * MEASURED["GETs"]) and written(puts, asked * MEASURED["PUTs"])
        busiest = max(asked * MEASURED["GETs"] / GETS, 2 * asked * MEASURED["PUTs"] / PUTS)
        assert written(prefixes, ceil(busiest))
        bill = asked * (MEASURED["GETs"] * STANDARD.get + MEASURED["PUTs"] * STANDARD.put)
        assert written(dollars, bill * 3600)
    assert seen == [100, 1000, 10_000, 100_000]


def test_the_connections() -> None:
    for replicas, connections, looks, accounts in rows("connections", PAGE):
        count = int(number(replicas))
        assert written(connections, count * PROCESSES)
        assert written(looks, count * PROCESSES / LOOK_S)
        assert written(accounts, count * shards(count) / LOOK_S)


def test_a_million_requests() -> None:
    [(gets, puts, dollars)] = rows("million", PAGE)
    assert written(gets, 1e6 * MEASURED["GETs"]) and written(puts, 1e6 * MEASURED["PUTs"])
    assert written(dollars, 1e6 * (MEASURED["GETs"] * STANDARD.get + MEASURED["PUTs"] * STANDARD.put))


def test_memory() -> None:
    for blocks, size, per_block, memory in rows("memory", PAGE):
        each = ENTRY_BYTES + SEGMENT_BYTES / number(size)
        assert written(per_block, each) and written(memory, number(blocks) * each / 1e9)


def test_the_most_shards() -> None:
    [bound] = re.findall(r"`redis\.shards` is at most (\d+)", PAGE)
    assert int(bound) == MOST_SHARDS
    assert shards(1000) < MOST_SHARDS == shards(10_000) < masters(100_000)


def test_a_hundred_million_blocks() -> None:
    """CPU on a line through both sizes that were measured, memory by what is known to grow."""
    found = re.search(r"at ([\d,]+)\s+and ([\d,]+) blocks", PAGE)
    assert found is not None
    small, large = number(found[1]), number(found[2])
    told = list(rows("commands", PAGE))
    for command, *cells in told:
        for one, two, extrapolated in (cells[0:3], cells[3:6]):
            y, y2 = number(one), number(two)
            expected = max(0.0, y + (y2 - y) * (1e8 - small) / (large - small))
            assert number(extrapolated) == pytest.approx(expected, rel=0.02, abs=1), command
        grown = LISTED * 1e8 / 64 * (command != "`status`") + PART * 1e8 / 256 * (command == "`fsck`")
        assert written(cells[8], number(cells[7]) + grown / 2**20), command
    assert [row[0] for row in told] == [
        *("`rebuild --apply`", "`status`", "`fsck`", "`fsck --list`", "`fsck --list --apply`"),
    ]
