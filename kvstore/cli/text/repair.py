"""Reports of what was found and mended, as text."""

from __future__ import annotations

from rich.text import Text

from kvstore.admin.repair.reports import (
    FAULTS,
    Counted,
    FaultCount,
    FollowReport,
    FsckReport,
    GcReport,
    RebuildReport,
    ReshardReport,
)
from kvstore.cli.tables import SHOWN, Column, Renderables, TableRows, count, left_rows, pair
from kvstore.rules.units import size

_WIDTH = 12


def fsck(report: FsckReport) -> Renderables:
    """Yields what was looked at, what is wrong, what was done about it."""
    spaces = report.namespaces
    yield TableRows(
        Column("namespace", [space.id for space in spaces]),
        Column("model", [space.model for space in spaces], wraps=True, plain=""),
        Column("segments", [f"{space.checked.segments:,}" for space in spaces], right=True),
        Column("blocks", [f"{space.checked.blocks:,}" for space in spaces], right=True),
        Column("bytes", [size(space.checked.stored_bytes) for space in spaces], right=True),
        Column("verified", [f"{space.verified.segments:,}" for space in spaces], right=True, plain="0"),
        Column("entries", [f"{space.entries:,}" for space in spaces], right=True),
        Column("dangling", [f"{space.dangling:,}" for space in spaces], right=True, plain="0"),
        Column("leftovers", [size(space.leftover_bytes) for space in spaces], right=True, plain="0 B"),
    )
    yield ""
    if report.counts:
        counts = report.counts
        yield TableRows(
            Column("fault", [each.kind for each in counts]),
            Column("number", [f"{each.faults:,}" for each in counts], right=True),
            Column("blocks", [f"{each.blocks:,}" for each in counts], right=True, plain="0"),
            Column("mended", [_mended(report, each) for each in counts], right=True, plain=""),
            Column("meaning", [FAULTS[each.kind] for each in counts], wraps=True),
        )
        yield ""
        yield from _faults(report)
    yield pair("took", f"{report.seconds:.1f} s", width=_WIDTH)
    yield pair("result", _verdict(report), width=_WIDTH)


def _mended(report: FsckReport, each: FaultCount) -> str:
    return f"{each.mended:,}" if report.repair else ""


def _faults(report: FsckReport) -> Renderables:
    shown = report.faults[:SHOWN]
    if report.found > len(shown):
        yield Text(f"{len(shown)} of {report.found:,} faults", style="yellow")
    yield TableRows(
        Column("namespace", [fault.namespace for fault in shown]),
        Column("segment", [fault.segment for fault in shown], plain=""),
        Column("fault", [fault.kind for fault in shown]),
        Column("done", [fault.mended for fault in shown], plain="none"),
        Column("detail", [fault.detail for fault in shown], wraps=True),
    )
    yield ""


def _verdict(report: FsckReport) -> Text:
    if report.ended != "complete":
        return Text(f"{report.ended}: {report.problem}", style="bold red")
    if not report.found:
        return Text("clean", style="green")
    if not report.repair:
        return Text(
            f"{count(report.found, 'fault')}; `cache-admin fsck --apply` mends them", style="bold red"
        )
    if not report.remaining:
        return Text("mended, and clean after that", style="green")
    return Text(f"{count(report.remaining, 'fault')} left after the repair", style="bold red")


def gc(report: GcReport) -> Renderables:
    """Yields what is waste, and what became of it."""
    spaces = report.namespaces
    yield TableRows(
        Column("namespace", [space.id for space in spaces]),
        Column("model", [space.model or "-" for space in spaces], wraps=True),
        Column("orphans", [_counted(space.orphans) for space in spaces], right=True),
        Column("too young", [_counted(space.young) for space in spaces], right=True, plain="-"),
        Column("in trash", [f"{space.trashed:,}" for space in spaces], right=True),
        Column("due", [f"{space.due:,}" for space in spaces], right=True),
        Column("invalidated", [f"{space.bygone:,}" for space in spaces], right=True, plain="0"),
        Column("reaped", [f"{space.reaped:,}" for space in spaces], right=True, plain="0"),
        Column("swept", [f"{space.swept:,}" for space in spaces], right=True, plain="0"),
        Column("accounts", ["corrected" if space.corrected else "" for space in spaces], plain=""),
    )
    if report.strays:
        yield ""
        yield TableRows(
            Column("beside the payloads", [stray.kind for stray in report.strays]),
            Column("old", [_counted(stray.old) for stray in report.strays], right=True),
            Column("too young", [_counted(stray.young) for stray in report.strays], right=True, plain="-"),
        )
    for name in report.foreign[:SHOWN]:
        yield pair("foreign", name, width=_WIDTH)
    yield ""
    if report.ended != "complete":
        yield pair("ended", Text(f"{report.ended}: {report.problem}", style="bold red"), width=_WIDTH)
    if report.delete:
        yield pair("deleted", _counted(report.deleted), width=_WIDTH)
        if report.left_out:
            yield pair("left", f"{count(report.left_out, 'object')}: in use after all", width=_WIDTH)
    else:
        yield pair("waste", _wasted(report), width=_WIDTH)


def _wasted(report: GcReport) -> str:
    due = sum(space.due + space.bygone for space in report.namespaces)
    found = [_counted(report.waste)] if report.waste.objects else []
    if due:
        found.append(count(due, "evicted segment"))
    if not found:
        return "none" if report.ended == "complete" else "unknown"
    return f"{' and '.join(found)}; `cache-admin gc --apply` removes it"


def _counted(counted: Counted) -> str:
    return f"{counted.objects:,} ({size(counted.stored_bytes)})" if counted.objects else "-"


def rebuild(report: RebuildReport) -> Renderables:
    """Yields what is in the index again, and what isn't."""
    spaces = report.namespaces
    yield TableRows(
        Column("namespace", [space.id for space in spaces]),
        Column("model", [space.model or "-" for space in spaces], wraps=True),
        Column("stored", [f"{space.stored:,}" for space in spaces], right=True),
        Column("known", [f"{space.known:,}" for space in spaces], right=True),
        Column("listed", [f"{space.listed.segments:,}" for space in spaces], right=True),
        Column("blocks", [f"{space.listed.blocks:,}" for space in spaces], right=True),
        Column("bytes", [size(space.listed.stored_bytes) for space in spaces], right=True),
        Column("incomplete", [f"{space.incomplete:,}" for space in spaces], right=True, plain="0"),
        Column("unusable", [f"{space.unusable:,}" for space in spaces], right=True, plain="0"),
        Column("unsigned", [f"{space.unsigned:,}" for space in spaces], right=True, plain="0"),
        Column("unreadable", [f"{space.unreadable:,}" for space in spaces], right=True, plain="0"),
        Column("refused", [f"{space.refused:,}" for space in spaces], right=True, plain="0"),
        Column("erased", [f"{space.erased:,}" for space in spaces], right=True, plain="0"),
    )
    yield ""
    if report.left_out:
        yield from left_rows(report.left_out, report.left)
        yield ""
    if report.ended != "complete":
        yield pair("ended", Text(f"{report.ended}: {report.problem}", style="bold red"), width=_WIDTH)
    if report.dry_run:
        yield pair("rebuild", "nothing committed: a dry run", width=_WIDTH)
    yield pair("took", f"{report.seconds:.1f} s", width=_WIDTH)


def reshard(report: ReshardReport) -> Renderables:
    """Yields where the namespace lies, and what was brought over."""
    yield pair("namespace", f"{report.namespace} {report.model}", width=_WIDTH)
    yield pair("shards", f"{report.before} -> {report.after}", width=_WIDTH)
    held = report.visible
    yield pair(
        "holds",
        f"{count(held.segments, 'segment')}, {count(held.blocks, 'block')}, {size(held.stored_bytes)}",
        width=_WIDTH,
    )
    if not report.applied:
        return
    yield pair(
        "copied",
        f"{count(report.copied, 'segment')}, {report.entries:,} entries, {count(report.rounds, 'round')}",
        width=_WIDTH,
    )
    if report.withdrawn:
        yield pair("withdrawn", f"{report.withdrawn:,}: evicted while they were copied", width=_WIDTH)
    if report.unfindable and report.after > 1:
        found = f"{report.unfindable:,}: an older release named them, nobody finds them, and they go by age"
        yield pair("not found", Text(found, style="yellow"), width=_WIDTH)
    if report.ended != "complete":
        yield pair("ended", Text(f"{report.ended}: {report.problem}", style="bold red"), width=_WIDTH)
    yield pair("took", f"{report.seconds:.1f} s", width=_WIDTH)


def follow(report: FollowReport) -> Renderables:
    """Yields a turn in a line."""
    parts = [f"{count(report.listed.segments, 'segment')} listed", f"{report.gone:,} gone"]
    if report.incomplete:
        parts.append(f"{report.incomplete:,} incomplete")
    if report.left_out > report.incomplete:
        parts.append(f"{report.left_out - report.incomplete:,} left out")
    if report.behind_s is not None:
        parts.append(f"{report.behind_s:.1f} s behind")
    if report.way_s:
        parts.append(f"{report.way_s:.1f} s on the way")
    yield pair("follow", ", ".join(parts), width=_WIDTH)
    if report.problem:
        yield pair("problem", Text(report.problem, style="bold red"), width=_WIDTH)
