"""v0's reads: all of them or nothing, by a deadline, over a real store with faults."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.v0_reads import Reads
from kvstore.blobs.faulty import Plan, Rule
from kvstore.keys import payload_name
from kvstore.store import Space, Store
from tests.store.world import buffers, chain, content, keys, make_store, match, open_space, slots

A = chain(*range(12))


@pytest.fixture
def plan() -> Plan:
    return Plan()


@pytest.fixture
def store(tmp_path: Path, plan: Plan) -> Iterator[Store]:
    made = make_store(tmp_path, plan=plan, transfers={"drain_s": 0.1})
    yield made
    made.close()


@pytest.fixture
def space(store: Store) -> Space:
    """Twelve blocks in four segments."""
    made = open_space(store)
    for end in (3, 6, 9, 12):
        made.save(slots(A[:end]))
    return made


def names(space: Space) -> list[str]:
    return [payload_name(space.id, run.segment, 0) for run in match(space, A).runs]


def test_all_of_it_or_nothing(store: Store, space: Space, plan: Plan) -> None:
    reads, into = Reads(store), buffers(12)
    found = match(space, A)
    assert reads.load(space, found, keys(A), into, rank=0, end=time.monotonic() + 20)
    assert [bytes(view) for view in into] == [content(one) for one in A]
    for name in names(space):
        plan.replace(Rule("transient", ("read",), name=name))
        assert not reads.load(space, found, keys(A), buffers(12), rank=0, end=time.monotonic() + 20)
        assert not reads.hanging
        plan.replace()
        assert reads.load(space, found, keys(A), buffers(12), rank=0, end=time.monotonic() + 20)


def test_what_is_late_is_not_there_and_is_known_to_hang(store: Store, space: Space, plan: Plan) -> None:
    reads, found = Reads(store), match(space, A)
    plan.replace(Rule("delay", ("read",), name=names(space)[2], delay_s=1))
    began = time.monotonic()
    assert not reads.load(space, found, keys(A), buffers(12), rank=0, end=began + 0.2)
    assert 0.15 < time.monotonic() - began < 0.9
    assert reads.hanging
    end = time.monotonic() + 20
    while reads.hanging and time.monotonic() < end:
        time.sleep(0.02)
    assert not reads.hanging


def test_reads_that_are_refused_are_a_counted_miss(store: Store, space: Space) -> None:
    found = match(space, A)
    store.transfers.close(0)
    reads = Reads(store)
    assert not reads.load(space, found, keys(A), buffers(12), rank=0, end=time.monotonic() + 20)
    assert not reads.hanging
    assert store.counters.snapshot()["miss_blocks{capacity}"] == 12
