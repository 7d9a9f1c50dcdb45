"""v0's planning against brute force: tokens and slots one at a time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.v0.planning import (
    HASH_ALGO,
    Prompt,
    adapter_key,
    chain,
    hash_root,
    joined,
    part,
    prompts_of,
    rows_suffice,
    segment_id,
    segments,
    windows,
)
from kvstore.index.port import Run
from kvstore.keys import SegmentId
from kvstore.store.space import Match
from schemas.records import PartRecord, SegmentRecord

#: Few different tokens, so that prompts begin alike.
TEXT = st.lists(st.integers(0, 1), min_size=1, max_size=12)
KEY = st.sampled_from([b"", b"a", b"b", b"lora\x00a"])
RECORD = SegmentRecord((PartRecord(4096, (1,)),), 1, "none", 0)


def array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int64)


def test_the_names_are_what_they_were() -> None:
    """What is stored is found by them: another rule needs another HASH_ALGO."""
    assert (HASH_ALGO, hash_root()) == ("kvstore-v0-sha256", "1b71377a20c1136b")
    made = chain(array([1, -2, 3_000_000_000, 4, 5]), 2, b"key")
    assert [one.hex()[:16] for one in made] == ["991181b966bf4a42", "bb9611b080c1b1d4", "8e5df7883b2a1849"]


@given(st.lists(st.tuples(KEY, TEXT), min_size=1, max_size=8), st.integers(1, 5))
def test_a_name_stands_for_one_key_and_one_beginning(texts: list[tuple[bytes, list[int]]], size: int) -> None:
    meaning: dict[bytes, tuple[object, ...]] = {}
    names: dict[tuple[object, ...], bytes] = {}
    for key, tokens in texts:
        made = chain(array(tokens), size, key)
        blocks = len(tokens) // size
        assert len(made) == blocks + 1
        means = [(key, "block", tuple(tokens[: size * (n + 1)])) for n in range(blocks)]
        for name, mean in zip(made, [*means, (key, "end", tuple(tokens))], strict=True):
            assert meaning.setdefault(name, mean) == mean
            assert names.setdefault(mean, name) == name


@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(1, 6)), max_size=6),
    st.lists(st.integers(1, 20), max_size=3),
    st.booleans(),
)
def test_a_prompt_counts_if_all_of_it_is_in_the_step(
    prefills: list[tuple[int, int]], decodes: list[int], said: bool
) -> None:
    """Of each prefill: tokens computed before, tokens of this step."""
    queries = [query for _, query in prefills]
    starts = [sum(queries[:n]) for n in range(len(queries) + 1)]
    seq_lens = [before + query for before, query in prefills] + decodes
    query_start = [*starts, *(starts[-1] + n + 1 for n in range(len(decodes)))] if said else None
    made = prompts_of(seq_lens, len(prefills), starts[-1], query_start)
    whole = [
        Prompt(start, query) if before == 0 else None
        for start, (before, query) in zip(starts, prefills, strict=False)
    ]
    if said or not any(before for before, _ in prefills):
        assert made == whole
    else:
        assert made == [None] * len(prefills), "nobody says which of them begins in this step"


@pytest.mark.parametrize(
    ("seq_lens", "prefills", "tokens", "starts"),
    [
        ([3], 2, 3, None),  # fewer lengths than prompts
        ([3, 0], 2, 3, None),
        ([3, 4], 2, 7, [0, 3]),  # a row start is missing
        ([3, 4], 2, 7, [0, 3, 8]),  # more rows than tokens
        ([3, 4], 2, 7, [1, 4, 7]),
        ([3, 4], 2, 7, [0, 8, 7]),
        ([4, 4], 2, 7, None),
    ],
)
def test_a_step_that_contradicts_itself_has_no_prompts(
    seq_lens: list[int], prefills: int, tokens: int, starts: list[int] | None
) -> None:
    assert prompts_of(seq_lens, prefills, tokens, starts) == [None] * prefills


@given(st.lists(st.integers(0, 9), max_size=20), st.integers(1, 20))
def test_windows_hold_everything_once_and_as_much_as_fits(sizes: list[int], most: int) -> None:
    made = windows(sizes, most)
    if any(size > most for size in sizes):
        assert made is None
        return
    assert made is not None
    assert [slot for piece in made for slot in piece] == list(range(len(sizes)))
    held = [sum(sizes[slot] for slot in piece) for piece in made]
    assert all(one <= most for one in held)
    for one, after in zip(held, made[1:], strict=False):
        assert one + sizes[after[0]] > most


@given(st.integers(1, 60), st.integers(1, 60), st.integers(1, 9))
def test_segments_are_cut_alike_for_prompts_that_begin_alike(one: int, other: int, most: int) -> None:
    made = segments(one, most)
    assert [slot for piece in made for slot in piece] == list(range(one))
    assert all(len(piece) <= most for piece in made[:-1]) and len(made[-1]) <= most + 1
    assert all(piece.start % most == 0 for piece in made)
    assert all(a.stop == b.start for a, b in pairwise(made))
    # All but the last one, which has the end, are found in the longer prompt's cut too.
    longer = segments(one + other, most)
    assert made[:-1] == longer[: len(made) - 1]


RUNS = st.lists(st.integers(1, 5), min_size=1, max_size=4)


def match(counts: list[int], number: int) -> Match:
    """A chain in segments of `counts` slots, from slot 7 of each on."""
    runs, at = [], 0
    for n, count in enumerate(counts):
        runs.append(Run(at, SegmentId(bytes([number, n]) * 4), 7, count, RECORD))
        at += count
    return Match(runs, at, "complete")


def where(found: Match) -> list[tuple[bytes, int]]:
    """Segment and slot of every block, in order; fails if the runs leave one out."""
    out: list[tuple[bytes, int]] = []
    for run in found.runs:
        assert run.start == len(out)
        out += [(run.segment, run.slot + n) for n in range(run.count)]
    assert len(out) == found.blocks
    return out


@given(st.lists(RUNS, min_size=1, max_size=4), st.data())
def test_matches_are_joined_and_cut_and_no_slot_is_lost(chains: list[list[int]], data: st.DataObject) -> None:
    matches = [match(counts, number) for number, counts in enumerate(chains)]
    whole = joined(matches, [one.blocks for one in matches])
    slots = [slot for one in matches for slot in where(one)]
    assert where(whole) == slots
    first = data.draw(st.integers(0, len(slots)))
    last = data.draw(st.integers(first, len(slots)))
    assert where(part(whole, range(first, last))) == slots[first:last]


def test_names_of_segments_never_repeat() -> None:
    some = (1, 11)
    made = {segment_id(n, s, p, c, bytes(32)) for n in some for s in some for p in some for c in some}
    assert len(made) == 16 and {len(one) for one in made} == {8}
    assert segment_id(1, 2, 3, 4, bytes(32)) == segment_id(1, 2, 3, 4, bytes(32))


def test_the_sampler_may_read_last_rows_and_no_others() -> None:
    batch = [Prompt(0, 3), Prompt(3, 1)]
    assert rows_suffice([2, 3], batch) and rows_suffice([3], batch) and rows_suffice([], batch)
    assert not rows_suffice([1, 2, 3], batch)


def test_an_adapter_is_known_by_its_name_or_not_at_all() -> None:
    assert adapter_key([0, 0], {}) == b""
    assert adapter_key([3, 3], {3: "a"}) == b"lora\x00a"
    assert adapter_key([3, 3], {4: "a"}) is None
    assert adapter_key([0, 3], {3: "a"}) is None
    assert adapter_key([], {}) is None
