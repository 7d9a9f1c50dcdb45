"""KVStoreTier when its store hangs, lies or is gone: every job ends, no row is written that isn't its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.tier.memory import Jobs, Primary
from kvstore.conformance.faulty import Plan, Rule
from kvstore.errors import TransientError
from tests.connectors.broken import How, break_follower
from tests.connectors.tier.test_connector import A, B, stored
from tests.connectors.tier.world import ROW, Engine, content, engine, keys
from tests.store.world import chain, put_faults
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine


class Gate:
    """What a `delay` waits for: a backend that hangs until it is opened."""

    def __init__(self) -> None:
        self._open = threading.Event()
        self.waiting = threading.Semaphore(0)

    def __call__(self, seconds: float) -> None:
        self.waiting.release()
        self._open.wait(PATIENCE_S)

    def open(self) -> None:
        self._open.set()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.open()


def faulty(one: Engine, *rules: Rule, gate: Gate | None = None) -> Plan:
    plan = Plan(*rules)
    put_faults(one.tier._store.payloads, plan, gate or time.sleep)
    return plan


def late(one: Engine) -> None:
    """The deadline of all jobs under way has passed."""
    jobs = one.tier._jobs
    jobs._clock = lambda: time.monotonic() + jobs._deadline_s


def pending(one: Engine) -> int:
    """Chunks that its jobs wait for."""
    return sum(len(job.pending) for job in one.tier._jobs._live.values())


def files(root: Path) -> list[Path]:
    return sorted(path for path in (root / "payloads").glob("*/??/*") if path.is_file())


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


# ---- hanging ------------------------------------------------------------------------------------


def test_a_hung_read_ends_its_job_and_never_writes_to_rows_of_others(tmp_path: Path, gate: Gate) -> None:
    stored(tmp_path, A)
    with engine(tmp_path, chunks=12) as one:
        faulty(one, Rule("delay", ("read",)), gate=gate)
        request = one.arrive("r1", A)
        until(lambda: (one.look(request, A), one.step(), gate.waiting.acquire(blocking=False))[2])
        assert one.look(request, A) is None
        late(one)
        assert one.lookup(request, A) == 0
        assert one.counts()["miss_blocks{deadline}"] == 12
        assert one.pinned() == 0
        # All rows belong to others now.
        other = one.arrive("r2", B)
        assert one.compute(other, B) == 12
        before = one.rows().tobytes()
        gate.open()
        assert one.tier._store.transfers.drain(PATIENCE_S)
        assert one.rows().tobytes() == before
        one.load(other, B)
        # The store is well again, and so is the engine.
        one.finish(request)
        one.settle()
        one.forget()
        assert one.serve("r3", A) == 12


def test_only_what_hangs_of_a_job_fails(tmp_path: Path, gate: Gate) -> None:
    with engine(tmp_path, segment={"max_blocks": 4}) as one:
        one.serve("r1", A)
        one.settle()
        catalogue, space = one.tier._store.maintenance, one.tier._lookups._space
        [last] = [each.segment for each in catalogue.segments(space.id) if each.record.depth == 8]
    with engine(tmp_path) as one:
        faulty(one, Rule("delay", ("read",), name=last.hex()), gate=gate)
        request = one.arrive("r2", A)
        until(lambda: (one.look(request, A), one.step(), gate.waiting.acquire(blocking=False))[2])
        until(lambda: pending(one) == 4)
        assert one.look(request, A) is None
        late(one)
        assert one.lookup(request, A) == 8
        one.load(request, A[:8])
        assert one.compute(request, A[8:]) == 4
        gate.open()


def test_a_request_is_not_promised_what_failed_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM looks up again after a failed load: "hit" would send it round for ever."""
    stored(tmp_path, A)
    with engine(tmp_path) as one:
        plan = faulty(one, Rule("transient", ("read",), name=files(tmp_path)[0].name))
        first, second = one.arrive("r1", A), one.arrive("r2", A)
        assert one.look(first, A) is one.look(second, A) is None
        assert one.lookup(first, A) == 0
        # It waited for the same load, so it doesn't wait for another.
        assert one.lookup(second, A) == 0
        assert plan.injected[("read", "transient")] == 1
        assert caplog.text.count(" are computed: ") == 1
        plan.replace()
        assert one.serve("r3", A) == 12
        assert one.look(first, A) == 12  # in the CPU tier, whoever brought it


def test_hung_writes_pin_for_a_while_and_then_only_lose(tmp_path: Path, gate: Gate) -> None:
    limits = {"write_threads": 2, "write_bytes": ROW * 8}
    with engine(tmp_path, transfers=limits, segment={"max_blocks": 2}) as one:
        faulty(one, Rule("delay", ("put",)), gate=gate)
        request = one.arrive("r1", A, B)
        one.compute(request, A)
        assert gate.waiting.acquire(timeout=PATIENCE_S)
        assert gate.waiting.acquire(timeout=PATIENCE_S)
        assert one.pinned() > 0
        late(one)
        one.settle()
        assert one.pinned() == 0
        # What was being written had been copied, so its rows may be given away and overwritten.
        before = one.counts()
        assert before["save_blocks{dropped}"] == 4
        one.forget()
        one.rows()[:] = 0
        one.finish(request)
        gate.open()
        assert one.tier._store.transfers.drain(PATIENCE_S)
        after = one.counts()
        # Two were on their way; what was queued behind them had come too late to be read.
        assert after["save_blocks{stored}"] == 4
        assert after["save_blocks{dropped}"] == 8
        found = [key for key in A if one.serve(key.hex(), [key])]
        assert len(found) == 4


def test_a_reset_and_a_shutdown_wait_for_nothing_that_hangs(tmp_path: Path, gate: Gate) -> None:
    stored(tmp_path, A)
    with engine(tmp_path, transfers={"drain_s": 0.2}) as one:
        faulty(one, Rule("delay", ("read", "put")), gate=gate)
        request = one.arrive("r1", A, B)
        until(lambda: (one.look(request, A), one.step(), gate.waiting.acquire(blocking=False))[2])
        one.compute(request, B)
        until(lambda: (one.step(), gate.waiting.acquire(blocking=False))[1])
        one.rows()[:] = 7
        began = time.monotonic()
        one.manager.reset_cache()
        assert not one.manager._jobs
        one.close()  # releases the view, which fails while anything has a hold of it
        assert time.monotonic() - began < PATIENCE_S / 2
        gate.open()


def test_what_is_queued_at_the_end_is_stored(tmp_path: Path) -> None:
    with engine(tmp_path) as one:
        request = one.arrive("r1", A)
        one.compute(request, A)
    with engine(tmp_path) as other:
        assert other.serve("r1", A) == 12


# ---- damage -------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", [flip, Path.unlink, lambda path: path.write_bytes(b"")])
def test_damaged_chunks_are_computed_and_stored_again(tmp_path: Path, damage: Any) -> None:
    with engine(tmp_path, segment={"max_blocks": 4}) as one:
        one.serve("r1", A)
        one.settle()
    head = files(tmp_path)[0]
    damage(head)
    with engine(tmp_path, segment={"max_blocks": 4}) as one:
        hits = one.serve("r2", A)
        assert hits in (0, 4, 8)
        one.settle()
        counts = one.counts()
        assert counts["quarantined_segments"] == 1
        assert counts["load_blocks"] == 8  # the others came, also those after the gap
        # Of what was computed only the bad ones are new to the store; the claim sees what it has.
        assert counts["save_blocks{stored}"] >= 4
        one.forget()
        assert one.serve("r3", A) == 12
        one.settle()


def test_a_chunk_under_the_wrong_name_is_never_loaded(tmp_path: Path) -> None:
    """As if two chunks had one digest: the full hash in the segment decides."""
    stored(tmp_path, A, B)
    with engine(tmp_path) as one:
        request = one.arrive("r1", A)
        assert one.look(request, A[:1]) is None
        one.step()
        one.tier._store.transfers.drain(PATIENCE_S)
        one.tier._lookups._take_answers()
        other = one.arrive("r2", B)
        one.look(other, B[:1])
        one.step()
        one.tier._store.transfers.drain(PATIENCE_S)
        one.tier._lookups._take_answers()
        asked = one.tier._lookups._asked
        asked[A[0]].run = asked[B[0]].run
        assert one.lookup(request, A[:1]) == 0
        assert one.counts()["miss_blocks{corrupt}"] == 1


# ---- being gone ---------------------------------------------------------------------------------


def test_an_index_that_fails_is_a_miss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored(tmp_path, A)

    def broken(*_: Any, **__: Any) -> Any:
        raise TransientError("find: the index is away")

    with engine(tmp_path) as one:
        with monkeypatch.context() as patched:
            patched.setattr(one.tier._store.index, "find", broken)
            assert one.serve("r1", A) == 0
        assert one.counts()["miss_blocks{unavailable}"] == 12
        one.settle()
        one.forget()
        assert one.serve("r2", A) == 12


def test_full_queues_are_misses(tmp_path: Path) -> None:
    stored(tmp_path, A)
    with engine(tmp_path) as one:
        transfers = one.tier._store.transfers
        real_call, real_read = transfers.call, transfers.read
        transfers.call = lambda job: False  # type: ignore[method-assign]
        request = one.arrive("r1", A)
        assert one.lookup(request, A) == 0
        assert one.counts()["miss_blocks{capacity}"] == 12
        one.finish(request)
        transfers.call = real_call  # type: ignore[method-assign]
        transfers.read = lambda job: False  # type: ignore[method-assign]
        assert one.serve("r2", A) == 0
        assert one.counts()["miss_blocks{capacity}"] == 24
        transfers.read = real_read  # type: ignore[method-assign]
        one.settle()
        assert one.pinned() == 0


def test_a_payload_store_that_is_down_is_not_promised(tmp_path: Path) -> None:
    stored(tmp_path, A, B)
    with engine(tmp_path, segment={"max_blocks": 1}, breaker={"failures": 1, "backoff_s": 30.0,
                "max_backoff_s": 30.0}) as one:  # fmt: skip
        store = one.tier._store
        assert store.backends.breaker is not None
        put_faults(store.payloads._inner, Plan(Rule("transient")))  # type: ignore[attr-defined]
        assert one.serve("r1", A) == 0
        began = time.monotonic()
        request = one.arrive("r2", B)
        assert one.lookup(request, B) == 0
        assert time.monotonic() - began < 25.0  # of the thirty that one job has
        assert one.counts()["miss_blocks{breaker_open}"] >= 12
        one.finish(request)
        one.settle()
        assert one.pinned() == 0


def test_a_bug_costs_a_job_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, faults: object
) -> None:
    stored(tmp_path, A)
    with engine(tmp_path) as one:
        with monkeypatch.context() as patch:
            patch.setattr("connectors.tier.load.reads", None)
            patch.setattr("connectors.tier.save.in_order", None)
            assert one.serve("r1", A) == 0
            one.settle()
        assert one.pinned() == 0
        with monkeypatch.context() as patch:
            patch.setattr(one.tier._lookups, "fetch", None)
            patch.setattr(one.tier._lookups, "_ask", None)
            one.forget()
            assert one.serve("r2", A) == 0
            one.settle()
        assert one.pinned() == 0
        one.forget()
        assert one.serve("r3", A) == 12


# ---- the parts ----------------------------------------------------------------------------------


def test_a_job_whose_rows_are_being_copied_ends_after_that() -> None:
    now = [0.0]
    jobs = Jobs(1.0, clock=lambda: now[0])
    job = jobs.start(1, [b"a", b"b"], is_load=True)
    assert jobs.enter([job])
    now[0] = 5.0
    assert jobs.take() == []
    jobs.leave([job])
    assert jobs.take() == [(job, True)]
    assert not jobs.enter([job])
    jobs.report(job, [b"a"], done=True)
    assert job.done == []


def test_a_job_that_is_given_up_half_submitted_is_over_for_its_threads_too() -> None:
    jobs = Jobs(60.0)
    job = jobs.start(1, [b"a", b"b"], is_load=True)
    jobs.report(job, [b"a"], done=True)
    jobs.give_up(1, [b"a", b"b"], is_load=True)
    assert [(each.number, each.done) for each, _ in jobs.take()] == [(1, [b"a"])]
    assert not jobs.enter([job])
    jobs.give_up(2, [b"c"], is_load=False)
    assert [(each.number, each.is_load, each.done) for each, _ in jobs.take()] == [(2, False, [])]


def test_the_end_of_all_jobs_waits_for_copies_only() -> None:
    jobs = Jobs(60.0)
    hung = jobs.start(1, [b"a"], is_load=True)
    copied = jobs.start(2, [b"b"], is_load=True)
    assert jobs.enter([copied])
    ended = threading.Event()
    thread = threading.Thread(target=lambda: (jobs.end_all(), ended.set()))
    thread.start()
    assert not ended.wait(0.1)
    jobs.leave([copied])
    assert ended.wait(PATIENCE_S)
    thread.join()
    assert {job.number for job, _ in jobs.take()} == {1, 2}
    assert not jobs.enter([hung])


def test_the_end_of_all_jobs_waits_for_a_copy_no_longer_than_for_a_job() -> None:
    jobs = Jobs(0.05)
    job = jobs.start(1, [b"a"], is_load=True)
    assert jobs.enter([job])
    with pytest.raises(TimeoutError, match="may still write to its rows"):
        jobs.end_all()
    jobs.leave([job])
    jobs.end_all()
    assert [job.number for job, _ in jobs.take()] == [1]


def test_rows_are_whole_chunks() -> None:
    import numpy as np

    memory = np.zeros((4, ROW), dtype=np.int8)
    primary = Primary(memoryview(memory))
    assert (primary.rows, primary.row_bytes) == (4, ROW)
    key = keys(chain(1))[0]
    primary.write([3, 1], [memoryview(content(key))] * 2)
    assert memory[1].tobytes() == memory[3].tobytes() == content(key)
    assert not memory[0].any() and not memory[2].any()
    into = [memoryview(bytearray(ROW)) for _ in range(2)]
    primary.read([0, 3], into)
    assert into[1] == content(key) and into[0] == bytes(ROW)
    with pytest.raises(ValueError, match="rows of bytes"):
        Primary(memoryview(bytearray(10)))


@pytest.mark.parametrize("how", ["always", "once"])
@pytest.mark.parametrize("number", range(3))
def test_a_broken_follower_costs_what_it_does_and_nothing_else(
    tmp_path: Path, faults: object, number: int, how: How
) -> None:
    stored(tmp_path, A)
    with engine(tmp_path) as one:
        assert len(list(one.tier._followers)) == 3, "one more is one more to break here"
        follower = list(one.tier._followers)[number]
        name, raised = type(follower).__name__, break_follower(follower, how)
        loaded = [0 if how == "always" and name == "Lookups" else 12]
        if how == "once":
            loaded += [0]
        for round_ in range(3):
            assert one.serve(f"r{round_}", A) in loaded
            one.settle()
            one.tier.get_stats()
            one.forget()
            assert one.pinned() == 0
        assert raised
        lookups, saves = list(one.tier._followers)[:2]
        assert not len(lookups) and not lookups._keys_of and not saves._open  # type: ignore[attr-defined]
