"""The transfer threads: bounds, priorities, draining."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from kvstore.transfers import Crew, Transfers
from schemas.settings import TransferSettings


@pytest.fixture
def transfers() -> Iterator[Transfers]:
    made = Transfers(TransferSettings(read_threads=1, write_threads=1, write_bytes=100, queue_jobs=3))
    yield made
    made.close(0.1)


class Blocker:
    """A job that runs until it is let go."""

    def __init__(self) -> None:
        self.started, self.go = threading.Event(), threading.Event()
        self.thread = ""

    def __call__(self) -> None:
        self.thread = threading.current_thread().name
        self.started.set()
        assert self.go.wait(10)


def test_no_threads_before_the_first_job(transfers: Transfers) -> None:
    assert not transfers._threads
    done = threading.Event()
    assert transfers.call(done.set)
    assert done.wait(5)
    assert transfers.drain(5)


def test_a_store_that_always_has_reads_still_saves_and_runs_errands(transfers: Transfers) -> None:
    reader = Blocker()
    assert transfers.read(reader)
    assert reader.started.wait(5)
    assert transfers.read(lambda: None)  # waits
    done = [threading.Event(), threading.Event()]
    assert transfers.write(1, done[0].set)
    assert transfers.errand(1, done[1].set)
    assert all(one.wait(5) for one in done)
    assert transfers.queued["reads"] == 1
    reader.go.set()
    assert transfers.drain(5)


def test_saves_still_end_while_errands_hang(transfers: Transfers) -> None:
    hanging = [Blocker() for _ in range(3)]
    for blocker in hanging:
        assert transfers.errand(1, blocker)
    assert hanging[0].started.wait(5) and hanging[1].started.wait(5)
    done = threading.Event()
    assert transfers.write(1, done.set)
    assert done.wait(5)
    for blocker in hanging:
        blocker.go.set()
    assert transfers.drain(5)


def test_a_thread_that_may_read_and_write_reads_first() -> None:
    transfers = Transfers(TransferSettings(read_threads=1, write_threads=2))
    reader, both, writer = Blocker(), Blocker(), Blocker()
    assert transfers.read(reader)
    assert transfers.read(both)
    assert transfers.write(1, writer)
    assert all(one.started.wait(5) for one in (reader, both, writer))
    order: list[str] = []
    for _ in range(3):
        assert transfers.write(1, lambda: order.append("write"))
        assert transfers.read(lambda: order.append("read"))
    # Free the thread for both alone: the others stay with their jobs.
    names = {blocker.thread: blocker for blocker in (reader, both)}
    next(blocker for name, blocker in names.items() if "write" in name).go.set()
    while len(order) < 6:
        time.sleep(0.001)
    assert order == ["read"] * 3 + ["write"] * 3
    for blocker in (reader, both, writer):
        blocker.go.set()
    assert transfers.close(5)


def test_a_full_queue_refuses_at_once(transfers: Transfers) -> None:
    blocker = Blocker()
    assert transfers.read(blocker)
    assert blocker.started.wait(5)
    assert [transfers.read(lambda: None) for _ in range(4)] == [True, True, True, False]
    blocker.go.set()
    assert transfers.drain(5)


def test_write_bytes_are_bounded_and_given_back(transfers: Transfers) -> None:
    blocker = Blocker()
    assert transfers.write(60, blocker)
    assert not transfers.write(41, lambda: None)
    assert transfers.write(40, lambda: None)
    assert transfers.queued["write_bytes"] == 100
    blocker.go.set()
    assert transfers.drain(5)
    assert transfers.queued["write_bytes"] == 0
    assert transfers.write(100, lambda: None)


def test_a_failing_job_leaves_its_thread_alive(
    transfers: Transfers, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise RuntimeError("a bug")

    done = threading.Event()
    for _ in range(3):
        assert transfers.call(fail)
    assert transfers.call(done.set) or transfers.drain(5)
    assert transfers.drain(5)
    assert "a bug" in caplog.text


def test_close_finishes_what_is_queued_and_refuses_the_rest(transfers: Transfers) -> None:
    done: list[int] = []
    for i in range(3):
        assert transfers.write(1, lambda i=i: done.append(i))  # type: ignore[misc]
    assert transfers.close(5)
    assert done == [0, 1, 2]
    assert not transfers.read(lambda: None)
    assert not transfers.write(1, lambda: None)
    assert not transfers.call(lambda: None)
    assert transfers.close(5)


def test_close_abandons_what_hangs() -> None:
    transfers = Transfers(TransferSettings(read_threads=1, write_threads=1))
    blocker = Blocker()
    assert transfers.read(blocker)
    assert blocker.started.wait(5)
    assert not transfers.close(0.05)
    blocker.go.set()


def test_errands_have_a_bound_of_their_own() -> None:
    settings = TransferSettings(read_threads=1, write_threads=1, write_bytes=100, errand_bytes=50)
    transfers = Transfers(settings)
    blocker = Blocker()
    assert transfers.errand(50, blocker)
    assert not transfers.errand(1, lambda: None)
    assert transfers.queued["errand_bytes"] == 50
    assert transfers.write(100, lambda: None)
    blocker.go.set()
    assert transfers.drain(5)
    assert transfers.queued["errand_bytes"] == 0
    assert transfers.errand(50, lambda: None)
    assert transfers.close(1)
    assert not transfers.errand(1, lambda: None)


# The crew


@pytest.fixture
def crew() -> Iterator[Crew]:
    crew = Crew(3)
    yield crew
    crew.close()


def test_a_crew_returns_results_in_order(crew: Crew) -> None:
    assert crew.together([lambda n=n: n * n for n in range(50)]) == [n * n for n in range(50)]  # type: ignore[misc]
    assert crew.together([]) == []


def test_a_crew_works_side_by_side_with_its_caller(crew: Crew) -> None:
    meet = threading.Barrier(4)  # three helpers and the caller
    crew.together([lambda: meet.wait(5)] * 4)


def test_one_part_needs_no_thread(crew: Crew) -> None:
    before = threading.active_count()
    assert crew.together([threading.current_thread]) == [threading.current_thread()]
    assert threading.active_count() == before


def test_the_first_error_ends_a_call_when_all_have_stopped(crew: Crew) -> None:
    running = []
    begun = threading.Barrier(2)

    def fails() -> None:
        begun.wait(5)
        raise OSError("broken")

    def lasts() -> None:
        running.append(1)
        begun.wait(5)
        time.sleep(0.05)
        running.pop()

    with pytest.raises(OSError, match="broken"):
        crew.together([fails, lasts])
    assert not running


def test_a_busy_crew_leaves_the_work_to_the_caller(crew: Crew) -> None:
    hold = threading.Event()
    busy = threading.Thread(target=lambda: crew.together([lambda: hold.wait(10)] * 4))
    busy.start()
    time.sleep(0.05)
    try:
        assert crew.together([lambda: 1] * 5) == [1] * 5
    finally:
        hold.set()
        busy.join()


def test_a_closed_crew_leaves_the_work_to_the_caller(crew: Crew) -> None:
    crew.close()
    crew.close()
    assert crew.together([lambda: 1] * 5) == [1] * 5
