"""simulate and whatif as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

from kvstore.admin.simulate.reports import Curve, Gain, SimulationReport, WhatIfReport
from kvstore.cli.tables import Column, Renderables, TableRows, count, pair, plain
from kvstore.rules.units import size

_WIDTH = 13
#: What curves are called.
_NAMES = {
    "kvstore": "kvstore",
    "second-use": "kvstore, second use only",
    "told": "kvstore, told",
    "told-ends": "kvstore, told of ends",
    "lru": "LRU of blocks",
    "fifo": "FIFO of blocks",
    "optimum": "optimum of blocks",
    "endless": "endless",
}


def _name(curve: Curve) -> str:
    """Returns what a curve is called."""
    cut = f", {curve.segment_blocks} blocks a segment" if curve.segment_blocks else ""
    return f"{_NAMES[curve.policy]}{cut}"


def simulate(report: SimulationReport) -> Renderables:
    """Yields what was replayed, and a table per policy."""
    trace = report.trace
    yield pair("trace", ", ".join(trace.files), width=_WIDTH)
    yield pair("requests", f"{trace.requests:,} in {_duration(trace.seconds)}", width=_WIDTH)
    asked = f"{trace.asked_blocks:,} asked for ({trace.asked_tokens:,} tokens)"
    different = f"{trace.distinct_blocks:,} different ones, {size(trace.distinct_bytes)}"
    yield pair("blocks", f"{asked}, {different}", width=_WIDTH)
    for space in trace.spaces:
        label = space.namespace or "all"
        cut = f"{count(space.segment_blocks, 'block')} a segment"
        tokens = f" of {space.block_tokens} tokens" if space.block_tokens else ""
        yield pair(label[:8], f"blocks{tokens}, {size(space.block_bytes)} each; {cut}", width=_WIDTH)
    if trace.skipped_lines:
        yield pair("skipped", f"{count(trace.skipped_lines, 'line')} that make no sense", width=_WIDTH)
    yield ""
    for finding in report.findings:
        yield pair("-", plain(finding), width=3)
    for curve in report.curves:
        if curve.policy != "endless":
            yield ""
            yield Text(_name(curve), style="bold")
            yield _points(curve)


def _points(curve: Curve) -> TableRows:
    points = curve.points
    unit = "segments" if curve.policy in ("kvstore", "second-use", "told", "told-ends") else "blocks"
    return TableRows(
        Column("capacity", [size(p.capacity_bytes) for p in points], right=True),
        Column("hit ratio", [f"{p.hit_ratio:.1%}" for p in points], right=True),
        Column("tokens saved", [f"{p.hit_tokens:,}" for p in points], right=True),
        Column("written", [size(p.stored_bytes) for p in points], right=True),
        Column(f"{unit} evicted", [f"{p.evictions:,}" for p in points], right=True),
        Column("evicted", [size(p.evicted_bytes) for p in points], right=True),
    )


def whatif(report: WhatIfReport) -> Renderables:
    """Yields what there is, what more would have brought, and by whom it would be used."""
    yield pair("index", report.index, width=_WIDTH)
    yield pair("capacity", f"{size(report.capacity_bytes)}, {size(report.used_bytes)} used", width=_WIDTH)
    asked = f"{report.served_blocks:,} of {report.asked_blocks:,} blocks that were asked for"
    yield pair("hit ratio", f"{report.hit_ratio:.1%}: {asked}", width=_WIDTH)
    yield ""
    totals = [size(report.capacity_bytes + gain.more_bytes) for gain in report.gains]
    ratios = [f"{report.hit_ratio + gain.added_ratio:.1%}" for gain in report.gains]
    yield TableRows(
        Column("more", [f"+{size(gain.more_bytes)}" for gain in report.gains], right=True),
        Column("in all", totals, right=True),
        Column("hit ratio", ratios, right=True),
        Column("added", [f"+{gain.added_ratio:.1%}" for gain in report.gains], right=True),
        Column("blocks", [f"+{gain.blocks:,}" for gain in report.gains], right=True),
    )
    if len(report.namespaces) > 1:
        yield ""
        yield _namespaces(report)
    yield ""
    for caveat in report.caveats:
        yield pair("-", plain(caveat[:1].upper() + caveat[1:]), width=3)


def _namespaces(report: WhatIfReport) -> TableRows:
    lines = report.namespaces

    def added(gains: Sequence[Gain]) -> str:
        return f"+{gains[-1].added_ratio:.1%}" if gains else "-"

    most = f"added by +{size(report.gains[-1].more_bytes)}" if report.gains else "added"
    return TableRows(
        Column("namespace", [line.namespace for line in lines]),
        Column("kind", [line.kind for line in lines]),
        Column("model", [line.model for line in lines], wraps=True),
        Column("asked", [f"{line.asked_blocks:,}" for line in lines], right=True),
        Column("found", [f"{line.served_blocks:,}" for line in lines], right=True),
        Column("evicted", [size(line.evicted_bytes) for line in lines], right=True),
        Column("its share", [f"{line.share:.0%}" for line in lines], right=True),
        Column(most, [added(line.gains) for line in lines], right=True),
    )


def _duration(seconds: float) -> str:
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:,.0f} seconds"
