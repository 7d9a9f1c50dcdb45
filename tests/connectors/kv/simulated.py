"""An engine that serves one request after the other, and a network to its payloads, on a clock of their own.

What chooses, measures and cuts is the real thing; what computes, reads and passes time is not. So what the
planner is worth can be told without the noise of a machine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from connectors.choice.cost import Prefill
from connectors.choice.decision import WAIT, Objective, stretches_of
from connectors.choice.speeds import PART_REQUESTS
from connectors.engine.layout import Group
from connectors.kv.choosing import Choosing
from connectors.kv.match import Found
from connectors.kv.messages import GroupLoad, KVStoreWorkerMetadata
from connectors.kv.worker.pace import Pace
from connectors.planning import piece_blocks, split_run
from kvstore.index.port import Run
from kvstore.keys import SegmentId
from kvstore.rules.prefix import PrefixRule
from kvstore.rules.tiers import Tier
from kvstore.threads.transfers import AHEAD_THREADS
from schemas.namespace import GroupSpec
from schemas.records import EqualSizes, PartRecord, SegmentRecord
from schemas.settings import KVSettings

TOKENS, BLOCKS = 32, 256
BLOCK_BYTES = 128 << 10
BYTES = BLOCKS * BLOCK_BYTES
#: How long a step of the scheduler without work takes, and one of the simulation.
_STEP_S, _TICK_S = 0.002, 0.001
_THREADS = 4


@dataclass(eq=False)
class Read:
    """A read: bytes, whether it begins with its segment, and what of its latency and bytes is to come."""

    blocks: range
    nbytes: int
    whole: bool
    latency_s: float = 0.0
    left: float = 0.0
    probe: bool = False
    ended: bool = False
    skipped: bool = False


@dataclass
class Network:
    """Reads share the bandwidth, four at a time."""

    bytes_per_s: float
    latency_s: float
    stalled: bool = False
    now: float = 1000.0
    waiting: list[Read] = field(default_factory=list)
    flying: list[Read] = field(default_factory=list)
    #: Probes, which have threads of their own and give way to other reads.
    ahead: list[Read] = field(default_factory=list)
    pace: Pace | None = None
    tier: Tier = "bucket"

    def ask(self, read: Read) -> None:
        assert self.pace is not None
        requests = 1 if read.whole else PART_REQUESTS[self.tier]
        self.pace.ask(read, self.tier, read.nbytes, requests)
        self.waiting.append(read)

    def tick(self) -> None:
        assert self.pace is not None
        while self.waiting and sum(not read.probe for read in self.flying) < _THREADS:
            read = self.waiting.pop(0)
            if read.skipped:
                self.pace.end(read, self.tier, arrived=False)
                continue
            self.pace.begin(read, self.tier)
            self._begin(read)
        while self.ahead and not self.waiting and sum(read.probe for read in self.flying) < AHEAD_THREADS:
            read = self.ahead.pop(0)
            requests = 1 if read.whole else PART_REQUESTS[self.tier]
            self.pace.begin_probe(read, self.tier, read.nbytes, requests)
            self._begin(read)
        self.now += _TICK_S
        if self.stalled:
            return
        arriving = [read for read in self.flying if read.latency_s <= 0]
        share = self.bytes_per_s * _TICK_S / max(1, len(arriving))
        for read in self.flying:
            if read.latency_s > 0:
                read.latency_s -= _TICK_S
        for read in arriving:
            read.left -= share
            if read.left <= 0:
                read.ended = True
                self.flying.remove(read)
                ends = self.pace.end_probe if read.probe else self.pace.end
                ends(read, self.tier, arrived=True)

    def _begin(self, read: Read) -> None:
        # The header of its segment is asked for first.
        requests = 1 if read.whole else PART_REQUESTS[self.tier]
        read.latency_s, read.left = requests * self.latency_s, float(read.nbytes)
        self.flying.append(read)

    def loads_all_s(self) -> float:
        """What a load of all blocks takes at best."""
        return float("inf") if self.stalled else self.latency_s + BYTES / self.bytes_per_s


class Simulated:
    """The engine. `prefill` is what computing takes, and what it knows of that."""

    def __init__(
        self,
        network: Network,
        prefill: Prefill,
        objective: Objective = "ttft",
        *,
        segment: int = 64,
        most_blocks: int = 256,
    ) -> None:
        """Segments have so many blocks, and a read at most so many."""
        self.network, self.prefill, self._segment = network, prefill, segment
        self._most_blocks = most_blocks
        settings = KVSettings(load="adaptive", objective=objective)
        spec = GroupSpec(kind="full", block_tokens=TOKENS, dtype="I8", shape=(1, 1, TOKENS, 4096))
        group = Group(
            spec, PrefixRule("prefix", TOKENS), (0,), offered=False, writers=1, part_bytes=BLOCK_BYTES
        )
        engine: Any = SimpleNamespace(groups=[group], hash_tokens=TOKENS, ranks=1)
        cost: Any = SimpleNamespace(prefill=lambda: prefill)
        clock = lambda: network.now  # noqa: E731
        self.pace = network.pace = Pace(WAIT[objective], _THREADS, clock)
        self.pace.most_bytes = most_blocks * BLOCK_BYTES
        self.choosing = Choosing(settings, engine, cost, clock)
        self._numbers = itertools.count()
        self.cuts = 0
        self.loaded: list[float] = []

    def _found(self) -> Found:
        runs = []
        for at in range(0, BLOCKS, self._segment):
            segment = SegmentId(next(self._numbers).to_bytes(16, "big"))
            count = min(self._segment, BLOCKS - at)
            record = SegmentRecord((PartRecord(0, EqualSizes(BLOCK_BYTES, count)),), count, "none", 0)
            runs.append(Run(at, segment, 0, count, record))
        tiers: dict[SegmentId, Tier] = {run.segment: self.network.tier for run in runs}
        tokens = BLOCKS * TOKENS
        stretches = stretches_of([runs], [TOKENS], [BLOCK_BYTES], tokens, tiers, anywhere=True)
        return Found(tokens, (runs,), (BLOCKS,), "complete", tokens, (0, 0), tiers, stretches)

    def _report(self) -> None:
        if self.pace.has_news:
            meta = KVStoreWorkerMetadata()
            self.pace.tell(meta, 0)
            self.choosing.reported(meta)

    def _pass(self, seconds: float, done: Callable[[], bool] = lambda: False) -> None:
        """Lets time pass in steps, up to so many seconds, until `done`."""
        end = self.network.now + seconds
        while self.network.now < end and not done():
            step = self.network.now + _STEP_S
            while self.network.now < min(step, end):
                self.network.tick()
            self._report()
            self._probe()

    def _probe(self) -> None:
        for probe in self.choosing.take_probes():
            for run in probe.runs:
                blocks = range(run.start, run.start + run.count)
                self.network.ahead.append(Read(blocks, run.count * BLOCK_BYTES, not run.slot, probe=True))

    def request(self) -> float:
        """Returns a request's seconds, by what the best of computing all and loading all would take now."""
        network, tokens, prompt = self.network, BLOCKS * TOKENS, BLOCKS * TOKENS + 1
        loads = network.loads_all_s() + self.prefill.seconds(tokens, prompt)
        best = min(self.prefill.seconds(0, prompt), loads)
        return self.seconds() / best

    def seconds(self) -> float:
        """Serves a request; returns how long it took."""
        network, prompt = self.network, BLOCKS * TOKENS + 1
        began, found = network.now, self._found()
        names = SimpleNamespace(all=lambda: [b""] * BLOCKS)
        tracked: Any = SimpleNamespace(
            receiving=None, decided_of=None, decision=None, decided_at=0.0,
            request=SimpleNamespace(num_tokens=prompt), names=names,
        )  # fmt: skip
        decision = self.choosing.decide(tracked, found, 0)
        self._probe()
        computed = 0
        if decision.tokens:
            stop = decision.tokens
            runs = [run for run in found.runs[0] if run.start * TOKENS < stop]
            load = GroupLoad(0, 0, runs, [], {}, found.tiers, BLOCK_BYTES)
            prefill = self.choosing.planned(tracked, [load])
            nbytes = stop // TOKENS * BLOCK_BYTES
            pieces = self.pace.pieces(network.tier, nbytes)
            most = min(self._most_blocks, piece_blocks([run.count for run in runs], pieces))
            reads = [
                Read(range(part.start, part.start + part.count), part.count * BLOCK_BYTES, not part.slot)
                for run in runs
                for part in split_run(run, most)
            ]
            for read in reads:
                network.ask(read)
            cut: list[int] = []

            def over() -> bool:
                left = [read for read in reads if not read.ended]
                if not left:
                    return True
                assert prefill is not None
                first = left[0].blocks.start * TOKENS
                nbytes = {network.tier: sum(read.nbytes for read in left)}
                if self.pace.late(nbytes, prefill.seconds(first, stop)):
                    cut.append(first)
                return bool(cut)

            self._pass(1000.0, over)
            for read in reads:
                read.skipped = True
            computed = cut[0] if cut else stop
            self.cuts += len(cut)
            if not cut:
                tracked.load_read_s = network.now - tracked.load_began - _STEP_S
                self.choosing.loaded(tracked)
        self.loaded.append(computed / (BLOCKS * TOKENS))
        self._pass(self.prefill.seconds(computed, prompt))
        return network.now - began
