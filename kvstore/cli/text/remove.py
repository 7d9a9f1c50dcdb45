"""What goes, as text."""

from __future__ import annotations

from rich.text import Text

from kvstore.admin.remove.reports import (
    DropReport,
    EraseReport,
    EvictReport,
    InvalidateReport,
    TtlReport,
    TtlsReport,
    VersionsReport,
)
from kvstore.cli.tables import Column, Renderables, TableRows, age, amount, count, pair, span
from kvstore.rules.units import size

_WIDTH = 12


def evict(report: EvictReport) -> Renderables:
    """Yields what goes, by namespace, and what became of it."""
    yield pair("evict", report.why)
    yield pair("held", amount(report.held))
    yield pair("planned", amount(report.planned))
    if report.pinned.segments:
        yield pair("left alone", f"{amount(report.pinned)}: pinned")
    if report.shared.segments:
        yield pair("shared", f"{amount(report.shared)}: left alone")
    if report.applied:
        spared = (
            f"; {count(report.spared_segments, 'segment')} used or gone meanwhile"
            if report.spared_segments
            else ""
        )
        yield pair("evicted", f"{count(report.evicted_segments, 'segment')}{spared}")
    if report.delete_after_s is not None:
        yield pair("payloads", f"deleted in {max(0.0, report.delete_after_s - report.at_s):.0f} s or later")
    for number, remark in enumerate(report.remarks):
        yield pair("" if number else "remarks", remark)
    lines = report.lines
    if lines:
        yield ""
        yield TableRows(
            Column("namespace", [line.namespace for line in lines]),
            Column("model", [line.model for line in lines], wraps=True),
            Column("segments", [f"{line.planned.segments:,}" for line in lines], right=True),
            Column("blocks", [f"{line.planned.blocks:,}" for line in lines], right=True),
            Column("size", [size(line.planned.stored_bytes) for line in lines], right=True),
        )


def ttls(report: TtlsReport) -> Renderables:
    """Yields a line per time to live."""
    lines = report.ttls
    if not lines:
        yield "No time to live is set: what is stored stays until a quota evicts it."
        return
    yield TableRows(
        Column("scope", [line.scope for line in lines]),
        Column("time to live", [span(line.ttl_s) for line in lines], right=True),
        Column("namespaces", [f"{line.namespaces:,}" for line in lines], right=True),
        Column("source", [line.source for line in lines]),
    )


def ttl(report: TtlReport) -> Renderables:
    """Yields one time to live, before and after."""
    yield pair("scope", f"{report.scope}, {count(report.namespaces, 'namespace')}")
    yield pair("before", "-" if report.before_s is None else span(report.before_s))
    yield pair("after", "-" if report.after_s is None else span(report.after_s))
    if report.older.segments:
        verb = "is" if report.applied else "would be"
        yield pair("older", f"{amount(report.older)}: {verb} not served any more, and evicted soon")


def invalidate(report: InvalidateReport) -> Renderables:
    """Yields what can't be matched any more, or would not be."""
    yield pair("namespace", f"{report.namespace}  {report.model}", width=_WIDTH)
    if report.applied:
        yield pair("invalidated", amount(report.visible), width=_WIDTH)
    else:
        yield pair("visible", f"{amount(report.visible)}; --apply invalidates them", width=_WIDTH)


def drop(report: DropReport) -> Renderables:
    """Yields what goes, and how far it has gone."""
    yield pair("namespace", report.namespace, width=_WIDTH)
    yield pair("model", f"{report.model}  {report.kind}  tenant {report.tenant}", width=_WIDTH)
    if report.seen_s is not None:
        yield pair("registered", f"{age(report.at_s, report.seen_s)} ago", width=_WIDTH)
    yield pair("visible", amount(report.visible), width=_WIDTH)
    yield pair("in trash", f"{report.trashed + report.bygone:,} segments", width=_WIDTH)
    if report.state == "kept":
        yield pair("drop", "nothing done; --apply drops it", width=_WIDTH)
        return
    yield pair("deleted", count(report.deleted_payloads, "payload"), width=_WIDTH)
    if report.state == "erased":
        yield pair("drop", Text("erased", style="green"), width=_WIDTH)
    elif report.state == "in_use":
        text = "an engine has stored something there since: stop it, then drop again"
        yield pair("drop", Text(text, style="bold red"), width=_WIDTH)
    else:
        text = "invisible; payloads go after the grace time, the empty namespace when drop is run again then"
        yield pair("drop", text, width=_WIDTH)


_ERASED = {
    "kept": Text("nothing done; --apply erases it"),
    "erased": Text("erased: the last look found nothing of it", style="green"),
    "in_use": Text(
        "erased; engines have stored something since, which and its journal stay", style="bold red"
    ),
    "remains": Text("not all of it is gone; run it again, or with --wait 5m", style="bold red"),
    "former_versions": Text(
        "the last look found nothing of it, but the bucket keeps former versions, or may", style="bold red"
    ),
}


def erase(report: EraseReport) -> Renderables:
    """Yields what goes, what became of it, and what this did not reach."""
    what = f"tenant {report.tenant}" if report.tenant else f"salt {report.salt} (its id)"
    yield pair("erase", what, width=_WIDTH)
    yield pair("visible", f"{amount(report.found)}{' before' if report.applied else ''}", width=_WIDTH)
    if report.applied:
        yield pair("hidden", count(report.hidden_segments, "segment"), width=_WIDTH)
        yield pair("deleted", count(report.deleted_payloads, "payload"), width=_WIDTH)
        yield pair("looks", f"{report.looks:,}", width=_WIDTH)
    yield from _versions(report.versions)
    if spaces := report.namespaces:
        yield ""
        yield TableRows(
            Column("namespace", [space.id for space in spaces]),
            Column("kind", [space.kind for space in spaces]),
            Column("model", [space.model or "-" for space in spaces], wraps=True),
            Column("tenant", [space.tenant for space in spaces]),
            Column("segments", [f"{space.found.segments:,}" for space in spaces], right=True),
            Column("size", [size(space.found.stored_bytes) for space in spaces], right=True),
            Column("in trash", [f"{space.trashed + space.bygone:,}" for space in spaces], right=True),
            Column("deleted", [f"{space.deleted_payloads:,}" for space in spaces], right=True, plain="0"),
            Column("left", [f"{space.remaining:,}" for space in spaces], right=True, plain="0"),
            Column("unreadable", [f"{space.unreadable:,}" for space in spaces], right=True, plain="0"),
            Column("state", [space.state for space in spaces], plain="kept"),
        )
        yield ""
    if report.ended != "complete":
        ended = Text(f"{report.ended}: {report.problem}", style="bold red")
        yield pair("ended", ended, width=_WIDTH)
    yield pair("result", _ERASED[report.state], width=_WIDTH)
    for number, sentence in enumerate(report.unreached):
        yield pair("" if number else "not reached", sentence, width=_WIDTH)


def _versions(report: VersionsReport) -> Renderables:
    if not report.bucket:
        return
    if report.state == "none":
        yield pair("versions", "the bucket keeps no former versions", width=_WIDTH)
        return
    if not report.rule:
        text = "the bucket was not asked whether it keeps former versions"
        yield pair("versions", Text(text, style="bold red"), width=_WIDTH)
        return
    keeps = "keeps" if report.state == "kept" else "may keep"
    text = f"the bucket {keeps} former versions of deleted payloads. Add this rule to its lifecycle:"
    yield pair("versions", Text(text, style="bold red"), width=_WIDTH)
    yield pair("", report.rule, width=_WIDTH)
    if report.problem:
        yield pair("", report.problem, width=_WIDTH)
