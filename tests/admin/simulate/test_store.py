"""The simulation, and the ghosts' estimate, held against the store itself."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from kvstore.admin.backends import Cache
from kvstore.admin.progress import Silent
from kvstore.admin.simulate.reports import WhatIfReport
from kvstore.admin.simulate.sessions import sessions, told
from kvstore.admin.simulate.store import Rules, StoreReplay, header_bytes, noted
from kvstore.admin.simulate.traces import Assumed, Trace, read_traces
from kvstore.admin.simulate.whatif import whatif
from kvstore.index import eviction
from kvstore.index.sessions import USE, Hint
from kvstore.keys import NO_SALT, NO_SESSION, session_id
from kvstore.store.trace import TraceRecorder
from kvstore.threads.transfers import Transfers
from schemas.settings import SessionSettings, TraceSettings, TransferSettings
from tests.admin.simulate import store_run
from tests.admin.simulate.store_run import BLOCK_BYTES, Ran, namespace, run, world
from tests.admin.simulate.workloads import Asked, requests

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
    return Rules([cut], store_run.header_bytes)


@pytest.mark.slow
@pytest.mark.parametrize(("capacity", "cut"), [(24 * MIB, CUT), (96 * MIB, 2), (400 * MIB, 16)])
def test_every_request_finds_what_it_finds_in_the_store(
    tmp_path: Path, asked: list[Asked], capacity: int, cut: int
) -> None:
    ran, trace = recorded(tmp_path, capacity, asked, cut)
    assert sum(ran.hits) > 0.2 * ran.asked
    assert simulated(trace, rules(cut), capacity) == ran.hits
    # A header's length is about right without a look at one.
    about = simulated(trace, Rules([cut], header_bytes), capacity)
    assert sum(about) == pytest.approx(sum(ran.hits), rel=0.02)


@pytest.mark.slow
def test_capacity_matters_here(asked: list[Asked]) -> None:
    """Or the test above would say nothing."""
    small, large = run(24 * MIB, CUT, asked[:400]), run(400 * MIB, CUT, asked[:400])
    assert sum(large.hits) > 1.2 * sum(small.hits)


@pytest.mark.slow
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


@pytest.mark.parametrize(("seed", "share"), [(3, 0.5), (4, 0.1), (5, 0.0)])
def test_what_is_said_of_sessions_does_in_a_replay_what_it_does_in_the_store(
    tmp_path: Path, seed: int, share: float
) -> None:
    """Conversations that say when they end, for how long they wait, or what they are worth."""
    draw = random.Random(seed)
    capacity, cut = 24 * MIB, 2
    asked = requests(seed, 500)
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
                    *[USE] * 4,
                    Hint(end=True),
                    Hint(retain_s=draw.choice([30.0, 300.0, 3000.0])),
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
    waiting = told(trace, owners)
    replay = StoreReplay(trace, Rules([cut], store_run.header_bytes, share), capacity)
    found = []
    for number, request in enumerate(trace.requests):
        while waiting and waiting[0].after < number:
            replay.tell(waiting.pop(0))
        found.append(replay.serve(request, len(request.chain), owners[number]))
    assert found == hits
