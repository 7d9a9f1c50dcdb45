"""The walk against an oracle that looks at every block: never a wrong one, never fewer than promised."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvstore.index.maintenance import Entry
from kvstore.index.port import Run
from kvstore.index.scripted.index import ScriptedIndex
from kvstore.index.sqlite.file import IndexMemory
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.keys import Digest, SegmentId
from tests.index.contract.chains import CREATED_S, EXPECTED_BLOCKS, namespace, put

#: A block's identity stands for everything before it, as a chained hash does.
Block = tuple[int, int]
#: The blocks that the walk expects in a segment before it has seen one.
EXPECTED_SLOTS = 64

_NUMBERS = count()
#: The chain of a segment that no test asks for.
_NOBODYS = 99
_MEMORY = "test_walk"


def packed(blocks: Iterable[Block]) -> bytes:
    return b"".join(hashlib.sha256(repr(block).encode()).digest()[:16] for block in blocks)


class World:
    """A namespace of its own, and what its segments truly hold."""

    def __init__(self, index: ScriptedIndex) -> None:
        self.index = index
        self.name = index.register(namespace(f"world {next(_NUMBERS)}"), expected_blocks=EXPECTED_BLOCKS)
        self.entries: dict[Block, tuple[SegmentId, int]] = {}
        self.contents: dict[SegmentId, Sequence[Block]] = {}
        self.visible: set[SegmentId] = set()
        # A hash that is not there is not looked into.
        put(index, self.name, packed(trunk(1, name=_NOBODYS)), segment=SegmentId(b"\xff" * 8))

    def commit(self, blocks: Sequence[Block]) -> SegmentId:
        segment = SegmentId(len(self.contents).to_bytes(8, "big"))
        put(self.index, self.name, packed(blocks), segment=segment)
        self.contents[segment] = blocks
        self.visible.add(segment)
        self.entries |= {block: (segment, slot) for slot, block in enumerate(blocks)}
        return segment

    def evict(self, segment: SegmentId) -> None:
        self.visible.discard(segment)
        self.index.evict(self.name, [segment], delete_after_s=CREATED_S, rule="admin")

    def lose(self, block: Block) -> None:
        segment, slot = self.entries.pop(block)
        self.index.unlink(self.name, [Entry(Digest(packed([block])), segment, slot)])

    def present(self, block: Block) -> bool:
        entry = self.entries.get(block)
        return entry is not None and entry[0] in self.visible

    def check(self, chain: Sequence[Block]) -> tuple[list[Run], int]:
        """Match the chain, hold the answer against the promise; returns it and the number of look-ups."""
        runs, looked = self.match(chain)
        looked -= self.match([])[1]
        position = 0
        for before, run in zip([None, *runs], runs, strict=False):
            assert run.start == position
            assert run.count > 0 and run.segment in self.visible
            held = self.contents[run.segment][run.slot : run.slot + run.count]
            assert list(held) == list(chain[position : position + run.count])
            if before and before.segment == run.segment:
                assert before.slot + before.count != run.slot, "adjacent slots are one run"
            position += run.count
        strict = next((i for i, block in enumerate(chain) if not self.present(block)), len(chain))
        assert position >= strict
        return runs, looked

    def match(self, chain: Sequence[Block]) -> tuple[list[Run], int]:
        """Returns the answer, and how many fields of hashes it asked SQLite for one by one."""
        asked: list[str] = []
        with IndexMemory.named(_MEMORY).reading("trace") as connection:
            connection.set_trace_callback(asked.append)
        try:
            runs = self.index.match(self.name, packed(chain))
        finally:
            connection.set_trace_callback(None)
        return runs, sum("SELECT value FROM fields" in one for one in asked)


@pytest.fixture(scope="module")
def index() -> Iterator[SqliteIndex]:
    with SqliteIndex.in_memory(_MEMORY) as index:
        yield index


def trunk(blocks: int, name: int = 0) -> list[Block]:
    return [(name, i) for i in range(blocks)]


Story = tuple[list[list[Block]], list[list[Block]], list[int], list[int]]


@st.composite
def stories(draw: st.DrawFn) -> Story:
    """Chains that share prefixes; the overlapping pieces in which they are stored; which of them are evicted;
    and which entries are lost, by number."""
    chains = [trunk(draw(st.integers(1, 160)))]
    for name in range(1, draw(st.integers(1, 4))):
        parent = draw(st.sampled_from(chains))
        common = draw(st.integers(0, len(parent)))
        fresh = [(name, i) for i in range(common, common + draw(st.integers(0, 100)))]
        chains.append(parent[:common] + fresh)
    pieces = []
    for chain in draw(st.lists(st.sampled_from([one for one in chains if one]), max_size=14)):
        first = draw(st.integers(0, len(chain) - 1))
        pieces.append(chain[first : first + draw(st.sampled_from([1, 2, 3, 5, 8, 21, 64, 100]))])
    numbers = st.lists(st.integers(0, 1 << 16), max_size=4)
    return chains, pieces, draw(numbers), draw(numbers)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(story=stories())
def test_any_world(index: SqliteIndex, story: Story) -> None:
    keep_the_promise(index, story)


def keep_the_promise(index: ScriptedIndex, story: Story) -> None:
    """Stores the story's pieces, takes away from them, and matches its chains."""
    chains, pieces, evicted, lost = story
    world = World(index)
    for piece in pieces:
        world.commit(piece)
    for number in evicted:
        if world.visible:
            world.evict(sorted(world.visible)[number % len(world.visible)])
    for number in lost:
        if world.entries:
            world.lose(sorted(world.entries)[number % len(world.entries)])
    for chain in chains:
        world.check(chain)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(1, 130), min_size=1, max_size=30), asked=st.integers(0, 4000))
def test_a_chain_in_adjacent_segments_is_served_whole(
    index: SqliteIndex, sizes: list[int], asked: int
) -> None:
    chain, world = trunk(sum(sizes)), World(index)
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
    runs, _ = world.check(chain[:asked])
    assert sum(run.count for run in runs) == min(asked, first)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stored=st.integers(0, 400), size=st.integers(1, 100), rest=st.integers(1, 300))
@example(stored=0, size=64, rest=1)
@example(stored=64, size=64, rest=64)
def test_a_chain_that_diverges_is_served_up_to_there(
    index: SqliteIndex, stored: int, size: int, rest: int
) -> None:
    common, world = trunk(stored), World(index)
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
def test_the_number_of_looks(index: SqliteIndex, sizes: list[int], asked: int, looks: int) -> None:
    chain, world, first = trunk(asked), World(index), 0
    for size in sizes:
        world.commit(chain[first : first + size])
        first += size
    runs, looked = world.check(chain)
    assert sum(run.count for run in runs) == min(first, asked)
    assert looked == looks


def test_a_living_copy_serves_blocks_whose_own_entries_are_dead(index: SqliteIndex) -> None:
    chain, world = trunk(10), World(index)
    old = world.commit(chain)
    world.evict(world.commit(chain[:9]))
    # Only block 9 is present by itself, but its entry proves that `old` holds the other nine.
    runs, looked = world.check(chain)
    assert [(run.start, run.segment, run.slot, run.count) for run in runs] == [(0, old, 0, 10)]
    assert looked == 1


def test_a_repeated_block_is_no_run(index: SqliteIndex) -> None:
    """Digests that are no chain get slots that their entries name, at least."""
    world = World(index)
    world.commit(trunk(4))
    runs = index.match(world.name, packed(trunk(1) * 3))
    assert [(run.start, run.slot, run.count) for run in runs] == [(0, 0, 1), (1, 0, 1), (2, 0, 1)]


def test_digests_that_are_no_chain_end_the_walk_all_the_same(index: SqliteIndex) -> None:
    world, lie = World(index), random.Random(5)
    world.commit(trunk(1000))
    runs = index.match(world.name, packed((0, lie.randrange(1000)) for _ in range(500)))
    assert sum(run.count for run in runs) == 500
    assert all(run.slot >= 0 for run in runs)
