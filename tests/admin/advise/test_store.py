"""Replays, and the estimate from what the index remembers, held against the store itself."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.advise import store
from kvstore.admin.advise.remembered import remembered
from kvstore.admin.advise.reports import AdviceReport
from kvstore.admin.advise.sessions import sessions, told
from kvstore.admin.advise.store import Rules, StoreReplay, header_bytes, noted
from kvstore.admin.advise.traces import Assumed, Request, Trace, read_traces
from kvstore.admin.backends import Cache
from kvstore.admin.progress import Silent
from kvstore.index.eviction import watermarks
from kvstore.index.sessions import USE, Hint
from kvstore.keys import NO_SALT, NO_SESSION, SegmentId, session_id
from kvstore.store.trace import TraceRecorder
from kvstore.threads.transfers import Transfers
from schemas.records import PartRecord, SegmentRecord
from schemas.settings import SessionSettings, TraceSettings, TransferSettings
from tests.admin.advise import store_run
from tests.admin.advise.store_run import BLOCK_BYTES, Ran, namespace, run, tell_megabytes_apart, world
from tests.admin.advise.test_traces import mooncake, random_trace, read
from tests.admin.advise.walk import walk
from tests.admin.advise.workloads import Asked, requests

MIB = 1 << 20
CUT = 5


def recorded(
    folder: Path, capacity: int, asked: list[Asked], cut: int, *, second_use: bool = False
) -> tuple[Ran, Trace]:
    """What the store served, and the trace that it recorded of it."""
    transfers = Transfers(TransferSettings())
    trace = TraceRecorder(TraceSettings(folder=str(folder)), transfers.errand)
    ran = run(capacity, cut, asked, trace=trace, second_use=second_use)
    transfers.close()
    trace.close()
    return ran, read_traces([folder], Assumed(), Silent())


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return requests(3, 700)


def rules(cut: int) -> Rules:
    return Rules([cut], store_run.header_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(("capacity", "cut"), [(24 * MIB, CUT), (96 * MIB, 2), (400 * MIB, 16)])
def test_every_request_finds_what_it_finds_in_the_store(
    tmp_path: Path, asked: list[Asked], capacity: int, cut: int
) -> None:
    ran, trace = recorded(tmp_path, capacity, asked, cut)
    assert sum(ran.hits) > 0.2 * ran.asked
    assert list(StoreReplay(trace, rules(cut), capacity).run().hits) == ran.hits
    # A header's length is about right without a look at one.
    about = StoreReplay(trace, Rules([cut], header_bytes), capacity).run().hits
    assert sum(about) == pytest.approx(sum(ran.hits), rel=0.02)


@pytest.mark.slow
def test_saving_only_what_is_asked_for_twice(tmp_path: Path, asked: list[Asked]) -> None:
    """The sketch takes a few new blocks for noted ones; otherwise it is the same."""
    ran, trace = recorded(tmp_path, 64 * MIB, asked, CUT, second_use=True)
    hits = StoreReplay(trace, rules(CUT), 64 * MIB).run(noted(trace, 86400.0)).hits
    assert sum(hits) == pytest.approx(sum(ran.hits), rel=0.01)
    assert sum(hits) != sum(StoreReplay(trace, rules(CUT), 64 * MIB).run().hits)


def served_by(spaces: list[list[Asked]], capacity: int) -> tuple[AdviceReport, int]:
    """Several namespaces' requests in one store: what its ghosts say of once and twice as much more, and how
    many blocks were served."""
    order = sorted((at_s, number, chain) for number, asked in enumerate(spaces) for at_s, chain in asked)
    with world(capacity, CUT) as it:
        opened = [
            it.store.open(namespace(f"model-{number}"), block_bytes=BLOCK_BYTES)
            for number in range(len(spaces))
        ]
        for space in opened:
            space.register()
        for at_s, number, chain in order:
            it.serve(opened[number], at_s, chain)
        report = remembered(Cache(it.store.settings), [2 * capacity, 3 * capacity])
        assert report.asked_blocks == it.ran.asked
        assert report.curves[0].points[0].hit_blocks == sum(it.ran.hits)
        return report, sum(it.ran.hits)


#: How far the estimate may be from the truth, as a share of all blocks asked for. It counts what was evicted
#: since, though of a larger cache some of that would not have been stored a second time; and within a step
#: of capacity it goes in proportion.
_ERROR = 0.01


@pytest.mark.parametrize(
    "spaces",
    [[requests(5, 1500)], [requests(5, 1200), requests(6, 600, gap_s=4.0)]],
    ids=["one", "two"],
)
@pytest.mark.slow
def test_what_the_ghosts_say_of_more_capacity_comes_true(
    monkeypatch: pytest.MonkeyPatch, spaces: list[list[Asked]]
) -> None:
    tell_megabytes_apart(monkeypatch)
    capacity = 64 * MIB
    report, before = served_by(spaces, capacity)
    for point in report.curves[0].points[1:]:
        truth = served_by(spaces, point.capacity_bytes)[1]
        assert truth - before > 0.03 * report.asked_blocks
        assert point.hit_blocks == pytest.approx(truth, abs=_ERROR * report.asked_blocks)
    if len(spaces) > 1:
        assert sum(line.share for line in report.namespaces) == pytest.approx(1.0)
        assert all(0.1 < line.share < 0.9 for line in report.namespaces)


@pytest.mark.parametrize(
    ("seed", "share", "gap_s", "silent"),
    [
        (3, 0.5, 2.0, 4),
        (4, 0.1, 2.0, 4),
        (5, 0.0, 2.0, 4),
        (6, 0.5, 60.0, 4),
        (7, 0.3, 600.0, 4),
        (8, 0.1, 60.0, 30),
    ],
)
def test_what_is_said_of_sessions_does_in_a_replay_what_it_does_in_the_store(
    tmp_path: Path, seed: int, share: float, gap_s: float, silent: int
) -> None:
    """Conversations that say when they end, for how long they wait, or what they are worth: in minutes, in
    hours, and in days, which is longer than anything is retained."""
    draw = random.Random(seed)
    capacity, cut = 24 * MIB, 2
    asked = requests(seed, 500, gap_s=gap_s)
    transfers = Transfers(TransferSettings())
    recorder = TraceRecorder(TraceSettings(folder=str(tmp_path)), transfers.errand)
    with world(capacity, cut, recorder, sessions=SessionSettings(retain_share=share)) as it:
        space = it.store.open(namespace(), block_bytes=BLOCK_BYTES)
        space.register()
        for at_s, chain in asked:
            # Requests of one system prompt are a session, more or less.
            name = f"{chain[0]}-{draw.randrange(3)}"
            hint = draw.choice(
                [
                    *[USE] * silent,
                    Hint(end=True),
                    Hint(retain_s=draw.choice([30.0, 300.0, 3000.0, 1e6])),
                    Hint(priority=draw.choice(["low", "normal", "high"])),
                ]
            )
            session = session_id(NO_SALT, name) if draw.random() < 0.8 else NO_SESSION
            it.serve(space, at_s, chain, session=session, hint=hint if session else USE)
        hits, evicted = it.ran.hits, it.store.counters.snapshot()["evicted_segments"]
    transfers.close()
    recorder.close()
    trace = read_traces([tmp_path], Assumed(), Silent())
    assert trace.said and not trace.skipped and evicted > 500
    owners = sessions(trace)
    replay = StoreReplay(trace, Rules([cut], store_run.header_bytes, share), capacity)
    assert list(replay.run(None, owners, told(trace, owners)).hits) == hits


# ---- the walk of the index, and the window of admission


class Walks(StoreReplay):
    """Every look-up is the walk of the index."""

    overlaps = 0

    def _match(self, chain: Sequence[int], begin: int, end: int) -> Any:
        named: dict[SegmentId, Any] = {}

        def lookup(position: int) -> tuple[SegmentId, int] | None:
            segment = self._entries[chain[begin + position]]
            if segment is None or not segment.living:
                return None
            name = SegmentId(segment.number.to_bytes(8, "big"))
            named[name] = segment
            return name, begin + position - segment.begin

        runs = walk(end - begin, lookup, lambda name: LIVING)
        return [named[run.segment] for run in runs], [begin + run.start + run.count for run in runs]

    def _save(self, request: Request, *where: int) -> None:
        before = {block: self._entries[block] for block in request.chain}
        lived = {block for block, segment in before.items() if segment is not None and segment.living}
        super()._save(request, *where)
        self.overlaps += sum(self._entries[block] is not before[block] for block in lived)


LIVING = SegmentRecord((PartRecord(0, (0,)),), 1, "none", 0)


@pytest.mark.parametrize("marks", [None, (0.95, 0.90), (1.0, 0.7)])
@pytest.mark.parametrize("cut", [1, 2, 3, 64])
@pytest.mark.parametrize("capacity", [12, 60, 150, 300, 600, 3000])
def test_entries_alone_find_what_the_walk_finds(
    tmp_path: Path,
    cut: int,
    capacity: int,
    marks: tuple[float, float] | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if marks is not None:
        monkeypatch.setattr(
            store, "watermarks", lambda capacity: tuple(int(mark * capacity) for mark in marks)
        )
    trace = random_trace(tmp_path, 7, spaces=2)
    rules = Rules([cut] * 2, lambda slots: 3)
    quick, exact = StoreReplay(trace, rules, capacity), Walks(trace, rules, capacity)
    assert quick.run() == exact.run()
    assert quick.used_bytes <= (watermarks(capacity)[0] if marks is None else marks[0] * capacity)
    assert quick.stored_bytes == quick.used_bytes + quick.evicted_bytes


@pytest.mark.parametrize("gap_ms", [0, 1000, 40_000])
def test_entries_alone_find_it_where_segments_overlap(
    tmp_path: Path, gap_ms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a request finds room that its middle has been evicted for, and is then stored once more by
    requests that are cut in other places."""
    draw = random.Random(3)
    lengths = [draw.randrange(1, 14) for _ in range(2000)]
    trace = read(tmp_path, mooncake(*[list(range(length)) for length in lengths], gap_ms=gap_ms))
    monkeypatch.setattr(store, "watermarks", lambda capacity: (0.75 * capacity, int(0.45 * capacity)))
    overlaps = 0
    for capacity in (70, 80, 90, 100, 110):
        rules = Rules([4], lambda slots: 0)
        quick, exact = StoreReplay(trace, rules, capacity), Walks(trace, rules, capacity)
        assert quick.run() == exact.run()
        overlaps += exact.overlaps
    assert overlaps > 100


def test_second_use_forgets_after_two_windows(tmp_path: Path) -> None:
    trace = read(tmp_path, mooncake([1, 2], [1, 2, 3], [1, 9], [1, 2, 3], gap_ms=60_000))
    assert noted(trace, 3600.0) == [0, 2, 1, 3]
    assert noted(trace, 60.0) == [0, 2, 1, 1]
    assert noted(trace, 20.0) == [0, 0, 0, 0]
    replay = StoreReplay(trace, Rules([4], lambda slots: 3), 10_000)
    assert replay.run(noted(trace, 3600.0)).hits == [0, 0, 1, 2]
