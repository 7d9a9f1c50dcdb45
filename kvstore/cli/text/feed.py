"""What `feed` prints as text, when it ends."""

from __future__ import annotations

from kvstore.admin.feed.reports import FeedReport
from kvstore.cli.tables import Renderables, count, pair
from kvstore.rules.units import size


def feed(report: FeedReport) -> Renderables:
    """Yields what is announced, then what was done."""
    namespaces = ", ".join(report.namespaces)
    yield pair("model", f"{report.model} ({namespaces})" if report.model else "none has been registered")
    bare = f", {report.bare_blocks:,} of them by hash alone" if report.bare_blocks else ""
    yield pair("stored", f"{count(report.segments, 'segment')}, {count(report.blocks, 'block')}{bare}")
    yield pair("told by engines", f"{count(report.told_blocks, 'block')} in {report.heard:,} batches")
    yield pair("published", f"{report.batches:,} batches, {size(report.sent_bytes)}")
    yield pair("answered", f"{count(report.replays, 'replay')}, {count(report.snapshots, 'snapshot')}")
    if report.holes:
        yield pair("holes", f"{report.holes:,}, after which all was told again")
    if report.unreadable:
        yield pair("unreadable", f"{count(report.unreadable, 'segment')}, which routers are not told of")
    if report.crowded_out:
        yield pair("taken back", f"{count(report.crowded_out, 'segment')}: more is stored than --blocks")
