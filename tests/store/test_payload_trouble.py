"""Reads that are planned, and payloads that can't be read: gaps, bad copies, breakers, late uploads."""

from __future__ import annotations

import dataclasses
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.breaker import Breaker
from kvstore.conformance.faulty import FaultyPayloads, Plan, Rule
from kvstore.errors import BreakerOpen, CorruptPayload, PayloadMissing, TransientError
from kvstore.index.port import Run
from kvstore.keys import NamespaceId, payload_name
from kvstore.payloads.breaking import BreakingPayloads
from kvstore.payloads.buffers import total
from kvstore.payloads.local import LocalPayloads
from kvstore.store.quarantine import HourlyBound, Quarantine
from kvstore.store.reading import PayloadLate, requests_of
from kvstore.store.space import Space
from kvstore.store.store import Store
from schemas.records import PartRecord, pack_record
from schemas.settings import BreakerSettings, Settings
from tests.admin.repair.damage import RawSqlite
from tests.store.world import (
    SLOT_BYTES,
    buffers,
    chain,
    content,
    fetch,
    keys,
    make_store,
    match,
    namespace,
    open_space,
    slots,
    with_parts,
)
from tests.waiting import PATIENCE_S, until

A = chain(*range(40))


class Remote(LocalPayloads):
    """Notes its reads."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[tuple[int, int, int | None]] = []

    def read(
        self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None
    ) -> int | None:
        self.reads.append((offset, total(into), size))
        return super().read(name, offset, into, size=size)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = with_parts(make_store(tmp_path), payloads=Remote(tmp_path))
    yield made
    made.close()


@pytest.fixture
def space(store: Store) -> Space:
    return open_space(store)


def part_of(space: Space, hashes: Sequence[bytes], first: int, count: int) -> Run:
    [run] = match(space, hashes).runs
    return Run(first, run.segment, first, count, run.record)


def load(space: Space, run: Run) -> None:
    into = buffers(run.count)
    space.load(run, keys(A[run.start : run.start + run.count]), into)
    assert [bytes(view) for view in into] == [content(one) for one in A[run.start : run.start + run.count]]


# One read or two


@pytest.mark.parametrize("codec", ["none", "lz4", "planes-lz4"])
def test_header_and_slots_are_one_read_if_they_are_neighbours(store: Store, codec: str) -> None:
    space = open_space(store, codec=codec)
    space.save(slots(A))
    run = part_of(space, A, 0, 10)
    [part] = run.record.parts
    load(space, run)
    assert store.payloads.reads == [(0, part.data_start + part.slot_range(0, 10)[1], part.nbytes)]


@pytest.mark.parametrize("codec", ["none", "lz4", "planes-lz4"])
@pytest.mark.parametrize("spare", [0, -1])
def test_a_gap_is_read_through_if_that_is_cheaper_than_a_request(
    store: Store, codec: str, spare: int
) -> None:
    space = open_space(store, codec=codec)
    space.save(slots(A))
    run = part_of(space, A, 7, 5)
    [part] = run.record.parts
    start, length = part.slot_range(7, 5)
    through = with_parts(store, gap_bytes=start - part.data_start + spare)
    load(open_space(through, codec=codec), run)
    if spare == 0:
        assert store.payloads.reads == [(0, start + length, part.nbytes)]
    else:
        assert store.payloads.reads == [(0, part.data_start, part.nbytes), (start, length, part.nbytes)]
    assert requests_of(run, 0, through.backends.gap_bytes) == len(store.payloads.reads)
    assert requests_of(run, 1, 0) == 1, "of a part that the record lacks nothing is read"


def test_a_record_that_makes_no_sense_is_not_believed(space: Space) -> None:
    space.save(slots(A))
    run = part_of(space, A, 0, 2)
    for part in (PartRecord(1 << 31, (SLOT_BYTES,) * 40), PartRecord(4096, (1 << 40,) * 40)):
        hostile = dataclasses.replace(run, record=dataclasses.replace(run.record, parts=(part,)))
        with pytest.raises(CorruptPayload, match="makes no sense"):
            space.load(hostile, keys(A[:2]), buffers(2))


# Copies


def test_a_bad_copy_is_dropped_and_the_original_read(tmp_path: Path, store: Store, space: Space) -> None:
    space.save(slots(A[:3]))
    [run] = match(space, A[:3]).runs
    path = tmp_path / payload_name(space.id, run.segment, 0)
    good = path.read_bytes()
    path.write_bytes(good[:-1] + bytes([good[-1] ^ 1]))

    def restore(name: str) -> bool:
        path.write_bytes(good)
        return True

    space = open_space(with_parts(store, drop_copy=restore))
    load(space, run)
    counted = store.counters.snapshot()
    assert (counted["dropped_copies"], counted["quarantined_segments"]) == (1, 0)
    assert match(space, A[:3]).blocks == 3


def test_a_bad_original_behind_a_bad_copy_is_quarantined(tmp_path: Path, store: Store, space: Space) -> None:
    space.save(slots(A[:3]))
    [run] = match(space, A[:3]).runs
    path = tmp_path / payload_name(space.id, run.segment, 0)
    path.write_bytes(path.read_bytes()[:-1])
    asked: list[str] = []
    space = open_space(with_parts(store, drop_copy=lambda name: not asked.append(name)))
    with pytest.raises(CorruptPayload):
        fetch(space, A[:3], match(space, A[:3]))
    assert len(asked) == 1
    assert store.counters.snapshot()["quarantined_segments"] == 1
    assert match(space, A[:3]).blocks == 0


def test_who_finds_everything_bad_does_not_empty_the_index(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A share that isn't mounted, seen by one of two nodes."""
    now = [1000.0]
    node = make_store(tmp_path)
    space = open_space(node)
    chains = [chain(1000 + i) for i in range(16)]
    for one in chains:
        space.save(slots(one))
    other = with_parts(make_store(tmp_path), payloads=LocalPayloads(tmp_path / "not mounted"))
    quarantine = Quarantine(other.backends, HourlyBound(3, lambda: now[0]))
    blind = Space(other.backends, quarantine, other.health, other.rounds, namespace(), 1000)

    def look(chains: Sequence[list[bytes]]) -> int:
        """How many of these blocks are left in the index."""
        for one in chains:
            with pytest.raises(PayloadMissing):
                fetch(blind, one, match(blind, one))
            # It has learnt not to ask for that one again.
            assert match(blind, one).blocks == 0
        return sum(match(space, one).blocks for one in chains)

    assert look(chains[:8]) == 5
    assert other.counters.snapshot()["quarantined_segments"] == 8
    now[0] += 3599
    assert look(chains[8:11]) == 3
    assert caplog.text.count("more than 3 segments failed verification within an hour") == 1
    now[0] += 2
    assert look(chains[11:]) == 2
    node.close()
    other.close()


def test_what_had_been_evicted_already_counts_in_no_bound(tmp_path: Path) -> None:
    """It was evicted between its match and its load, and its payload is gone."""
    store = make_store(tmp_path)
    bound = HourlyBound(2)
    space = Space(
        store.backends, Quarantine(store.backends, bound), store.health, store.rounds, namespace(), 1000
    )
    chains = [chain(1000 + i) for i in range(6)]
    for one in chains:
        space.save(slots(one))
    found = {one[0]: match(space, one) for one in chains}
    runs = [match.runs[0] for match in found.values()]
    store.payloads.delete([payload_name(space.id, run.segment, 0) for run in runs])
    stale, lost = chains[:4], chains[4:]
    gone = [run.segment for run in runs[:4]]
    assert store.maintenance.evict(space.id, gone, delete_after_s=0, rule="lru") == 4
    for one in stale:
        with pytest.raises(PayloadMissing):
            fetch(space, one, found[one[0]])
    for one in lost:
        assert not bound.reached
        with pytest.raises(PayloadMissing):
            fetch(space, one, found[one[0]])
        assert match(open_space(store), one).blocks == 0
    assert bound.reached
    store.close()


class Unheard:
    """An index whose first answer to each of some evictions is lost; `done`: they were done."""

    def __init__(self, inner: Any, *, done: bool) -> None:
        self._inner = inner
        self._done = done
        self.lost = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def evict(self, *args: Any, **options: Any) -> int:
        if self.lost:
            if self._done:
                self._inner.evict(*args, **options)
            raise TransientError("no answer")
        evicted: int = self._inner.evict(*args, **options)
        return evicted


def bad(store: Store, index: Unheard, bound: HourlyBound) -> tuple[Quarantine, list[Run]]:
    """A quarantine over this index, and segments that are visible there."""
    space = open_space(store)
    chains = [chain(1000 + i) for i in range(6)]
    for one in chains:
        space.save(slots(one))
    return Quarantine(with_parts(store, index=index).backends, bound), [
        run for one in chains for run in match(space, one).runs
    ]


def test_an_eviction_whose_answer_was_lost_counts(tmp_path: Path) -> None:
    """Else a process that finds everything bad, and whose network is bad, could empty the index."""
    store = make_store(tmp_path)
    index, bound = Unheard(store.backends.index, done=True), HourlyBound(3)
    quarantine, runs = bad(store, index, bound)
    name = open_space(store).id
    for run in runs:
        index.lost = True
        quarantine.add(name, run.segment)
        index.lost = False
        quarantine.tell(name)
    assert bound.reached
    assert sum(match(open_space(store), chain(1000 + i)).blocks for i in range(6)) == 3
    store.close()


def test_what_the_index_can_not_be_told_leaves_the_bound_after_an_hour(tmp_path: Path) -> None:
    """A namespace whose shard stays down takes quarantine away from no other one."""
    now = [0.0]
    store = make_store(tmp_path)
    index, bound = Unheard(store.backends.index, done=False), HourlyBound(3, lambda: now[0])
    quarantine, runs = bad(store, index, bound)
    for run in runs[:3]:
        quarantine.add(NamespaceId("0" * 16), run.segment)
    index.lost = False
    quarantine.add(open_space(store).id, runs[3].segment)
    assert match(open_space(store), chain(1003)).blocks == 1, "the bound is reached"
    now[0] += 3601.0
    quarantine.add(open_space(store).id, runs[4].segment)
    assert match(open_space(store), chain(1004)).blocks == 0
    store.close()


# A breaker in front of everything


class Down:
    """A store whose payloads can be switched off."""

    def __init__(self, root: Path) -> None:
        self.plan = Plan()
        store = make_store(root)
        self.breaker = Breaker("payloads", BreakerSettings(failures=1, backoff_s=0.05, max_backoff_s=0.05))
        inner = FaultyPayloads(store.payloads, self.plan)
        payloads = BreakingPayloads(inner, self.breaker, reads_probe=False)
        self.store = with_parts(store, payloads=payloads, breaker=self.breaker)
        self.space = open_space(self.store)


def test_what_cannot_be_read_is_not_promised_and_comes_back_by_itself(tmp_path: Path) -> None:
    down = Down(tmp_path)
    down.space.save(slots(A))
    found = match(down.space, A)
    down.plan.replace(Rule("transient"))
    with pytest.raises(TransientError):
        fetch(down.space, A, found)
    reads = down.plan.injected[("read", "transient")]
    refused = match(down.space, A)
    assert (refused.blocks, refused.reason) == (0, "breaker_open")
    with pytest.raises(BreakerOpen):
        fetch(down.space, A, found)
    # However long it lasts, no read is the probe: a request waits for it. Pings are.
    until(lambda: match(down.space, A) and down.plan.injected[("ping", "transient")] >= 3)
    missed = down.store.counters.snapshot
    until(lambda: match(down.space, A) and missed()["miss_blocks{breaker_open}"] >= 80)
    assert down.plan.injected[("read", "transient")] == reads
    down.plan.replace()
    until(lambda: match(down.space, A).blocks)
    assert fetch(down.space, A, match(down.space, A)) == [content(one) for one in A]
    down.store.close()


def test_one_probe_at_a_time(tmp_path: Path) -> None:
    down, over = Down(tmp_path), threading.Event()
    down.store.payloads._inner._sleep = lambda seconds: over.wait(PATIENCE_S)  # type: ignore[attr-defined]
    down.plan.replace(Rule("transient", verbs=("read",)), Rule("delay", verbs=("ping",)))
    down.space.save(slots(A))
    found = match(down.space, A)
    with pytest.raises(TransientError):
        fetch(down.space, A, found)
    time.sleep(0.06)
    for _ in range(50):
        match(down.space, A)
    assert down.plan.injected[("ping", "delay")] <= 1
    over.set()
    down.store.close()


# Write-back: what another node has not uploaded yet


def tiers(settings: Settings, tmp_path: Path, write: str) -> Settings:
    given: dict[str, Any] = {
        "fast": f"file://{tmp_path}/fast",
        "slow": f"file://{tmp_path}/slow",
        "write": write,
    }
    return Settings.model_validate({"payloads": given, "index": settings.index_url})


def test_what_is_not_uploaded_yet_is_a_miss_and_stays(tmp_path: Path) -> None:
    now = [1_700_000_000.0]
    store = make_store(tmp_path, clock=lambda: now[0])
    store = with_parts(store, settings=tiers(store.settings, tmp_path, "back"))
    space = open_space(store)
    space.save(slots(A))
    found = match(space, A)
    (tmp_path / payload_name(space.id, found.runs[0].segment, 0)).unlink()
    now[0] += 599
    with pytest.raises(PayloadLate):
        fetch(space, A, found)
    assert match(space, A).blocks == 40
    assert store.counters.snapshot()["miss_blocks{missing}"] == 40
    now[0] += 2
    with pytest.raises(PayloadMissing):
        fetch(space, A, found)
    assert match(space, A).blocks == 0
    store.close()


def test_with_write_through_what_is_missing_is_lost(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    store = with_parts(store, settings=tiers(store.settings, tmp_path, "through"))
    space = open_space(store)
    space.save(slots(A))
    found = match(space, A)
    (tmp_path / payload_name(space.id, found.runs[0].segment, 0)).unlink()
    with pytest.raises(PayloadMissing):
        fetch(space, A, found)
    assert match(space, A).blocks == 0
    store.close()


# Deleting what was evicted


def test_evicted_payloads_are_deleted_with_one_call_and_a_bad_one_keeps_no_other(tmp_path: Path) -> None:
    plan = Plan(Rule("delay", verbs=("delete",)))
    now = [1_700_000_000.0]
    store = make_store(tmp_path, plan=plan, clock=lambda: now[0])
    space = open_space(store)
    for start in range(0, 40, 4):
        space.save(slots(A[: start + 4]))
    runs = match(space, A).runs
    assert len(runs) == 10
    store.index.evict(space.id, [run.segment for run in runs], delete_after_s=0, rule="admin")
    stubborn = payload_name(space.id, runs[3].segment, 0)
    plan.replace(Rule("delay", verbs=("delete",)), Rule("permission", verbs=("delete",), name=stubborn))
    store.rounds.housekeep()
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.glob("*/??/*")] == [stubborn]
    plan.replace(Rule("delay", verbs=("delete",)))
    before = plan.injected[("delete", "delay")]
    store.rounds.housekeep()
    assert plan.injected[("delete", "delay")] == before + 1
    assert list(tmp_path.glob("*/??/*")) == []
    assert store.counters.snapshot()["deleted_payloads"] == 10
    store.close()


# What the index says


MOST = (1 << 32) - 1
#: The layout that a forged record has, of as many slots and ranks as it says.
FORGED: dict[str, Callable[[PartRecord], tuple[PartRecord, ...]]] = {
    "a start at 4 GiB": lambda part: (dataclasses.replace(part, data_start=MOST),),
    "slots of 4 GiB": lambda part: (dataclasses.replace(part, slot_sizes=(MOST,) * 40),),
    "slots of 4 GiB before those": lambda part: (
        dataclasses.replace(part, slot_sizes=(MOST,) * 20 + tuple(part.slot_sizes[20:])),
    ),
    "65535 slots": lambda part: (dataclasses.replace(part, slot_sizes=tuple(part.slot_sizes[:1]) * 65535),),
    "65535 slots of 4 GiB": lambda part: (PartRecord(MOST, (MOST,) * 65535),),
    "255 ranks": lambda part: (part,) * 255,
    "255 ranks of 1024 slots of 4 GiB": lambda part: (PartRecord(MOST, (MOST,) * 1024),) * 255,
}


@pytest.mark.parametrize("what", FORGED)
@pytest.mark.parametrize("gap_bytes", [0, 1 << 20])
def test_a_forged_record_loads_nothing_and_takes_no_memory(tmp_path: Path, what: str, gap_bytes: int) -> None:
    """The attack: whoever can write to the index makes a record say what no payload holds."""
    with make_store(tmp_path) as store:
        store = with_parts(store, gap_bytes=gap_bytes)
        space = open_space(store)
        space.save(slots(A))
        [run] = match(space, A).runs
        parts = FORGED[what](run.record.parts[0])
        forged = dataclasses.replace(run.record, parts=parts, slots=len(parts[0].slot_sizes))
        raw = RawSqlite(tmp_path / "index.sqlite")
        raw.change_record(space.id, run.segment, lambda record: pack_record(forged))
        wanted, into = A[20:24], buffers(4)
        tracemalloc.start()
        try:
            found = match(space, A)
            for run in found.runs:
                assert len(run.record.parts) == len(parts), "it was not met"
                inside = dataclasses.replace(run, slot=20, count=4)
                with pytest.raises(CorruptPayload):
                    space.load(inside, keys(wanted), into)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 8 << 20
        assert not found.runs or match(space, A).blocks == 0, "it is not promised again"
