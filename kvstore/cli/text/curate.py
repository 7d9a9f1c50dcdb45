"""What is kept and what is fetched, as text."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.admin.curate.reports import (
    PinReport,
    PinsReport,
    QuotaReport,
    QuotasReport,
    SessionLine,
    SessionReport,
    SessionsReport,
    WarmReport,
)
from kvstore.admin.reports import SegmentSummary
from kvstore.cli.tables import (
    Column,
    Renderables,
    TableRows,
    age,
    amount,
    count,
    pair,
    quota_rows,
    span,
    use_age,
)
from kvstore.cli.text.archive import WIDTH, moved
from kvstore.index.eviction import ROOM_BYTES
from kvstore.rules.units import size


def pins(report: PinsReport) -> Renderables:
    """Yields what is pinned."""
    yield pair(
        "pinned", f"{amount(report.pinned)}; at most {size(report.most_bytes)} of the store's quota may be"
    )
    yield from _segments(report.segments, report.at_s)


def pin(report: PinReport) -> Renderables:
    """Yields what is to be pinned or unpinned, and what became of it."""
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
    yield TableRows(
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
    """Yields a line per quota."""
    yield quota_rows(report.quotas)
    yield ""
    room = f"a hundredth of a quota, at most {size(ROOM_BYTES)}"
    yield f"Eviction begins where {room}, is left, and goes on until there is twice that."


def quota(report: QuotaReport) -> Renderables:
    """Yields one quota, before and after."""
    yield pair("quota", f"{report.scope}{'' if report.known else ', which nothing belongs to yet'}")
    yield pair("before", _bytes(report.before_bytes))
    yield pair("after", _bytes(report.after_bytes))
    yield pair("used", f"{size(report.used_bytes)}, {size(report.pinned_bytes)} of it pinned")
    if report.excess_bytes:
        yield pair("evicted", f"{size(report.excess_bytes)}, when an engine saves or a janitor comes by")
    if report.problem:
        yield pair("problem", report.problem)


def sessions(report: SessionsReport) -> Renderables:
    """Yields how many sessions there are, and a line for each that owns much."""
    yield pair("sessions", f"{report.live:,} live, {report.retained:,} retained, {report.ended:,} ended")
    yield pair("retained", size(report.retained_bytes))
    if report.sessions:
        yield ""
        yield _session_lines(report.sessions, report.at_s)


def session(report: SessionReport) -> Renderables:
    """Yields a session in each namespace that knows it, and what became of it."""
    yield _session_lines([told.session for told in report.sessions], report.at_s)
    if not report.applied:
        return
    yield ""
    if report.action == "end":
        moved = sum(told.moved for told in report.sessions)
        yield pair("ended", f"{count(moved, 'segment')} that only it has used go before all else")
        return
    kept = sum(told.retained_bytes for told in report.sessions)
    yield pair("retained", f"{size(kept)} go after all else, for {span((report.until_s or 0) - report.at_s)}")
    if refused := sum(told.refused_bytes for told in report.sessions):
        yield pair("no room", f"{size(refused)}: more than sessions.retain_share of a quota")


def _session_lines(lines: Sequence[SessionLine], now_s: float) -> TableRows:
    return TableRows(
        Column("session", [line.session for line in lines]),
        Column("namespace", [line.namespace for line in lines]),
        Column("state", [line.state for line in lines]),
        Column("for", [span((line.until_s or now_s) - now_s) for line in lines], right=True, plain="-"),
        Column("priority", [line.priority for line in lines], plain="normal"),
        Column("used", [use_age(now_s, line.last_use_s) for line in lines], right=True),
        Column("segments", [f"{line.segments:,}" for line in lines], right=True),
        Column("only its own", [size(line.stored_bytes) for line in lines], right=True),
    )


def warm(report: WarmReport) -> Renderables:
    """Yields what is in the fast tier now."""
    yield pair("fast tier", report.fast, width=WIDTH)
    share = f"{size(report.used_bytes)} of {size(report.capacity_bytes)}"
    yield pair("used", f"{share}, {size(report.used_before_bytes)} before", width=WIDTH)
    for one in report.prompts:
        yield pair("prompt", f"{one.stored:,} of {one.tokens:,} tokens in {one.namespace}", width=WIDTH)
    for line in report.sessions:
        own = f"{line.segments:,} segments of its own in {line.namespace}"
        yield pair("session", f"{line.session}, {line.state}: {own}", width=WIDTH)
    yield pair("planned", amount(report.planned), width=WIDTH)
    if report.beyond.segments:
        yield pair("beyond", f"{amount(report.beyond)}: more than the tier or --max-bytes", width=WIDTH)
    if report.dry_run:
        yield pair("warm", "nothing fetched: a dry run", width=WIDTH)
        return
    yield pair("warm", amount(report.warm), width=WIDTH)
    yield from moved(report, report.warm.stored_bytes)


def _bytes(nbytes: int | None) -> str:
    return "none of its own" if nbytes is None else size(nbytes)
