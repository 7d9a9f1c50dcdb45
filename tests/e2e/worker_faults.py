"""Faults and counters inside the worker processes of an engine with several ranks.

Engine(..., worker_extension_cls=EXTENSION)
set_faults(engine, 1, Rule("delay", ("read",), delay_s=1.0))
"""

from __future__ import annotations

import threading
from dataclasses import asdict
from typing import Any

from kvstore.conformance.faulty import Plan, Rule
from tests.e2e.engine import Engine
from tests.e2e.engine_child import EncoderCounter
from tests.store.world import put_faults
from tests.waiting import PATIENCE_S

EXTENSION = "tests.e2e.worker_faults.FaultyWorker"


class FaultyWorker(EncoderCounter):
    """Mixed into vLLM's worker. Methods are called on every rank."""

    rank: int
    plan: Plan | None = None
    #: Set when the rules change: what a `delay` holds up then goes on.
    changed = threading.Event()

    def set_payload_faults(self, rank: int, rules: list[dict[str, Any]]) -> None:
        """From now on these rules for this rank's payloads; an empty list heals them."""
        if self.rank != rank:
            return
        if self.plan is None:
            self.plan = Plan()
            put_faults(_store().payloads, self.plan, lambda seconds: self.changed.wait(seconds))
        self.plan.replace(*(Rule(**rule) for rule in rules))
        former, self.changed = self.changed, threading.Event()
        former.set()

    def set_load_deadline(self, rank: int, deadline_s: float) -> None:
        """From now on this deadline for this rank's loads."""
        if self.rank == rank:
            object.__setattr__(_store().settings.kv, "load_deadline_s", deadline_s)

    def drain_store(self) -> bool:
        """Waits until this rank's half has nothing under way; False if that took too long."""
        return bool(_store().transfers.drain(PATIENCE_S))

    def store_counters(self) -> dict[str, int]:
        """What this rank's half of the connector has counted, without the zeros."""
        return {name: value for name, value in _store().counters.snapshot().items() if value}


def _store() -> Any:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    connector: Any = get_kv_transfer_group()
    return connector._worker._store


def set_faults(engine: Engine, rank: int, *rules: Rule) -> None:
    """From now on these faults of one rank's payloads; none heals them."""
    plain = [asdict(rule) for rule in rules]
    engine.evaluate(f"llm.collective_rpc('set_payload_faults', args=({rank}, {plain!r}))")


def set_deadline(engine: Engine, rank: int, deadline_s: float) -> None:
    """From now on this deadline for one rank's loads."""
    engine.evaluate(f"llm.collective_rpc('set_load_deadline', args=({rank}, {deadline_s!r}))")


def settle(engine: Engine) -> None:
    """Returns when every rank has read and written what it was asked for, and the scheduler knows it."""
    assert all(engine.evaluate("llm.collective_rpc('drain_store')"))
    engine.idle(0.05)


def counters(engine: Engine) -> list[dict[str, int]]:
    """What each rank has counted so far."""
    found: list[dict[str, int]] = engine.evaluate("llm.collective_rpc('store_counters')")
    return found
