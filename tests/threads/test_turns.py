"""Calls that wait for their turn, on the transfers' own threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from kvstore.threads.transfers import Transfers
from kvstore.threads.turns import InTurn
from schemas.settings import TransferSettings
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def transfers() -> Iterator[Transfers]:
    made = Transfers(TransferSettings(read_threads=1, write_threads=1, queue_jobs=100))
    yield made
    made.close(0.1)


def test_each_begins_when_the_one_before_has_ended_and_no_thread_waits_for_it(transfers: Transfers) -> None:
    turns, go, done = InTurn(transfers), threading.Event(), []

    def first() -> None:
        assert go.wait(PATIENCE_S)
        done.append(0)

    def wrong() -> None:
        raise RuntimeError("a test wants this one to fail")

    assert turns.call(first) and turns.call(wrong)
    assert all(turns.call(lambda number=number: done.append(number)) for number in range(1, 50))
    beside = threading.Event()
    assert transfers.call(beside.set)
    assert beside.wait(PATIENCE_S), "the other threads have gone on"
    assert done == []
    go.set()
    until(lambda: len(done) == 50)
    assert done == list(range(50))


def test_what_is_refused_does_not_run(transfers: Transfers) -> None:
    turns, done = InTurn(transfers), []
    transfers.close(PATIENCE_S)
    assert not turns.call(lambda: done.append(0))
    assert not turns._queued and not done
