"""While a bucket asks for fewer reads, what nobody waits for isn't read, and late loads blame nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from connectors.ahead.prefetch import Prefetch
from kvstore.breaker import Breaker
from kvstore.payloads.throttle import Throttle
from schemas.settings import BreakerSettings
from tests.store.world import make_store, with_parts, with_scarce_reads


def test_reads_are_scarce_while_they_have_pauses(tmp_path: Path) -> None:
    now = [1000.0]
    throttle = Throttle(longest_s=2.0, clock=lambda: now[0])
    with make_store(tmp_path) as store:
        assert not store.health.reads_are_scarce
        health = with_parts(store, throttle=throttle).health
        assert not health.reads_are_scarce
        throttle.refused("saves", now[0])
        assert not health.reads_are_scarce
        throttle.refused("reads", now[0])
        assert health.reads_are_scarce
        now[0] += 60.0
        assert not health.reads_are_scarce


def test_nothing_is_fetched_ahead_while_reads_are_scarce(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        for one, looks in ((with_scarce_reads(store), 0), (store, 1)):
            looked: list[bool] = []
            prefetch = Prefetch(one, cast(Any, None), 1 << 20)
            prefetch._next = lambda into=looked: into.append(True)  # type: ignore[method-assign,assignment,misc]
            prefetch._go_on()
            assert len(looked) == looks


def test_a_load_that_is_late_while_reads_are_scarce_is_nobodys_fault(tmp_path: Path) -> None:
    """It may have waited for turns until its deadline, and others with it."""
    breaker = Breaker("payloads", BreakerSettings(failures=1))
    with make_store(tmp_path) as store:
        guarded = with_parts(store, breaker=breaker)
        with_scarce_reads(guarded).health.read_hangs()
        assert breaker.is_closed
        guarded.health.read_hangs()
        assert not breaker.is_closed
