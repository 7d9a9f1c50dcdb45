"""A store in memory on a clock that the test moves, and janitors over it."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.build import load_settings, open_evidence
from kvstore.conformance.faulty import FaultyPayloads, Plan
from kvstore.index.sqlite.index import SqliteIndex
from kvstore.janitor.janitor import Janitor
from kvstore.janitor.reports import JanitorState, Step, StepState
from kvstore.janitor.scrub import Scrub
from kvstore.keys import NamespaceId, SegmentId, digests, payload_name
from kvstore.metrics import Counters
from kvstore.payloads.memory import MemoryPayloads
from kvstore.store.backends import Backends
from kvstore.store.space import Space
from kvstore.store.store import Store
from kvstore.threads.transfers import Transfers
from tests.store.world import SLOT_BYTES, chain, namespace, slots

#: How often a payload is read when it is verified, if it fits into one piece: its end, its header, its slots.
READS = 3
#: What changes something in an index, of what a janitor calls.
CHANGES = ("cull", "age_out", "drain", "reaped", "sweep", "cool", "reconcile", "evict", "erase")


class Clock:
    """Both the time of day and the monotonic one."""

    def __init__(self) -> None:
        self.now = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class RecordedPayloads(MemoryPayloads):
    """Remembers what was deleted, and how much was read."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.deleted: list[str] = []
        self.reads: list[tuple[str, int]] = []

    def delete(self, names: Sequence[str]) -> int:
        self.deleted += names
        return super().delete(names)

    def read(self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None) -> Any:
        self.reads.append((name, sum(view.nbytes for view in into)))
        return super().read(name, offset, into, size=size)

    def content(self, name: str) -> bytes:
        return self._contents[name][0]

    def tamper(self, name: str, change: Callable[[bytes], bytes | None]) -> None:
        """Replace a payload's bytes; None removes it."""
        data = change(self.content(name))
        del self._contents[name]
        if data is not None:
            self._contents[name] = (data, 0.0)


@dataclass
class World:
    """One store. Engines in it leave all tidying to the janitors."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.name = re.sub(r"\W+", "-", self.name).strip("-")
        given = {"payloads": f"memory://{self.name}", "index": f"memory://{self.name}", **self.changes}
        self.settings = load_settings(given, environ={})
        self.index = SqliteIndex.in_memory(self.name, clock=self.clock)
        self.plan = Plan()
        self.open(RecordedPayloads(self.name))

    def open(self, payloads: Any) -> None:
        """Open the store, over these payloads from now on."""
        self.payloads = payloads
        self.store = Store(
            Backends(
                settings=self.settings,
                payloads=self.payloads,
                index=self.index,
                maintenance=self.index,
                transfers=Transfers(self.settings.transfers),
                counters=Counters(),
                evidence=open_evidence(self.settings),
                clock=self.clock,
            )
        )
        self.store.rounds.committed = lambda nbytes: None  # type: ignore[method-assign]

    def space(self, **changes: Any) -> Space:
        space = self.store.open(namespace(**changes), block_bytes=SLOT_BYTES)
        space.register()
        return space

    def save(self, space: Space, first: int, segments: int = 1, blocks: int = 2) -> list[SegmentId]:
        """Chains that have nothing in common, one segment each."""
        before = {listing.segment for listing in self.index.segments(space.id)}
        for number in range(first, first + segments):
            assert space.save(slots(chain(*[number] * blocks))).outcome == "stored"
        return [one.segment for one in self.index.segments(space.id) if one.segment not in before]

    def blocks(self, space: Space, number: int, blocks: int = 2) -> int:
        """How many blocks of a chain can be matched."""
        return space.match(digests(chain(*[number] * blocks))).blocks

    def janitor(self) -> Janitor:
        return Janitor(
            self.index,
            FaultyPayloads(self.payloads, self.plan, self.clock.sleep),
            self.store.backends.evidence,
            self.settings,
            clock=self.clock,
            monotonic=self.clock,
        )

    def scrub(self, seed: int = 0, **more: Any) -> Scrub:
        return Scrub(
            self.index,
            FaultyPayloads(self.payloads, self.plan, self.clock.sleep),
            self.settings,
            monotonic=self.clock,
            **{"clock": self.clock, "chance": random.Random(seed), **more},
        )

    def fall_due(self, scrub: Scrub) -> None:
        """A day passes in which nothing is read: with 100 percent a day every segment has its turn now."""
        for _ in range(24 * 6 + 1):
            self.clock.now += 600
            assert list(scrub.round(self.index.accounts(), until=self.clock.now)) == []

    def payload(self, space: Space, segment: SegmentId, rank: int = 0) -> str:
        return payload_name(space.id, segment, rank)

    def visible(self, namespace: NamespaceId) -> set[SegmentId]:
        return {listing.segment for listing in self.index.segments(namespace)}

    def close(self) -> None:
        self.store.close()


def step(state: JanitorState, name: Step) -> StepState:
    [found] = [one for one in state.steps if one.step == name]
    return found


class Calls:
    """Who called what of an index, in order, and what else happens at such a call."""

    def __init__(self, monkeypatch: Any, index: Any, names: Sequence[str]) -> None:
        self.made: list[str] = []
        self.at: dict[str, Callable[[], None]] = {}
        for name in names:
            monkeypatch.setattr(index, name, self._spy(name, getattr(index, name)))

    def _spy(self, name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            self.made.append(name)
            answer = inner(*args, **more)
            if name in self.at:
                self.at[name]()
            return answer

        return call
