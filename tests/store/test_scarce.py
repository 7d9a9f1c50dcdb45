"""What nobody waits for is not read while a bucket asks for fewer reads."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from connectors.ahead.prefetch import Prefetch
from kvstore.payloads.throttle import Throttle
from kvstore.store.health import Health
from tests.store.world import make_store


def test_reads_are_scarce_while_they_have_pauses(tmp_path: Path) -> None:
    now = [1000.0]
    throttle = Throttle(longest_s=2.0, clock=lambda: now[0])
    with make_store(tmp_path) as store:
        assert not store.health.reads_are_scarce
        health = Health(replace(store.backends, throttle=throttle))
        assert not health.reads_are_scarce
        throttle.refused("saves", now[0])
        assert not health.reads_are_scarce
        throttle.refused("reads", now[0])
        assert health.reads_are_scarce
        now[0] += 60.0
        assert not health.reads_are_scarce


def test_nothing_is_fetched_ahead_while_reads_are_scarce(tmp_path: Path) -> None:
    with make_store(tmp_path) as store:
        prefetch = Prefetch(store, cast(Any, None), 1 << 20)
        looked: list[bool] = []
        prefetch._next = lambda: looked.append(True)  # type: ignore[method-assign,assignment,func-returns-value]
        throttle = Throttle(longest_s=2.0)
        throttle.refused("reads", 1e12)
        prefetch._health = Health(replace(store.backends, throttle=throttle))
        prefetch._go_on()
        assert looked == []
        prefetch._health = store.health
        prefetch._go_on()
        assert looked == [True]
