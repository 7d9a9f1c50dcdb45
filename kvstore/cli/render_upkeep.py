"""evict, pin, unpin and quota as text. No I/O here."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.admin.machine import size
from kvstore.cli.tables import Column, Renderables, Rows, age, amount, count, pair, quota_rows, span, use_age
from schemas.reports import SegmentSummary
from schemas.upkeep import EvictReport, PinReport, PinsReport, QuotaReport, QuotasReport


def evict(report: EvictReport) -> Renderables:
    """What goes, by namespace, and what became of it."""
    yield pair("evict", report.why)
    yield pair("held", amount(report.held))
    yield pair("planned", amount(report.planned))
    if report.pinned.segments:
        yield pair("left alone", f"{amount(report.pinned)}: pinned")
    if report.applied:
        spared = (
            f"; {count(report.spared_segments, 'segment')} used or gone meanwhile"
            if report.spared_segments
            else ""
        )
        yield pair("evicted", f"{count(report.evicted_segments, 'segment')}{spared}")
    if report.delete_after_s is not None:
        yield pair("payloads", f"deleted in {max(0.0, report.delete_after_s - report.at_s):.0f} s or later")
    lines = report.lines
    if lines:
        yield ""
        yield Rows(
            Column("namespace", [line.namespace for line in lines]),
            Column("model", [line.model for line in lines], wraps=True),
            Column("segments", [f"{line.planned.segments:,}" for line in lines], right=True),
            Column("blocks", [f"{line.planned.blocks:,}" for line in lines], right=True),
            Column("size", [size(line.planned.stored_bytes) for line in lines], right=True),
        )


def pins(report: PinsReport) -> Renderables:
    """What is pinned."""
    yield pair(
        "pinned", f"{amount(report.pinned)}; at most {size(report.most_bytes)} of the store's quota may be"
    )
    yield from _segments(report.segments, report.at_s)


def pinned(report: PinReport) -> Renderables:
    """What is to be pinned or unpinned, and what became of it."""
    yield pair(report.action, amount(report.planned))
    if report.already.segments:
        state = "pinned" if report.action == "pin" else "not pinned"
        yield pair("already", f"{amount(report.already)}: {state}")
    if report.applied:
        yield pair("done", count(report.changed, "segment"))
    yield from _segments(report.segments, report.at_s)
    if report.left_out:
        yield ""
        yield pair("left out", count(report.left_out, "segment"))
        for left in report.left:
            yield pair("", f"{left.segment} of {left.namespace}: {left.reason}")


def _segments(lines: Sequence[SegmentSummary], now_s: float) -> Renderables:
    if not lines:
        return
    yield ""
    yield Rows(
        Column("segment", [line.segment for line in lines]),
        Column("namespace", [line.namespace for line in lines]),
        Column("slots", [line.slots for line in lines], right=True),
        Column("depth", [line.depth for line in lines], right=True),
        Column("size", [size(line.stored_bytes) for line in lines], right=True),
        Column("cost", [span(line.cost_us / 1e6) for line in lines], right=True, plain="-"),
        Column("made", [age(now_s, line.created_s) for line in lines], right=True),
        Column("used", [use_age(now_s, line.last_use_s) for line in lines], right=True),
    )


def quotas(report: QuotasReport) -> Renderables:
    """A line per quota."""
    yield quota_rows(report.quotas)
    yield ""
    yield f"Eviction begins above {report.high:.0%} of a quota and goes on down to {report.low:.0%}."


def quota(report: QuotaReport) -> Renderables:
    """One quota, before and after."""
    yield pair("quota", f"{report.scope}{'' if report.known else ', which nothing belongs to yet'}")
    yield pair("before", _bytes(report.before_bytes))
    yield pair("after", _bytes(report.after_bytes))
    yield pair("used", f"{size(report.used_bytes)}, {size(report.pinned_bytes)} of it pinned")
    if report.excess_bytes:
        yield pair("evicted", f"{size(report.excess_bytes)}, when an engine saves or a janitor comes by")
    if report.problem:
        yield pair("problem", report.problem)


def _bytes(nbytes: int | None) -> str:
    return "none of its own" if nbytes is None else size(nbytes)
