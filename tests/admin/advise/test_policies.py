"""Policies on single blocks, some of which know the future, and a store that is told of ends of sessions."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.advise.optimum import optimum
from kvstore.admin.advise.replay import ReplayTotals, by_block
from kvstore.admin.advise.sessions import NONE, ends, sessions
from kvstore.admin.advise.store import Rules, StoreReplay
from kvstore.admin.advise.traces import Trace
from tests.admin.advise.test_traces import mooncake, random_trace, read


def test_a_block_goes_by_its_last_use_or_by_when_it_was_stored(tmp_path: Path) -> None:
    trace = read(tmp_path, mooncake([1, 2], [3], [1, 2], [4], [3]))
    assert by_block(trace, 30, by_use=True) == ReplayTotals(2, 1024, 50, 2, 20), "3 goes, and then the tail"
    assert by_block(trace, 30, by_use=False) == ReplayTotals(3, 1536, 40, 1, 10), "the oldest tail goes"
    # More than a request may be too much.
    assert by_block(trace, 10, by_use=True) == ReplayTotals(0, 0, 70, 6, 60)


# ---- the optimum


def plain_belady(trace: Trace, capacity: int) -> tuple[int, int, int]:
    """Block by block: after each request what is used again soonest is kept, heads before tails."""
    weights = trace.weights().tolist()
    held: set[int] = set()
    hits = stored = evictions = 0
    for number, request in enumerate(trace.requests):
        uses: dict[int, int] = {}
        for later in range(len(trace.requests) - 1, number, -1):
            uses |= dict.fromkeys(trace.requests[later].chain, later)
        depth = {block: at for one in trace.requests for at, block in enumerate(one.chain)}
        leading = True
        for block in request.chain:
            leading = leading and block in held
            hits += leading
        before = set(held)
        held = {block for block in held | set(request.chain) if block in uses}
        wanted = sorted(held, key=lambda block: (uses[block], depth[block]))
        while sum(weights[block] for block in held) > capacity:
            gone = wanted.pop()
            held.discard(gone)
            evictions += gone in before
        stored += sum(weights[block] for block in held - before)
    return hits, stored, evictions


@pytest.mark.parametrize(("seed", "spaces"), [(1, 1), (2, 1), (3, 2), (4, 2)])
def test_the_optimum_is_beladys_with_bypass(tmp_path: Path, seed: int, spaces: int) -> None:
    trace = random_trace(tmp_path, seed, spaces=spaces)
    trace.requests[:] = trace.requests[:120]
    trace.references = sum(len(request.chain) for request in trace.requests)
    capacities = [0, 5, 10, 25, 60, 111, 300, trace.distinct_bytes]
    found = optimum(trace, capacities)
    for capacity, tally in zip(capacities, found, strict=True):
        assert (tally.hit_blocks, tally.stored_bytes, tally.evictions) == plain_belady(trace, capacity), (
            capacity
        )
        assert tally.hit_tokens == 16 * tally.hit_blocks
        assert tally.evicted_bytes <= tally.stored_bytes <= trace.distinct_bytes + tally.evicted_bytes
    assert found[0].hit_blocks == found[0].stored_bytes == 0
    assert found[-1].hit_blocks == by_block(trace, 1 << 30, by_use=True).hit_blocks > 50
    assert found[-1].evictions == 0


@pytest.mark.parametrize("seed", range(25))
def test_no_choice_serves_more_than_the_optimum(tmp_path: Path, seed: int) -> None:
    """Every way to keep some of what there is, after each of nine requests for up to four blocks."""
    draw = random.Random(seed)
    chains = [[draw.randrange(2) for _ in range(draw.randrange(1, 5))] for _ in range(9)]
    trace = read(tmp_path, mooncake(*chains))

    @cache
    def best(number: int, held: frozenset[int], room: int) -> int:
        if number == len(trace.requests):
            return 0
        chain = trace.requests[number].chain
        hits = next((at for at, block in enumerate(chain) if block not in held), len(chain))
        there = sorted(held | set(chain))
        kept = {
            frozenset(block for at, block in enumerate(there) if bits >> at & 1)
            for bits in range(1 << len(there))
            if bits.bit_count() <= room
        }
        return hits + max(best(number + 1, some, room) for some in kept)

    for room in (1, 2, 3):
        (tally,) = optimum(trace, [10 * room + 9])
        assert tally.hit_blocks == best(0, frozenset(), room)


def test_nothing_is_above_the_optimum(tmp_path: Path) -> None:
    trace = random_trace(tmp_path, 6)
    capacities = [20, 80, 200, 500, 2000]
    owners, rules = sessions(trace), Rules([1], lambda slots: 0)
    for capacity, best in zip(capacities, optimum(trace, capacities), strict=True):
        others = [by_block(trace, capacity, by_use=by_use) for by_use in (True, False)]
        others.append(StoreReplay(trace, rules, capacity).run().totals)
        others.append(StoreReplay(trace, rules, capacity).run(None, owners, ends(trace, owners)).totals)
        assert all(other.hit_blocks <= best.hit_blocks for other in others)


# ---- sessions


def test_sessions_have_the_names_that_the_trace_gives_them(tmp_path: Path) -> None:
    names: list[dict[str, Any]] = [{"session_id": "a"}, {"session_id": 7}, {}, {"session_id": "a"}]
    lines = [
        json.dumps({"timestamp": at, "input_length": 512, "hash_ids": [at], **name}) + "\n"
        for at, name in enumerate(names)
    ]
    trace = read(tmp_path, "".join(lines))
    found = sessions(trace)
    assert found == [found[0], found[1], NONE, found[0]]
    assert len({*found}) == 3
    assert [(one.after, one.session) for one in ends(trace, found)] == [(1, found[1]), (3, found[0])]
    odd_names: tuple[Any, ...] = ([], 1.5)
    odd = [
        json.dumps({"timestamp": 9, "input_length": 512, "hash_ids": [1], "session_id": it}) + "\n"
        for it in odd_names
    ]
    assert read(tmp_path, "".join([*lines, *odd])).skipped == 2


def test_sessions_without_names_go_on_where_all_of_the_last_request_is_repeated(tmp_path: Path) -> None:
    trace = read(tmp_path, mooncake([1, 2], [1, 3], [1, 2, 4], [1, 2, 9], [1, 2, 4, 5, 6], [1, 3]))
    found = sessions(trace)
    # The fourth request begins as the first did, which has gone on in another way already.
    assert found == [0, 1, 0, 2, 0, 1]
    assert [(one.after, one.session) for one in ends(trace, found)] == [(3, 2), (4, 0), (5, 1)]


def test_items_are_no_sessions(tmp_path: Path) -> None:
    trace = random_trace(tmp_path, 1)
    trace.spaces[0] = type(trace.spaces[0])("0" * 16, "ec", 0, 10)
    assert {*sessions(trace)} == {NONE}
    assert not ends(trace, sessions(trace))
