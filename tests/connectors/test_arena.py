"""Runs of the arena never overlap, whatever is taken and given back in whatever order, and none is lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from connectors.arena import ALIGNMENT, Arena

#: Take so many bytes; or give back a run, by its place among those that are held.
_ACTS = st.lists(
    st.one_of(st.tuples(st.just("take"), st.integers(0, 3000)), st.tuples(st.just("give"), st.integers()))
)


@given(size=st.integers(0, 8192), acts=_ACTS)
def test_runs_do_not_overlap_and_all_come_back(size: int, acts: Sequence[tuple[str, int]]) -> None:
    arena = Arena(size)
    held: list[tuple[int, int]] = []
    for act, number in acts:
        if act == "give":
            if held:
                arena.give(held.pop(number % len(held))[0])
            continue
        start = arena.take(number)
        others = sorted(held)
        gaps = zip([0, *(end for _, end in others)], [*(one for one, _ in others), arena.size], strict=True)
        fits = any(end - begin >= arena.room(number) for begin, end in gaps)
        assert (start is not None) == fits, "a run that is free is found"
        if start is not None:
            end = start + arena.room(number)
            assert start % ALIGNMENT == 0 and number <= end - start < number + 2 * ALIGNMENT
            assert 0 <= start and end <= arena.size
            assert all(end <= other or start >= stop for other, stop in held)
            held.append((start, end))
        assert arena.used == sum(end - start for start, end in held)
    for start, _ in held:
        arena.give(start)
    assert arena.used == 0
    if arena.size:
        assert arena.take(arena.size) == 0, "it is one run again"
    with pytest.raises(KeyError):
        arena.give(-1)


def test_a_ring_of_runs_goes_round_for_ever() -> None:
    """Given back in the order in which they were taken, sizes that don't divide the arena use all of it."""
    arena = Arena(100 * ALIGNMENT)
    held = []
    for i in range(1000):
        size = (7, 3, 13)[i % 3] * ALIGNMENT
        while (start := arena.take(size)) is None:
            arena.give(held.pop(0))
        held.append(start)
        assert arena.used <= arena.size
    assert arena.used > arena.size // 2
