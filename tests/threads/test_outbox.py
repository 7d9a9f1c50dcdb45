"""A queue with a thread of its own: what is put arrives in order, and nobody waits for whoever takes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest

from kvstore.threads.outbox import BATCH, Outbox
from tests.waiting import PATIENCE_S, until


def test_everything_arrives_in_order_and_in_batches() -> None:
    batches: list[list[int]] = []
    box = Outbox[int](lambda batch: batches.append(list(batch)), most=1000, period_s=0.001, name="test")
    assert all(box.put(number) for number in range(1000))
    until(lambda: sum(map(len, batches)) == 1000)
    assert [number for batch in batches for number in batch] == list(range(1000))
    assert max(map(len, batches)) <= BATCH
    assert box.close(PATIENCE_S) == []


def test_what_was_put_before_the_end_is_done_and_nothing_afterwards() -> None:
    done: list[int] = []
    box = Outbox[int](done.extend, most=1000, period_s=3600.0, name="test")
    for number in range(100):
        box.put(number)
    assert box.close(PATIENCE_S) == []
    assert done == list(range(100))
    assert not box.put(100)


def test_one_that_hangs_costs_what_does_not_fit_and_no_time() -> None:
    hangs, begun = threading.Event(), threading.Event()

    def work(batch: Sequence[int]) -> None:
        begun.set()
        hangs.wait(PATIENCE_S)

    box = Outbox[int](work, most=10, period_s=0.001, name="test")
    assert box.put(0)
    assert begun.wait(PATIENCE_S)
    before = time.monotonic()
    assert [box.put(number) for number in range(12)] == [True] * 10 + [False] * 2
    assert time.monotonic() - before < PATIENCE_S / 2
    assert box.close(0.01) == list(range(10))
    hangs.set()


def test_an_error_costs_its_batch_alone(caplog: pytest.LogCaptureFixture) -> None:
    done: list[int] = []

    def work(batch: Sequence[int]) -> None:
        if 0 in batch:
            raise ValueError("no")
        done.extend(batch)

    box = Outbox[int](work, most=1000, period_s=0.001, name="test")
    box.put(0)
    until(lambda: "things are lost" in caplog.text)
    box.put(1)
    assert box.close(PATIENCE_S) == []
    assert done == [1]
