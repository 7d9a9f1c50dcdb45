"""simulate: computes what a cache would have served of a trace, by capacity and by policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import get_args

import numpy as np

from kvstore import __version__
from kvstore.admin.progress import ProgressListener
from kvstore.admin.simulate.optimum import optimum
from kvstore.admin.simulate.replay import ReplayTotals, endless, fifo, lru
from kvstore.admin.simulate.reports import (
    Curve,
    Policy,
    SimulatedPoint,
    SimulationReport,
    SpaceTotals,
    TraceTotals,
)
from kvstore.admin.simulate.sessions import Heard, ends, sessions, told
from kvstore.admin.simulate.store import Rules, StoreReplay, noted
from kvstore.admin.simulate.traces import Assumed, BadTrace, Trace, read_traces
from kvstore.rules.segments import segment_blocks
from kvstore.rules.units import size
from schemas.settings import Settings

POLICIES: tuple[Policy, ...] = get_args(Policy)
#: The share of all blocks' bytes at which the sweep begins.
_LEAST = 0.01
#: The share of the possible hits for which a finding names the capacity.
_ENOUGH = 0.9


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings, policies and capacities of a simulation."""

    #: It uses `admission.window_s` and what decides how segments are cut.
    settings: Settings
    policies: Sequence[Policy] = POLICIES
    #: Capacities in bytes; if there are none, `points` of them, from a hundredth of all blocks' bytes to all.
    capacities: Sequence[int] = ()
    points: int = 12
    #: Numbers of blocks of a segment, with a curve for each; if empty, segments are cut as the connectors do.
    segment_blocks: Sequence[int] = ()


def simulate(
    paths: Sequence[Path], assumed: Assumed, setup: Setup, progress: ProgressListener
) -> SimulationReport:
    """Reads traces and replays them. `told` is left out for one that says nothing of sessions. Raises
    ConfigError if a file is no trace, or nothing remains to be replayed."""
    trace = read_traces(paths, assumed, progress)
    policies = [one for one in setup.policies if one != "told" or trace.said]
    if not policies:
        raise BadTrace("nothing is said of sessions in this trace, so there is nothing to be told")
    setup = replace(setup, policies=policies)
    capacities = sorted(set(setup.capacities)) or sweep(trace.distinct_bytes, setup.points)
    curves = []
    for policy, cut, tallies in _replayed(trace, setup, capacities, progress):
        points = tuple(
            point(trace, capacity, tally) for capacity, tally in zip(capacities, tallies, strict=True)
        )
        curves.append(Curve(policy=policy, segment_blocks=cut, points=points))
    return SimulationReport(
        version=__version__,
        trace=totals(trace, paths, setup),
        window_s=setup.settings.admission.window_s,
        curves=tuple(curves),
        findings=tuple(_findings(trace, curves)),
    )


def sweep(distinct_bytes: int, points: int) -> list[int]:
    """Returns capacities from a hundredth of `distinct_bytes` to all of it, in equal ratios."""
    return [round(at) for at in np.geomspace(_LEAST * distinct_bytes, distinct_bytes, points)]


def cuts(trace: Trace, settings: Settings) -> list[int]:
    """Returns for each space how many blocks its engines put into a segment."""
    return [
        1 if space.kind == "ec" else segment_blocks(settings, space.block_bytes, space.parts)
        for space in trace.spaces
    ]


def _replayed(
    trace: Trace, setup: Setup, capacities: Sequence[int], progress: ProgressListener
) -> Iterator[tuple[Policy, int | None, list[ReplayTotals]]]:
    def each(what: str, one: Callable[[int], ReplayTotals]) -> list[ReplayTotals]:
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
        elif policy == "optimum":
            progress.begin("optimum with all capacities")
            yield policy, None, optimum(trace, capacities)
        elif policy == "fifo":
            yield policy, None, each("fifo", lambda capacity: fifo(trace, capacity))
        else:
            notes = noted(trace, setup.settings.admission.window_s) if policy == "second-use" else None
            owners = sessions(trace) if policy in ("told", "told-ends") else None
            said: Sequence[Heard] = ()
            if owners is not None:
                said = told(trace, owners) if policy == "told" else ends(trace, owners)
            for cut in setup.segment_blocks or (None,):
                yield policy, cut, each(policy, _store(trace, setup, cut, notes, owners, said))


def _store(
    trace: Trace,
    setup: Setup,
    cut: int | None,
    notes: Sequence[int] | None,
    owners: Sequence[int] | None,
    said: Sequence[Heard],
) -> Callable[[int], ReplayTotals]:
    """Returns a function that replays the trace with this store's policy, for a capacity."""
    blocks = [cut] * len(trace.spaces) if cut else cuts(trace, setup.settings)
    rules = Rules(blocks, retained_share=setup.settings.sessions.retain_share)
    return lambda capacity: StoreReplay(trace, rules, capacity).run(notes, owners, said)


def point(trace: Trace, capacity: int, tally: ReplayTotals) -> SimulatedPoint:
    """Returns what a replay at one capacity amounts to."""
    return SimulatedPoint(
        capacity_bytes=capacity,
        hit_ratio=tally.hit_blocks / trace.references,
        hit_blocks=tally.hit_blocks,
        hit_tokens=tally.hit_tokens,
        stored_bytes=tally.stored_bytes,
        evictions=tally.evictions,
        evicted_bytes=tally.evicted_bytes,
    )


def totals(trace: Trace, paths: Sequence[Path], setup: Setup) -> TraceTotals:
    """Returns what a trace asks for."""
    count = len(trace.spaces)
    requests, asked, distinct = [0] * count, [0] * count, [0] * count
    for request in trace.requests:
        requests[request.space] += 1
        asked[request.space] += len(request.chain)
    for space in trace.space_of:
        distinct[space] += 1
    cut = list(setup.segment_blocks[:1]) * count or cuts(trace, setup.settings)
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
    """Yields sentences that say what a person would read off the curves."""
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
