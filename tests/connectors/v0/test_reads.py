"""v0's reads: all of them or nothing, by a deadline, over a real store with faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from connectors.v0.reads import Reads
from kvstore.conformance.faulty import Plan, Rule
from kvstore.keys import payload_name
from kvstore.store.space import Space
from kvstore.store.store import Store
from tests.store.world import buffers, chain, content, keys, make_store, match, open_space, slots
from tests.waiting import PATIENCE_S, until

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


def test_all_of_it_or_nothing(
    store: Store, space: Space, plan: Plan, caplog: pytest.LogCaptureFixture
) -> None:
    reads, into = Reads(store), buffers(12)
    found = match(space, A)
    assert reads.load(space, found, keys(A), into, rank=0, end=time.monotonic() + PATIENCE_S)
    assert [bytes(view) for view in into] == [content(one) for one in A]
    for name in names(space):
        plan.replace(Rule("transient", ("read",), name=name))
        assert not reads.load(space, found, keys(A), buffers(12), rank=0, end=time.monotonic() + PATIENCE_S)
        assert not reads.hanging
        plan.replace()
        assert reads.load(space, found, keys(A), buffers(12), rank=0, end=time.monotonic() + PATIENCE_S)
    assert len(names(space)) > 1
    assert caplog.text.count(" are computed: ") == 1, "once a minute"


@pytest.mark.slow
def test_what_is_late_is_not_there_and_is_known_to_hang(store: Store, space: Space, plan: Plan) -> None:
    reads, found, goes_on = Reads(store), match(space, A), threading.Event()
    store.payloads._sleep = lambda seconds: goes_on.wait(PATIENCE_S)  # type: ignore[attr-defined]
    plan.replace(Rule("delay", ("read",), name=names(space)[2]))

    def hangs() -> bool:
        began = time.monotonic()
        assert not reads.load(space, found, keys(A), buffers(12), rank=0, end=began + 0.2)
        assert 0.15 < time.monotonic() - began < PATIENCE_S / 2
        # On a machine that stood still it may have been too late before it began.
        return reads.hanging

    until(hangs)
    goes_on.set()
    until(lambda: not reads.hanging)


def test_reads_that_are_refused_are_a_counted_miss(store: Store, space: Space) -> None:
    found = match(space, A)
    store.transfers.close(0)
    reads = Reads(store)
    assert not reads.load(space, found, keys(A), buffers(12), rank=0, end=time.monotonic() + PATIENCE_S)
    assert not reads.hanging
    assert store.counters.snapshot()["miss_blocks{capacity}"] == 12
