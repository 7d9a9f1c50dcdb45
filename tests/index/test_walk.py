"""The walk against an oracle that looks at every block: never a wrong one, never fewer than promised."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvstore.index.port import Run
from kvstore.index.walk import EXPECTED_SLOTS, walk
from kvstore.keys import SegmentId
from schemas.records import SegmentRecord
from tests.index.contract.chains import record

#: A block's identity stands for everything before it, as a chained hash does.
Block = tuple[int, int]


@dataclass
class World:
    """An index in two dictionaries, and what its segments truly hold."""

    entries: dict[Block, tuple[SegmentId, int]] = field(default_factory=dict)
    contents: dict[SegmentId, Sequence[Block]] = field(default_factory=dict)
    records: dict[SegmentId, SegmentRecord] = field(default_factory=dict)

    def commit(self, blocks: Sequence[Block]) -> SegmentId:
        segment = SegmentId(len(self.contents).to_bytes(8, "big"))
        self.contents[segment] = blocks
        self.records[segment] = record(len(blocks))
        self.entries |= {block: (segment, slot) for slot, block in enumerate(blocks)}
        return segment

    def present(self, block: Block) -> bool:
        entry = self.entries.get(block)
        return entry is not None and entry[0] in self.records

    def check(self, chain: Sequence[Block], expected: int = EXPECTED_SLOTS) -> tuple[list[Run], int]:
        """Walk the chain, hold the answer against the promise; returns it and the number of look-ups."""
        asked: list[int] = []

        def lookup(position: int) -> tuple[SegmentId, int] | None:
            asked.append(position)
            return self.entries.get(chain[position])

        runs = walk(len(chain), lookup, self.records.get, expected=expected)
        position = 0
        for before, run in zip([None, *runs], runs, strict=False):
            assert run.start == position
            assert run.count > 0
            assert run.record is self.records[run.segment]
            held = self.contents[run.segment][run.slot : run.slot + run.count]
            assert list(held) == list(chain[position : position + run.count])
            if before and before.segment == run.segment:
                assert before.slot + before.count != run.slot, "adjacent slots are one run"
            position += run.count
        strict = next((i for i, block in enumerate(chain) if not self.present(block)), len(chain))
        assert position >= strict
        assert len(set(asked)) == len(asked)
        assert all(0 <= position < len(chain) for position in asked)
        return runs, len(asked)


def trunk(blocks: int, name: int = 0) -> list[Block]:
    return [(name, i) for i in range(blocks)]


@st.composite
def worlds(draw: st.DrawFn) -> tuple[World, list[list[Block]]]:
    """Chains that share prefixes, stored in overlapping pieces, some of them evicted, some entries lost."""
    chains = [trunk(draw(st.integers(1, 160)))]
    for name in range(1, draw(st.integers(1, 4))):
        parent = draw(st.sampled_from(chains))
        common = draw(st.integers(0, len(parent)))
        fresh = [(name, i) for i in range(common, common + draw(st.integers(0, 100)))]
        chains.append(parent[:common] + fresh)
    world = World()
    for chain in draw(st.lists(st.sampled_from(chains), max_size=14)):
        if not chain:
            continue
        first = draw(st.integers(0, len(chain) - 1))
        world.commit(chain[first : first + draw(st.sampled_from([1, 2, 3, 5, 8, 21, 64, 100]))])
    for segment in draw(st.sets(st.sampled_from(list(world.records)), max_size=4)) if world.records else ():
        del world.records[segment]
    for block in draw(st.sets(st.sampled_from(list(world.entries)), max_size=4)) if world.entries else ():
        del world.entries[block]
    return world, chains


@settings(max_examples=600)
@given(worlds(), st.sampled_from([1, 2, 7, 64, 1000]))
def test_any_world(made: tuple[World, list[list[Block]]], expected: int) -> None:
    world, chains = made
    for chain in chains:
        world.check(chain, expected)


@settings(max_examples=300)
@given(st.lists(st.integers(1, 130), min_size=1, max_size=30), st.data())
def test_a_chain_in_adjacent_segments_is_served_whole(sizes: list[int], data: st.DataObject) -> None:
    chain, world = trunk(sum(sizes)), World()
    first = 0
    segments = []
    for size in sizes:
        segments.append(world.commit(chain[first : first + size]))
        first += size
    runs, looked = world.check(chain)
    assert [(run.segment, run.slot, run.count) for run in runs] == [
        (segment, 0, size) for segment, size in zip(segments, sizes, strict=True)
    ]
    # At most two looks per segment, one where an expected end falls inside it and one for the rest, and
    # one per EXPECTED_SLOTS in longer ones. Usually, with segments of one size, it is one each.
    assert looked <= 2 * len(sizes) + first // EXPECTED_SLOTS
    asked = data.draw(st.integers(0, first))
    runs, _ = world.check(chain[:asked])
    assert sum(run.count for run in runs) == asked


@settings(max_examples=300)
@given(st.integers(0, 400), st.integers(1, 100), st.integers(1, 300))
@example(0, 64, 1)
@example(64, 64, 64)
def test_a_chain_that_diverges_is_served_up_to_there(stored: int, size: int, rest: int) -> None:
    common, world = trunk(stored), World()
    whole = common + trunk(64, name=1)
    for first in range(0, len(whole), size):
        world.commit(whole[first : first + size])
    runs, looked = world.check(common + trunk(rest, name=2))
    assert sum(run.count for run in runs) == stored
    # Beyond the segments: the miss, the first block, and a bisection of what a segment may hold.
    assert looked <= -(-stored // size) + stored // EXPECTED_SLOTS + 12


@pytest.mark.parametrize(
    ("sizes", "asked", "looks"),
    [
        pytest.param([64] * 128, 8192, 128, id="full segments, all present"),
        pytest.param([64] * 128, 16384, 130, id="full segments, as much again missing"),
        pytest.param([], 8192, 2, id="nothing stored"),
        pytest.param([64, 64, 13, 64, 64], 269, 6, id="a stub in the middle"),
        pytest.param([1000], 1000, 5, id="one large segment, found by doubling"),
        pytest.param([1] * 100, 100, 100, id="single blocks"),
    ],
)
def test_the_number_of_looks(sizes: list[int], asked: int, looks: int) -> None:
    chain, world, first = trunk(asked), World(), 0
    for size in sizes:
        world.commit(chain[first : first + size])
        first += size
    runs, looked = world.check(chain)
    assert sum(run.count for run in runs) == min(first, asked)
    assert looked == looks


def test_a_living_copy_serves_blocks_whose_own_entries_are_dead() -> None:
    chain, world = trunk(10), World()
    old = world.commit(chain)
    new = world.commit(chain[:9])
    del world.records[new]
    # Only block 9 is present by itself, but its entry proves that `old` holds the other nine.
    runs, looked = world.check(chain)
    assert [(run.start, run.segment, run.slot, run.count) for run in runs] == [(0, old, 0, 10)]
    assert looked == 1


def test_a_repeated_block_is_no_run() -> None:
    """Digests that are no chain get slots that their entries name, at least."""
    place = (SegmentId(bytes(8)), 0)
    runs = walk(3, lambda position: place, lambda segment: record(4), expected=1)
    assert [(run.start, run.slot, run.count) for run in runs] == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]


def test_digests_that_are_no_chain_end_the_walk_all_the_same() -> None:
    lie = random.Random(5)
    entries = {i: (SegmentId(bytes(8)), lie.randrange(1000)) for i in range(500)}
    runs = walk(500, entries.get, lambda segment: record(1000))
    assert sum(run.count for run in runs) == 500
    assert all(run.slot >= 0 for run in runs)
