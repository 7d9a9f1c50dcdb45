"""A jittered time is near what it is meant to be, and no other process's."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from kvstore.index.redis.sentinel import Sentinels
from kvstore.jitter import jittered, sooner
from kvstore.store.rounds import Rounds
from kvstore.threads.outbox import Outbox
from tests.store.world import make_store, open_space
from tests.waiting import PATIENCE_S


def test_a_jittered_time_is_within_a_quarter() -> None:
    assert jittered(8.0, lambda: 0.0) == 6.0
    assert jittered(8.0, lambda: 0.5) == 8.0
    assert jittered(8.0, lambda: 1.0) == 10.0
    drawn = {jittered(8.0) for _ in range(1000)}
    assert len(drawn) > 900
    assert all(6.0 <= one <= 10.0 for one in drawn)
    assert sum(drawn) / len(drawn) == pytest.approx(8.0, abs=0.2)


def test_what_is_promised_as_the_longest_is_only_made_shorter() -> None:
    assert sooner(8.0, lambda: 0.0) == 8.0
    assert sooner(8.0, lambda: 1.0) == 4.0
    assert all(4.0 <= sooner(8.0) <= 8.0 for _ in range(1000))


def test_the_answer_of_a_sentinel_is_never_older_than_promised(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr("kvstore.index.redis.sentinel.time.monotonic", lambda: 100.0)
    for _ in range(100):
        sentinels = Sentinels({("host", 1): cast(Any, None)}, "master", timeout_s=1.0)
        monkeypatch.setattr(sentinels, "_answer", lambda: None)
        sentinels._look_s = 0.0
        sentinels.trust(("host", 1))
        asked.append(sentinels._look_s - 100.0)
    assert max(asked) <= 5.0
    assert max(asked) - min(asked) > 1.0


def test_processes_that_began_together_are_spread_over_a_period() -> None:
    times = [sum(jittered(1.0) for _ in range(30)) % 1 for _ in range(1000)]
    tenths = [sum(1 for time in times if tenth <= 10 * time < tenth + 1) for tenth in range(10)]
    assert all(50 < count < 200 for count in tenths)


def test_engines_that_began_together_do_not_keep_house_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    with make_store(tmp_path, clock=lambda: now[0]) as store:
        did: list[Rounds] = []
        fleet = [Rounds(store.backends) for _ in range(40)]
        for rounds in fleet:
            monkeypatch.setattr(rounds, "housekeep", lambda rounds=rounds: did.append(rounds))
            rounds.committed(0)
        assert did == fleet
        came = []
        for _ in range(50):
            now[0] += 0.25
            did.clear()
            for rounds in fleet:
                rounds.committed(0)
            came.append(len(did))
        # The second round of each, after about ten seconds.
        assert sum(came[:29]) == 0
        assert sum(came) == len(fleet)
        assert max(came) < len(fleet) / 3


def test_engines_that_lost_the_index_together_do_not_register_together(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        spaces = [open_space(store) for _ in range(40)]
        nexts = []
        for space in spaces:
            space.register_soon()
            nexts.append(space._register_from)
        assert max(nexts) - min(nexts) > 0.2 * store.settings.breaker.backoff_s


def test_an_outbox_does_not_look_in_step_with_others(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: Iterator[float] = iter([0.01, 0.02, 0.03])
    asked: list[float] = []
    looked = threading.Event()

    def draw(seconds: float) -> float:
        asked.append(seconds)
        if len(asked) == 3:
            looked.set()
        return next(waits, 0.01)

    monkeypatch.setattr("kvstore.threads.outbox.jittered", draw)

    def nothing(batch: Sequence[int]) -> None:
        pass

    outbox: Outbox[int] = Outbox(nothing, most=1, period_s=7.0, name="test")
    assert looked.wait(PATIENCE_S)
    outbox.close(PATIENCE_S)
    assert set(asked) == {7.0}
