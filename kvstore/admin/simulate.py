"""simulate: what a cache would have served of a trace, by capacity and by policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvstore import __version__
from kvstore.admin.machine import size
from kvstore.admin.progress import Progress
from kvstore.admin.replay import Tally, endless, fifo, lru
from kvstore.admin.replay_store import Rules, StoreReplay, noted
from kvstore.admin.traces import Assumed, Trace, read_traces
from schemas.settings import Settings
from schemas.simulation import (
    Curve,
    Policy,
    SimulatedPoint,
    SimulationReport,
    SpaceTotals,
    TraceTotals,
)

POLICIES: tuple[Policy, ...] = ("kvstore", "second-use", "lru", "fifo", "endless")
#: The sweep begins at this share of all blocks' bytes.
_LEAST = 0.01
#: Of what is possible, the share that a finding is about.
_ENOUGH = 0.9


@dataclass(frozen=True, slots=True)
class Setup:
    """What is to be simulated."""

    #: Of these, `eviction`, `admission.window_s` and what decides how segments are cut.
    settings: Settings
    policies: Sequence[Policy] = POLICIES
    #: In bytes; none: `points` of them, from a hundredth of all blocks' bytes to all of them.
    capacities: Sequence[int] = ()
    points: int = 12
    #: Blocks of a segment, a curve for each; none: as the connectors cut them.
    segment_blocks: Sequence[int] = ()


def simulate(paths: Sequence[Path], assumed: Assumed, setup: Setup, progress: Progress) -> SimulationReport:
    """Read traces and replay them. Raises ConfigError for what is no trace."""
    trace = read_traces(paths, assumed, progress)
    capacities = sorted(set(setup.capacities)) or sweep(trace.distinct_bytes, setup.points)
    curves = []
    for policy, cut, tallies in _replayed(trace, setup, capacities, progress):
        points = tuple(
            _point(trace, capacity, tally) for capacity, tally in zip(capacities, tallies, strict=True)
        )
        curves.append(Curve(policy=policy, segment_blocks=cut, points=points))
    return SimulationReport(
        version=__version__,
        trace=_totals(trace, paths, setup),
        high=setup.settings.eviction.high,
        low=setup.settings.eviction.low,
        window_s=setup.settings.admission.window_s,
        curves=tuple(curves),
        findings=tuple(_findings(trace, curves)),
    )


def sweep(distinct_bytes: int, points: int) -> list[int]:
    """Capacities from a hundredth of `distinct_bytes` to all of it, in equal ratios."""
    return [round(at) for at in np.geomspace(_LEAST * distinct_bytes, distinct_bytes, points)]


def segment_blocks(trace: Trace, settings: Settings) -> list[int]:
    """Per space, how many blocks the connectors put into a segment (connectors.options)."""
    most = min(settings.segment.target_bytes, settings.kv.staging_bytes)
    return [
        1
        if space.kind == "ec"
        else max(1, min(settings.segment.max_blocks, most * space.parts // space.block_bytes))
        for space in trace.spaces
    ]


def _replayed(
    trace: Trace, setup: Setup, capacities: Sequence[int], progress: Progress
) -> Iterator[tuple[Policy, int | None, list[Tally]]]:
    def each(what: str, one: Callable[[int], Tally]) -> list[Tally]:
        tallies = []
        for number, capacity in enumerate(capacities, start=1):
            progress.begin(f"{what} with {size(capacity)} ({number} of {len(capacities)})")
            tallies.append(one(capacity))
        return tallies

    for policy in setup.policies:
        if policy == "endless":
            yield policy, None, [endless(trace)] * len(capacities)
        elif policy == "lru":
            progress.begin("lru with all capacities")
            yield policy, None, lru(trace, capacities)
        elif policy == "fifo":
            yield policy, None, each("fifo", lambda capacity: fifo(trace, capacity))
        else:
            notes = noted(trace, setup.settings.admission.window_s) if policy == "second-use" else None
            for cut in setup.segment_blocks or (None,):
                yield policy, cut, each(policy, _store(trace, setup, cut, notes))


def _store(
    trace: Trace, setup: Setup, cut: int | None, notes: Sequence[int] | None
) -> Callable[[int], Tally]:
    """This store, by capacity."""
    blocks = [cut] * len(trace.spaces) if cut else segment_blocks(trace, setup.settings)
    rules = Rules(blocks, setup.settings.eviction.high, setup.settings.eviction.low)
    return lambda capacity: StoreReplay(trace, rules, capacity).run(notes)


def _point(trace: Trace, capacity: int, tally: Tally) -> SimulatedPoint:
    return SimulatedPoint(
        capacity_bytes=capacity,
        hit_ratio=tally.hit_blocks / trace.references,
        hit_blocks=tally.hit_blocks,
        hit_tokens=tally.hit_tokens,
        stored_bytes=tally.stored_bytes,
        evictions=tally.evictions,
        evicted_bytes=tally.evicted_bytes,
    )


def _totals(trace: Trace, paths: Sequence[Path], setup: Setup) -> TraceTotals:
    count = len(trace.spaces)
    requests, asked, distinct = [0] * count, [0] * count, [0] * count
    for request in trace.requests:
        requests[request.space] += 1
        asked[request.space] += len(request.chain)
    for space in trace.space_of:
        distinct[space] += 1
    cut = list(setup.segment_blocks[:1]) * count or segment_blocks(trace, setup.settings)
    spaces = tuple(
        SpaceTotals(
            namespace=space.namespace,
            kind=space.kind,
            block_tokens=space.block_tokens,
            block_bytes=space.block_bytes,
            segment_blocks=cut[number],
            requests=requests[number],
            asked_blocks=asked[number],
            distinct_blocks=distinct[number],
        )
        for number, space in enumerate(trace.spaces)
    )
    return TraceTotals(
        files=tuple(str(path) for path in paths),
        requests=len(trace.requests),
        seconds=trace.requests[-1].at_s - trace.requests[0].at_s,
        asked_blocks=trace.references,
        asked_tokens=sum(space.asked_blocks * space.block_tokens for space in spaces),
        distinct_blocks=trace.blocks,
        distinct_bytes=trace.distinct_bytes,
        skipped_lines=trace.skipped,
        spaces=spaces,
    )


def _findings(trace: Trace, curves: Sequence[Curve]) -> Iterator[str]:
    """What a person would read off the curves."""
    possible = endless(trace).hit_blocks / trace.references
    yield f"No capacity serves more than {possible:.1%}: the rest is asked for for the first time"
    for curve in curves:
        if curve.policy == "endless" or not possible:
            continue
        cut = f" and {curve.segment_blocks} blocks a segment" if curve.segment_blocks else ""
        enough = next((p for p in curve.points if p.hit_ratio >= _ENOUGH * possible), None)
        if enough is None:
            best = max(point.hit_ratio for point in curve.points)
            yield f"With {curve.policy}{cut} none of these capacities serves more than {best:.1%}"
        else:
            ratio = f"{enough.hit_ratio:.1%}, {enough.hit_ratio / possible:.0%} of what is possible"
            yield f"With {curve.policy}{cut} {size(enough.capacity_bytes)} serve {ratio}"
