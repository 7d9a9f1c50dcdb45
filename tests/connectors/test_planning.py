"""Planning against brute force: blocks as sets, one at a time."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from connectors.planning import (
    EVERY_BLOCK,
    admitted_blocks,
    external_tokens,
    gaps,
    joins_due,
    joins_of,
    piece_blocks,
    ranges,
    savable_tokens,
    saves_due,
    slice_runs,
    split_run,
    tail_of,
)
from kvstore.index.port import Run
from kvstore.keys import SaltId, SegmentId
from schemas.records import PartRecord, SegmentRecord

RECORD = SegmentRecord((PartRecord(4096, (10,) * 64),), 64, "none", 0)


def runs_of(counts: list[tuple[int, int]]) -> list[Run]:
    """Runs that follow each other, from (slot, count) pairs."""
    runs, start = [], 0
    for number, (slot, count) in enumerate(counts):
        runs.append(Run(start, SegmentId(bytes([number]) * 8), slot, count, RECORD))
        start += count
    return runs


def places(runs: list[Run]) -> dict[int, tuple[bytes, int]]:
    """Block -> (segment, slot)."""
    return {run.start + i: (run.segment, run.slot + i) for run in runs for i in range(run.count)}


COUNTS = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 20)), max_size=8)


@given(COUNTS, st.integers(0, 100), st.integers(0, 100))
def test_slicing_keeps_exactly_the_wanted_blocks_in_their_places(
    counts: list[tuple[int, int]], a: int, b: int
) -> None:
    runs = runs_of(counts)
    wanted = range(min(a, b), max(a, b))
    assert places(slice_runs(runs, wanted)) == {k: v for k, v in places(runs).items() if k in wanted}


@given(st.lists(st.integers(1, 40), min_size=1, max_size=12), st.integers(1, 30))
def test_pieces_are_as_many_as_are_wanted_or_one_for_each_run(counts: list[int], pieces: int) -> None:
    def split(most: int) -> int:
        return sum(-(-count // most) for count in counts)

    allowed = max(pieces, len(counts))
    assert piece_blocks(counts, pieces) == min(most for most in range(1, 41) if split(most) <= allowed)


@given(COUNTS.filter(bool), st.integers(1, 25))
def test_splitting_covers_the_run_in_bounded_pieces(counts: list[tuple[int, int]], most: int) -> None:
    for run in runs_of(counts):
        pieces = split_run(run, most)
        assert places(pieces) == places([run])
        assert all(1 <= piece.count <= most for piece in pieces)


@given(
    chunks=st.lists(st.integers(1, 300), min_size=1, max_size=20),
    matched=st.integers(0, 50),
    size=st.integers(1, 64),
    block_tokens=st.integers(1, 32),
)
def test_a_chunked_prefill_saves_every_full_block_beyond_the_match_once(
    chunks: list[int], matched: int, size: int, block_tokens: int
) -> None:
    prompt = sum(chunks)
    full = prompt // block_tokens
    matched = min(matched, full)
    saved, done_tokens, covered = matched, 0, []
    for chunk in chunks:
        done_tokens += chunk
        hashed = full * block_tokens
        done = savable_tokens(done_tokens, prompt, hashed, save_decode=False) // block_tokens
        if done > saved:
            due, saved = saves_due(saved, done, size, final=done_tokens >= prompt)
            covered += due
    assert [block for blocks in covered for block in blocks] == list(range(matched, full))
    assert all(len(blocks) <= size for blocks in covered)
    assert all(len(blocks) == size for blocks in covered[:-1])


def grown(turns: list[int], size: int) -> tuple[list[int], int]:
    """Saves a chain turn by turn; returns the sizes of its segments, and how many blocks were written."""
    runs: list[Run] = []
    blocks = written = 0
    for new in turns:
        olds = joins_due(new, tail_of(runs, blocks, size), size)
        first = olds[0].start if olds else blocks
        due, blocks = saves_due(first, blocks + new, size, final=True)
        runs = runs[: len(runs) - len(olds)] + [whole_run(one.start, len(one)) for one in due]
        written += sum(map(len, due))
    return [run.count for run in runs], written


def whole_run(start: int, count: int) -> Run:
    """A run of all blocks of a segment."""
    record = SegmentRecord((PartRecord(4096, (10,) * count),), count, "none", 0)
    return Run(start, SegmentId(start.to_bytes(8, "big")), 0, count, record)


@given(st.lists(st.integers(1, 150), min_size=1, max_size=200), st.integers(1, 100))
def test_a_chain_that_grows_has_few_short_segments_and_is_written_a_few_times(
    turns: list[int], size: int
) -> None:
    sizes, written = grown(turns, size)
    assert all(1 <= one <= size for one in sizes)
    # Whole ones, and behind them short ones of which each is larger than the next.
    whole = [4 * one >= 3 * size for one in sizes]
    assert whole == sorted(whole, reverse=True)
    short = sizes[sum(whole) :]
    assert all(one > other for one, other in pairwise(short))
    assert written <= sum(turns) * (size.bit_length() + 1)


def test_turns_of_one_block_carry_like_a_binary_counter() -> None:
    assert grown([1] * 127, 64) == ([64, 32, 16, 8, 4, 2, 1], 7 * 64)


def test_what_a_turn_brings_joins_what_is_no_larger() -> None:
    cases = {
        (3, (), 64): 0,
        (3, (3,), 64): 1,
        (3, (4,), 64): 0,
        (3, (6, 3), 64): 2,
        (3, (12, 6, 3), 64): 3,
        (3, (24, 6, 3), 64): 2,
        (100, (47,), 64): 1,
        (100, (48,), 64): 0,
        (1, (1, 2), 4): 0,
        (5, (1,), 1): 0,
    }
    assert {
        (new, tail, size): len(joins_due(new, [whole_run(0, count) for count in tail], size))
        for new, tail, size in cases
    } == cases


def test_each_save_replaces_what_it_has_blocks_of() -> None:
    def digests(blocks: range) -> bytes:
        return b"".join(block.to_bytes(16, "big") for block in blocks)

    olds = [whole_run(10, 40), whole_run(50, 30)]
    first = joins_of(olds, range(10, 74), 80, digests)
    assert [(old.segment, len(old.digests) // 16) for old in first.olds] == [
        (olds[0].segment, 40),
        (olds[1].segment, 30),
    ]
    assert (first.olds[1].digests, first.blocks) == (digests(range(50, 80)), 64)
    # The second one ends in the next save, and goes with the later of the two.
    second = joins_of(olds, range(74, 90), 80, digests)
    assert ([old.segment for old in second.olds], second.blocks) == ([olds[1].segment], 6)
    assert joins_of(olds, range(90, 99), 80, digests) == joins_of([], range(10, 74), 80, digests)


def test_a_tail_is_of_short_segments_that_are_the_chains_alone() -> None:
    def run(start: int, count: int, slots: int, slot: int = 0) -> Run:
        record = SegmentRecord((PartRecord(4096, (10,) * slots),), slots, "none", 0)
        return Run(start, SegmentId(start.to_bytes(8, "big")), slot, count, record)

    whole, short, last = run(0, 64, 64), run(64, 9, 9), run(73, 2, 2)
    assert tail_of([whole, short, last], 75, 64) == [short, last]
    assert tail_of([], 0, 64) == tail_of([whole], 64, 64) == []
    # Blocks that were found but aren't stored any more, or were saved since.
    assert tail_of([whole, short, last], 73, 64) == tail_of([whole, short, last], 76, 64) == []
    # A segment with blocks of another chain behind it, or before it.
    assert tail_of([whole, short, run(73, 2, 3)], 75, 64) == []
    assert tail_of([whole, run(64, 9, 10, slot=1), last], 75, 64) == [last]
    # One of another salt.
    assert tail_of([whole, short, last], 75, 64, SaltId(bytes(16))) == []
    # As many as two segments have blocks.
    assert len(tail_of([run(at, 1, 1) for at in range(300)], 300, 64)) == 128


def test_decoded_blocks_wait_for_a_full_segment_and_for_their_hash() -> None:
    assert savable_tokens(100, 64, 160, save_decode=False) == 64
    assert savable_tokens(100, 64, 160, save_decode=True) == 100
    # Ten tokens are drafts: the sixth block's hash isn't known yet.
    assert savable_tokens(100, 64, 80, save_decode=True) == 80
    assert saves_due(4, 6, 4, final=False) == ([], 4)
    assert saves_due(4, 8, 4, final=False) == ([range(4, 8)], 8)


def test_what_is_worth_saving() -> None:
    # (full blocks of the prompt, admission.min_blocks, noted) -> blocks.
    cases = {
        (0, 1, None): EVERY_BLOCK,
        (5, 1, None): EVERY_BLOCK,
        (5, 5, None): EVERY_BLOCK,
        (5, 6, None): 0,
        (0, 2, None): 0,
        (5, 1, 0): 0,
        (5, 1, 4): 4,
        (5, 1, 5): EVERY_BLOCK,
        (5, 6, 5): 0,
        (0, 1, 0): 0,
    }
    assert {case: admitted_blocks(*case) for case in cases} == cases


def test_small_gains_are_not_worth_a_detour() -> None:
    assert external_tokens(64, 0, 16) == 64
    assert external_tokens(64, 16, 16) == 48
    assert external_tokens(64, 64, 16) == 0
    assert external_tokens(64, 0, 64) == 64
    assert external_tokens(64, 0, 80) == 0
    assert external_tokens(0, 0, 16) == 0
    assert external_tokens(32, 64, 16) == 0


@given(COUNTS, st.integers(0, 100), st.integers(0, 100), st.sets(st.integers(0, 7)))
def test_gaps_are_what_no_run_covers(
    counts: list[tuple[int, int]], a: int, b: int, left_out: set[int]
) -> None:
    runs = [run for i, run in enumerate(runs_of(counts)) if i not in left_out]
    wanted = range(min(a, b), max(a, b))
    uncovered = [block for gap in gaps(wanted, slice_runs(runs, wanted)) for block in gap]
    assert uncovered == [block for block in wanted if block not in places(runs)]


@given(st.integers(0, 30), st.integers(0, 30), st.sets(st.integers(0, 60)))
def test_ranges_are_the_wanted_blocks_in_as_few_ranges_as_there_are(
    start: int, count: int, wanted: set[int]
) -> None:
    found = ranges(range(start, start + count), wanted.__contains__)
    assert [block for piece in found for block in piece] == [
        block for block in range(start, start + count) if block in wanted
    ]
    assert all(one.stop < other.start for one, other in pairwise(found))
