"""Reports of what was moved, as text."""

from __future__ import annotations

from rich.text import Text

from kvstore.admin.machine import size
from kvstore.cli.tables import Column, Renderables, Rows, amount, count, pair
from schemas.transfers import ExportReport, ImportReport, Left, WarmReport

#: So many of the segments that were left out are in the text; --json has more.
_SHOWN = 20
_WIDTH = 10


def export(report: ExportReport) -> Renderables:
    """What is in the archive, and what isn't."""
    yield pair("archive", report.to or "-", width=_WIDTH)
    yield pair("planned", amount(report.planned), width=_WIDTH)
    if report.beyond.segments:
        yield pair("beyond", f"{amount(report.beyond)}: more than --max-bytes", width=_WIDTH)
    if report.dry_run:
        yield pair("exported", "nothing: a dry run", width=_WIDTH)
        return
    yield pair("exported", amount(report.exported), width=_WIDTH)
    if report.ended == "complete":
        yield pair("size", size(report.archive_bytes), width=_WIDTH)
    yield from _end(report, report.exported.stored_bytes)


def imported(report: ImportReport) -> Renderables:
    """What became of the archive's segments."""
    yield pair("archive", report.source, width=_WIDTH)
    if report.found_segments != report.announced_segments:
        announced = count(report.announced_segments, "segment")
        yield pair("announced", f"{announced}, {report.found_segments:,} found", width=_WIDTH)
    yield pair("verified", amount(report.verified), width=_WIDTH)
    if report.dry_run:
        yield pair("imported", "nothing: a dry run", width=_WIDTH)
    else:
        yield pair("imported", amount(report.imported), width=_WIDTH)
        yield pair("present", amount(report.present), width=_WIDTH)
    yield from _end(report, report.verified.stored_bytes)


def warm(report: WarmReport) -> Renderables:
    """What is in the fast tier now."""
    yield pair("fast tier", report.fast, width=_WIDTH)
    share = f"{size(report.used_bytes)} of {size(report.capacity_bytes)}"
    yield pair("used", f"{share}, {size(report.used_before_bytes)} before", width=_WIDTH)
    yield pair("planned", amount(report.planned), width=_WIDTH)
    if report.beyond.segments:
        yield pair("beyond", f"{amount(report.beyond)}: more than the tier or --max-bytes", width=_WIDTH)
    if report.dry_run:
        yield pair("warm", "nothing fetched: a dry run", width=_WIDTH)
        return
    yield pair("warm", amount(report.warm), width=_WIDTH)
    yield from _end(report, report.warm.stored_bytes)


def _end(report: ExportReport | ImportReport | WarmReport, nbytes: int) -> Renderables:
    rate = f", {nbytes / report.seconds / 1e6:,.0f} MB/s" if report.seconds and nbytes else ""
    yield pair("took", f"{report.seconds:.1f} s{rate}", width=_WIDTH)
    if report.ended != "complete":
        yield pair("ended", Text(f"{report.ended}: {report.problem}", style="bold red"), width=_WIDTH)
    yield from _left(report.left_out, report.left)


def _left(number: int, left: tuple[Left, ...]) -> Renderables:
    if not number:
        return
    shown = left[:_SHOWN]
    yield ""
    more = f", {len(shown)} of them here" if len(shown) < number else ""
    yield Text(f"{count(number, 'segment')} left out{more}", style="yellow")
    yield Rows(
        Column("namespace", [each.namespace for each in shown]),
        Column("segment", [each.segment for each in shown]),
        Column("reason", [each.reason for each in shown], wraps=True),
    )
