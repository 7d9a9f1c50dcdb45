"""Reports of what was found and mended, as text."""

from __future__ import annotations

from rich.text import Text

from kvstore.admin.repair.reports import (
    FAULTS,
    FollowReport,
    FsckReport,
    RebuildReport,
    WasteReport,
)
from kvstore.cli.shown import rows, said, shown
from kvstore.cli.tables import SHOWN, Column, Renderables, count, pair

_WIDTH = 12


def fsck(report: FsckReport) -> Renderables:
    """Yields what is held, what is waste, what is wrong, and what was done about it."""
    for part in (report.held, report.waste):
        if part is not None:
            yield from shown(part, report.at_s, width=_WIDTH)
            yield ""
    if report.namespaces:
        yield rows(report.namespaces, report.at_s)
        yield ""
    if counts := report.counts:
        yield rows(counts, report.at_s, Column("meaning", [FAULTS[each.kind] for each in counts], wraps=True))
        yield ""
        some = report.faults[:SHOWN]
        if report.found > len(some):
            yield Text(f"{len(some)} of {report.found:,} faults", style="yellow")
        yield rows(some, report.at_s)
        yield ""
    yield pair("took", f"{report.seconds:.1f} s", width=_WIDTH)
    if report.waste is not None:
        if report.applied:
            yield pair("deleted", said("", report.waste.deleted), width=_WIDTH)
        else:
            yield pair("waste", _wasted(report.waste, report), width=_WIDTH)
    if report.depth != "list" or report.ended != "complete":
        yield pair("result", _verdict(report), width=_WIDTH)


def _verdict(report: FsckReport) -> Text:
    if report.ended != "complete":
        return Text(f"{report.ended}: {report.problem}", style="bold red")
    if not report.found:
        return Text("clean", style="green")
    if not report.applied:
        return Text(f"{count(report.found, 'fault')}; the same with --apply mends them", style="bold red")
    if not report.remaining:
        return Text("mended, and clean after that", style="green")
    return Text(f"{count(report.remaining, 'fault')} left after the repair", style="bold red")


def _wasted(waste: WasteReport, report: FsckReport) -> str:
    due = sum(space.due + space.bygone for space in waste.namespaces)
    found = [said("", waste.found)] if waste.found.objects else []
    if due:
        found.append(count(due, "evicted segment"))
    if not found:
        return "none" if report.ended == "complete" else "unknown"
    return f"{' and '.join(found)}; the same with --apply removes it"


def rebuild(report: RebuildReport) -> Renderables:
    """Yields what is in the index again, and what isn't."""
    yield from shown(report, width=_WIDTH)


def follow(report: FollowReport) -> Renderables:
    """Yields a turn in a line."""
    yield pair("follow", said("", report, report.at_s), width=_WIDTH)
    if report.problem:
        yield pair("problem", Text(report.problem, style="bold red"), width=_WIDTH)
