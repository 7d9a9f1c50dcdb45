"""The transfer threads: bounds, priorities, draining."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvstore.errors import ConfigError
from kvstore.threads.transfers import AHEAD_THREADS, Crew, Transfers
from schemas.settings import TransferSettings
from tests.waiting import PATIENCE_S, until


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
        assert self.go.wait(PATIENCE_S)


def test_no_threads_before_the_first_job(transfers: Transfers) -> None:
    assert not transfers._threads
    done = threading.Event()
    assert transfers.call(done.set)
    assert done.wait(PATIENCE_S)
    assert transfers.drain(PATIENCE_S)


def test_a_store_that_always_has_reads_still_saves_and_runs_errands(transfers: Transfers) -> None:
    reader = Blocker()
    assert transfers.read(reader)
    assert reader.started.wait(PATIENCE_S)
    assert transfers.read(lambda: None)  # waits
    done = [threading.Event(), threading.Event()]
    assert transfers.write(1, done[0].set)
    assert transfers.errand(1, done[1].set)
    assert all(one.wait(PATIENCE_S) for one in done)
    assert transfers.queued["reads"] == 1
    reader.go.set()
    assert transfers.drain(PATIENCE_S)


def test_saves_still_end_while_errands_hang(transfers: Transfers) -> None:
    hanging = [Blocker() for _ in range(3)]
    for blocker in hanging:
        assert transfers.errand(1, blocker)
    assert hanging[0].started.wait(PATIENCE_S) and hanging[1].started.wait(PATIENCE_S)
    done = threading.Event()
    assert transfers.write(1, done.set)
    assert done.wait(PATIENCE_S)
    for blocker in hanging:
        blocker.go.set()
    assert transfers.drain(PATIENCE_S)


def test_a_thread_that_may_read_and_write_reads_first() -> None:
    transfers = Transfers(TransferSettings(read_threads=1, write_threads=2))
    reader, both, writer = Blocker(), Blocker(), Blocker()
    assert transfers.read(reader)
    assert transfers.read(both)
    assert transfers.write(1, writer)
    assert all(one.started.wait(PATIENCE_S) for one in (reader, both, writer))
    order: list[str] = []
    for _ in range(3):
        assert transfers.write(1, lambda: order.append("write"))
        assert transfers.read(lambda: order.append("read"))
    # Free the thread for both alone: the others stay with their jobs.
    names = {blocker.thread: blocker for blocker in (reader, both)}
    next(blocker for name, blocker in names.items() if "write" in name).go.set()
    until(lambda: len(order) == 6)
    assert order == ["read"] * 3 + ["write"] * 3
    for blocker in (reader, both, writer):
        blocker.go.set()
    assert transfers.close(PATIENCE_S)


def test_a_full_queue_refuses_at_once(transfers: Transfers) -> None:
    blocker = Blocker()
    assert transfers.read(blocker)
    assert blocker.started.wait(PATIENCE_S)
    assert [transfers.read(lambda: None) for _ in range(4)] == [True, True, True, False]
    blocker.go.set()
    assert transfers.drain(PATIENCE_S)


def test_write_bytes_are_bounded_and_given_back(transfers: Transfers) -> None:
    blocker = Blocker()
    assert transfers.write(60, blocker)
    assert not transfers.write(41, lambda: None)
    assert transfers.write(40, lambda: None)
    assert transfers.queued["write_bytes"] == 100
    blocker.go.set()
    assert transfers.drain(PATIENCE_S)
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
    assert transfers.call(done.set) or transfers.drain(PATIENCE_S)
    assert transfers.drain(PATIENCE_S)
    assert "a bug" in caplog.text


def test_close_finishes_what_is_queued_and_refuses_the_rest(transfers: Transfers) -> None:
    done: list[int] = []
    for i in range(3):
        assert transfers.write(1, lambda i=i: done.append(i))  # type: ignore[misc]
    assert transfers.close(PATIENCE_S)
    assert done == [0, 1, 2]
    assert not transfers.read(lambda: None)
    assert not transfers.write(1, lambda: None)
    assert not transfers.call(lambda: None)
    assert transfers.close(PATIENCE_S)


def test_close_abandons_what_hangs() -> None:
    transfers = Transfers(TransferSettings(read_threads=1, write_threads=1))
    blocker = Blocker()
    assert transfers.read(blocker)
    assert blocker.started.wait(PATIENCE_S)
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
    assert transfers.drain(PATIENCE_S)
    assert transfers.queued["errand_bytes"] == 0
    assert transfers.errand(50, lambda: None)
    assert transfers.close(1)
    assert not transfers.errand(1, lambda: None)


# What a device does beside the process


def test_a_write_takes_its_turn_when_its_bytes_are_there(transfers: Transfers) -> None:
    """The only thread that writes does another meanwhile."""
    copies, done = [Blocker(), Blocker()], []
    assert transfers.write(1, lambda: done.append("first"), copies[0])
    assert copies[0].started.wait(PATIENCE_S)
    assert transfers.write_staged(1, lambda: done.append("second"), copies[1])
    assert transfers.write(1, lambda: done.append("another"))
    until(lambda: done == ["another"])
    assert not copies[1].started.is_set(), "one thread waits for all of them"
    assert transfers.queued["write_bytes"] == 2
    for copy in copies:
        copy.go.set()
    assert transfers.drain(PATIENCE_S)
    assert done == ["another", "first", "second"] and copies[0].thread == copies[1].thread
    assert transfers.queued["write_bytes"] == 0


def test_writes_whose_bytes_are_not_there_are_bounded_like_others(transfers: Transfers) -> None:
    copy = Blocker()
    assert transfers.write_staged(1, lambda: None, copy)
    assert copy.started.wait(PATIENCE_S)
    assert all(transfers.write_staged(1, lambda: None, copy) for _ in range(3))
    assert transfers.queued["writes"] == 3 and not transfers.takes_staged()
    assert not transfers.write_staged(1, lambda: None, copy)
    assert not transfers.write(1, lambda: None, copy) and not transfers.write(1, lambda: None)
    copy.go.set()
    assert transfers.drain(PATIENCE_S)
    assert transfers.takes_staged() and not transfers.write(101, lambda: None, copy)


def test_a_write_whose_copy_fails_finds_that_out_itself(transfers: Transfers) -> None:
    def fails() -> None:
        raise RuntimeError("no device")

    done: list[int] = []
    assert transfers.write(1, lambda: done.append(1), fails)
    assert transfers.drain(PATIENCE_S) and done == [1]


def test_what_follows_copies_to_the_device_waits_for_no_copy_from_it(transfers: Transfers) -> None:
    copy, threads = Blocker(), []
    assert transfers.write(1, lambda: None, copy)
    for _ in range(10):
        transfers.in_turn(lambda: threads.append(threading.current_thread().name))
    until(lambda: len(threads) == 10)
    assert len(set(threads)) == 1
    copy.go.set()
    assert transfers.drain(PATIENCE_S)


def test_close_waits_for_a_device_and_for_what_follows(transfers: Transfers) -> None:
    copy, done = Blocker(), []
    assert transfers.write(1, lambda: done.append("written"), copy)
    transfers.in_turn(lambda: transfers.in_turn(lambda: done.append("ended")))
    closed: list[bool] = []
    closer = threading.Thread(target=lambda: closed.append(transfers.close(PATIENCE_S)))
    closer.start()
    until(lambda: transfers._closing)
    assert not transfers.write(1, lambda: None, copy)
    copy.go.set()
    closer.join(PATIENCE_S)
    assert closed == [True] and sorted(done) == ["ended", "written"]
    # The thread that asks may be an engine's, which waits for no device.
    assert not transfers.in_turn(lambda: done.append("late"))
    assert "late" not in done


def test_close_abandons_a_device_that_hangs(transfers: Transfers) -> None:
    copy, done = Blocker(), []
    assert transfers.write(1, lambda: done.append(1), copy)
    assert copy.started.wait(PATIENCE_S)
    assert not transfers.close(0.05)
    copy.go.set()
    assert transfers.close(PATIENCE_S) and done == []


# A process that can have no more threads

#: Queues a job of each kind; they answer whether it will run.
KINDS: dict[str, Callable[[Transfers, Callable[[], None]], bool]] = {
    "call": Transfers.call,
    "ordered": Transfers.call_in_order,
    "read": Transfers.read,
    "write": lambda transfers, job: transfers.write(1, job),
    "late write": lambda transfers, job: transfers.write_staged(1, job, lambda: None),
    "errand": lambda transfers, job: transfers.errand(1, job),
    "ahead": Transfers.ahead,
    "in turn": Transfers.in_turn,
}
#: Threads of `transfers`: three for calls, two for errands and two for what is done ahead, else one each.
THREADS = 12


class Limit:
    """Lets a process have so many more threads."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.more = 0
        start = threading.Thread.start

        def limited(thread: threading.Thread) -> None:
            if not self.more:
                raise RuntimeError("can't start new thread")
            self.more -= 1
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", limited)


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Limit:
    return Limit(monkeypatch)


@pytest.mark.parametrize("more", range(THREADS + 1))
def test_a_job_that_no_thread_may_take_is_refused_and_all_others_run(
    transfers: Transfers, limit: Limit, more: int
) -> None:
    limit.more = more
    done: list[str] = []
    taken = [name for name, put in KINDS.items() if put(transfers, lambda name=name: done.append(name))]  # type: ignore[misc]
    assert transfers.drain(PATIENCE_S)
    assert sorted(done) == sorted(taken)
    # One of each kind starts first.
    assert len(taken) == min(more, len(KINDS))
    assert transfers.queued["write_bytes"] == transfers.queued["errand_bytes"] == 0
    # Memory was short for a moment: the rest start with the next job.
    limit.more = THREADS
    done.clear()
    assert all(put(transfers, lambda name=name: done.append(name)) for name, put in KINDS.items())  # type: ignore[misc]
    assert transfers.drain(PATIENCE_S) and sorted(done) == sorted(KINDS)
    assert len(transfers._threads) == THREADS


def test_a_job_runs_on_no_thread_that_queues_it(transfers: Transfers, limit: Limit) -> None:
    for put in KINDS.values():
        assert not put(transfers, lambda: pytest.fail("it ran"))


def test_threads_start_when_a_store_is_opened_or_it_says_in_words_that_they_can_not(
    transfers: Transfers, limit: Limit
) -> None:
    limit.more = 7
    with pytest.raises(ConfigError, match=r"start 7 of the 12 threads.*ulimit -u"):
        transfers.start()
    limit.more = 100
    assert not transfers.call(lambda: None), "it is closed"
    other = Transfers(TransferSettings(read_threads=1, write_threads=1))
    other.start()
    other.start()
    limit.more = 0
    assert all(put(other, lambda: None) for put in KINDS.values())
    assert other.close(PATIENCE_S)


# Calls in order


def test_each_begins_when_the_one_before_has_ended_and_keeps_no_other_call_waiting(
    transfers: Transfers,
) -> None:
    first, done = Blocker(), []
    assert transfers.call_in_order(first)
    assert first.started.wait(PATIENCE_S)

    def wrong() -> None:
        raise RuntimeError("a test wants this one to fail")

    assert transfers.call_in_order(wrong)
    assert all(transfers.call_in_order(lambda number=number: done.append(number)) for number in range(2))  # type: ignore[misc]
    # As many as there may be of any other kind.
    assert not transfers.call_in_order(lambda: done.append(2)) and transfers.queued["calls"] == 3
    # Each of the threads for calls is there for others: all three at once.
    meet = threading.Barrier(4)
    for _ in range(3):
        assert transfers.call(lambda: (meet.wait(PATIENCE_S), None)[1])
    meet.wait(PATIENCE_S)
    assert done == []
    first.go.set()
    assert transfers.drain(PATIENCE_S) and done == [0, 1]


def test_what_is_done_ahead_begins_only_while_no_read_waits(transfers: Transfers) -> None:
    reader, order = Blocker(), list[str]()
    assert transfers.read(reader)
    assert reader.started.wait(PATIENCE_S)
    assert transfers.read(lambda: order.append("read"))  # waits
    assert transfers.ahead(lambda: order.append("ahead"))
    done = threading.Event()
    assert transfers.errand(1, done.set) and done.wait(PATIENCE_S)
    assert transfers.queued["ahead"] == 1 and not order
    reader.go.set()
    assert transfers.drain(PATIENCE_S) and order == ["read", "ahead"]


def test_what_is_done_ahead_keeps_nobody_waiting(transfers: Transfers) -> None:
    hanging = [Blocker() for _ in range(AHEAD_THREADS)]
    assert all(transfers.ahead(one) for one in hanging)
    assert all(one.started.wait(PATIENCE_S) for one in hanging)
    done = [threading.Event() for _ in range(4)]
    assert transfers.read(done[0].set) and transfers.call(done[1].set)
    assert transfers.errand(1, done[2].set) and transfers.write(1, done[3].set)
    assert all(one.wait(PATIENCE_S) for one in done)
    for one in hanging:
        one.go.set()


def test_close_forgets_what_was_to_be_done_ahead(transfers: Transfers) -> None:
    under_way = [Blocker() for _ in range(AHEAD_THREADS)]
    assert all(transfers.ahead(one) for one in under_way)
    assert all(one.started.wait(PATIENCE_S) for one in under_way)
    done = threading.Event()
    assert transfers.ahead(done.set)
    assert not transfers.close(0.01)
    assert not transfers.ahead(done.set)
    for one in under_way:
        one.go.set()
    assert transfers.drain(PATIENCE_S) and not done.is_set()


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
    crew.together([lambda: meet.wait(PATIENCE_S)] * 4)


def test_one_part_needs_no_thread(crew: Crew) -> None:
    before = threading.active_count()
    assert crew.together([threading.current_thread]) == [threading.current_thread()]
    assert threading.active_count() == before


def test_the_first_error_ends_a_call_when_all_have_stopped(crew: Crew) -> None:
    running = []
    begun = threading.Barrier(2)

    def fails() -> None:
        begun.wait(PATIENCE_S)
        raise OSError("broken")

    def lasts() -> None:
        running.append(1)
        begun.wait(PATIENCE_S)
        time.sleep(0.05)
        running.pop()

    with pytest.raises(OSError, match="broken"):
        crew.together([fails, lasts])
    assert not running


def test_a_busy_crew_leaves_the_work_to_the_caller(crew: Crew) -> None:
    hold, met = threading.Event(), threading.Barrier(5)
    busy = threading.Thread(target=lambda: crew.together([lambda: (met.wait(), hold.wait(PATIENCE_S))] * 4))
    busy.start()
    met.wait(PATIENCE_S)
    try:
        assert crew.together([lambda: 1] * 5) == [1] * 5
    finally:
        hold.set()
        busy.join()


def test_a_closed_crew_leaves_the_work_to_the_caller(crew: Crew) -> None:
    crew.close()
    crew.close()
    assert crew.together([lambda: 1] * 5) == [1] * 5
