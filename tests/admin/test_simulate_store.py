"""The simulation, and the ghosts' estimate, held against the store itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore import eviction
from kvstore.admin.cache import Cache
from kvstore.admin.progress import Silent
from kvstore.admin.replay_store import Rules, StoreReplay, header_bytes, noted
from kvstore.admin.traces import Assumed, Trace, read_traces
from kvstore.admin.whatif import whatif
from kvstore.trace import Trace as Recorder
from kvstore.transfers import Transfers
from schemas.settings import TraceSettings, TransferSettings
from schemas.simulation import WhatIfReport
from tests.admin import store_run
from tests.admin.store_run import BLOCK_BYTES, Ran, namespace, run, world
from tests.admin.workloads import Asked, requests

MIB = 1 << 20
CUT = 5


def recorded(
    folder: Path, capacity: int, asked: list[Asked], cut: int, *, second_use: bool = False
) -> tuple[Ran, Trace]:
    """What the store served, and the trace that it recorded of it."""
    transfers = Transfers(TransferSettings())
    trace = Recorder(TraceSettings(folder=str(folder)), transfers.errand)
    ran = run(capacity, cut, asked, trace=trace, second_use=second_use)
    transfers.close()
    trace.close()
    return ran, read_traces([folder], Assumed(), Silent())


def simulated(trace: Trace, rules: Rules, capacity: int, notes: list[int] | None = None) -> list[int]:
    replay = StoreReplay(trace, rules, capacity)
    return [
        replay.serve(request, len(request.chain) if notes is None else notes[number])
        for number, request in enumerate(trace.requests)
    ]


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return requests(3, 700)


def rules(cut: int) -> Rules:
    return Rules([cut], 0.95, 0.90, store_run.header_bytes)


@pytest.mark.parametrize(("capacity", "cut"), [(24 * MIB, CUT), (96 * MIB, 2), (400 * MIB, 16)])
def test_every_request_finds_what_it_finds_in_the_store(
    tmp_path: Path, asked: list[Asked], capacity: int, cut: int
) -> None:
    ran, trace = recorded(tmp_path, capacity, asked, cut)
    assert sum(ran.hits) > 0.2 * ran.asked
    assert simulated(trace, rules(cut), capacity) == ran.hits
    # A header's length is about right without a look at one.
    about = simulated(trace, Rules([cut], 0.95, 0.90, header_bytes), capacity)
    assert sum(about) == pytest.approx(sum(ran.hits), rel=0.02)


def test_capacity_matters_here(asked: list[Asked]) -> None:
    """Or the test above would say nothing."""
    small, large = run(24 * MIB, CUT, asked[:400]), run(400 * MIB, CUT, asked[:400])
    assert sum(large.hits) > 1.2 * sum(small.hits)


def test_saving_only_what_is_asked_for_twice(tmp_path: Path, asked: list[Asked]) -> None:
    """The sketch takes a few new blocks for noted ones; otherwise it is the same."""
    ran, trace = recorded(tmp_path, 64 * MIB, asked, CUT, second_use=True)
    notes = noted(trace, 86400.0)
    hits = simulated(trace, rules(CUT), 64 * MIB, notes)
    assert sum(hits) == pytest.approx(sum(ran.hits), rel=0.01)
    assert sum(hits) != sum(simulated(trace, rules(CUT), 64 * MIB))


def served_by(spaces: list[list[Asked]], capacity: int) -> tuple[WhatIfReport, int]:
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
        report = whatif(Cache(it.store.settings), [capacity, 2 * capacity])
        assert report.asked_blocks == it.ran.asked
        assert report.served_blocks == sum(it.ran.hits)
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
    # Distances are told apart from 64 MiB on: of a store of gigabytes, and this one has megabytes.
    monkeypatch.setattr(eviction, "GHOST_LEAST", MIB)
    capacity = 64 * MIB
    report, before = served_by(spaces, capacity)
    for gain in report.gains:
        truth = served_by(spaces, capacity + gain.more_bytes)[1] - before
        assert truth > 0.03 * report.asked_blocks
        assert gain.blocks == pytest.approx(truth, abs=_ERROR * report.asked_blocks)
    if len(spaces) > 1:
        assert sum(line.share for line in report.namespaces) == pytest.approx(1.0)
        assert all(0.1 < line.share < 0.9 for line in report.namespaces)
