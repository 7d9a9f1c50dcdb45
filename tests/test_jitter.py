"""A jittered time is near what it is meant to be, and no other process's."""

from __future__ import annotations

import pytest

from kvstore.jitter import jittered


def test_a_jittered_time_is_within_a_quarter() -> None:
    assert jittered(8.0, lambda: 0.0) == 6.0
    assert jittered(8.0, lambda: 0.5) == 8.0
    assert jittered(8.0, lambda: 1.0) == 10.0
    drawn = {jittered(8.0) for _ in range(1000)}
    assert len(drawn) > 900
    assert all(6.0 <= one <= 10.0 for one in drawn)
    assert sum(drawn) / len(drawn) == pytest.approx(8.0, abs=0.2)


def test_processes_that_began_together_are_spread_over_a_period() -> None:
    times = [sum(jittered(1.0) for _ in range(30)) % 1 for _ in range(1000)]
    tenths = [sum(1 for time in times if tenth <= 10 * time < tenth + 1) for tenth in range(10)]
    assert all(50 < count < 200 for count in tenths)
