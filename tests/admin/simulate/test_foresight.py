"""What could be served by those who know more: the optimum, and a store that is told of ends of sessions."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.progress import Silent
from kvstore.admin.simulate import store
from kvstore.admin.simulate.optimum import optimum
from kvstore.admin.simulate.replay import endless, lru
from kvstore.admin.simulate.sessions import NONE, ends, sessions
from kvstore.admin.simulate.simulate import Setup, simulate
from kvstore.admin.simulate.store import Rules, StoreReplay
from kvstore.admin.simulate.traces import Assumed, Trace
from tests.admin.simulate import workloads
from tests.admin.simulate.test_simulate import SETTINGS, mooncake, random_trace, read

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
        assert tally.evicted_bytes <= tally.stored_bytes <= endless(trace).stored_bytes + tally.evicted_bytes
    assert found[0].hit_blocks == found[0].stored_bytes == 0
    assert found[-1].hit_blocks == endless(trace).hit_blocks > 50
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
    most = optimum(trace, capacities)
    assert most[1].hit_blocks > 1.2 * lru(trace, capacities)[1].hit_blocks
    for capacity, best, blind in zip(capacities, most, lru(trace, capacities), strict=True):
        replay = StoreReplay(trace, Rules([1], lambda slots: 0), capacity)
        owners = sessions(trace)
        told = StoreReplay(trace, Rules([1], lambda slots: 0), capacity).run(
            None, owners, ends(trace, owners)
        )
        for other in (blind, replay.run(), told):
            assert other.hit_blocks <= best.hit_blocks


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


def plain_told(trace: Trace, capacity: int) -> int:
    """Blocks of equal size, each by itself, in a list that is sorted whenever something has to go."""
    owners = sessions(trace)
    held: dict[int, dict[str, Any]] = {}
    hits = made = 0
    for number, request in enumerate(trace.requests):
        session, leading = owners[number], True
        used, saved = request.at_s // 15, request.at_s // 15 - 2
        for depth, block in enumerate(request.chain):
            leading = leading and block in held
            if leading:
                hits += 1
                held[block]["users"] |= {session}
                held[block]["used"] = max(held[block]["used"], used)
                continue
            held[block] = {"used": saved, "depth": depth, "made": made, "users": {session}}
            made += 1
            while 10 * len(held) > capacity:
                held.pop(min(held, key=lambda at: (held[at]["used"], -held[at]["depth"], held[at]["made"])))
        if session not in owners[number + 1 :]:
            for one in held.values():
                if one["users"] == {session}:
                    one["used"] = -1
    return hits


@pytest.mark.parametrize("seed", [8, 9])
def test_what_only_an_ended_session_used_goes_first(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "watermarks", lambda capacity: (capacity, capacity))
    path = tmp_path / "chats.jsonl"
    workloads.write(path, workloads.requests(seed, 250))
    trace = read(tmp_path, path.read_text(), Assumed(10, 16))
    better = 0
    for capacity in (300, 1000, 3000, 8000):
        rules, owners = Rules([1], lambda slots: 0), sessions(trace)
        found = StoreReplay(trace, rules, capacity).run(None, owners, ends(trace, owners)).hit_blocks
        assert found == plain_told(trace, capacity)
        better += found - StoreReplay(trace, rules, capacity).run().hit_blocks
    assert better > 300


def test_ends_are_worth_something_in_the_report(tmp_path: Path) -> None:
    path = tmp_path / "chats.jsonl"
    workloads.write(path, workloads.requests(9, 400))
    setup = Setup(SETTINGS, ["kvstore", "told-ends", "optimum"], [100 << 20, 300 << 20], segment_blocks=(1,))
    blind, told, best = simulate([path], Assumed(1 << 20, 16), setup, Silent()).curves
    assert (told.policy, told.segment_blocks, best.segment_blocks) == ("told-ends", 1, None)
    for at in range(2):
        assert blind.points[at].hit_ratio + 0.01 < told.points[at].hit_ratio < best.points[at].hit_ratio
