"""What was moved, as text."""

from __future__ import annotations

import time

from rich.text import Text

from kvstore.admin.archive.reports import ExportReport, ImportReport, PackReport
from kvstore.admin.curate.reports import WarmReport
from kvstore.cli.tables import (
    SHOWN,
    Column,
    Renderables,
    TableRows,
    age,
    amount,
    count,
    left_rows,
    pair,
    plain,
)
from kvstore.rules.units import size

WIDTH = 10


def export(report: ExportReport) -> Renderables:
    """Yields what is in the archive, and what isn't."""
    yield pair("archive", report.to or "-", width=WIDTH)
    yield pair("planned", amount(report.planned), width=WIDTH)
    if report.beyond.segments:
        yield pair("beyond", f"{amount(report.beyond)}: more than --max-bytes", width=WIDTH)
    if report.dry_run:
        yield pair("exported", "nothing: a dry run", width=WIDTH)
        return
    yield pair("exported", amount(report.exported), width=WIDTH)
    if report.ended == "complete":
        yield pair("size", size(report.archive_bytes), width=WIDTH)
    if report.pack is not None:
        yield from _pack(report.pack)
    yield from moved(report, report.exported.stored_bytes)


def import_(report: ImportReport) -> Renderables:
    """Yields what became of the archive's segments."""
    yield pair("archive", report.source, width=WIDTH)
    if report.pack is not None:
        yield from _pack(report.pack)
        yield ""
    if report.found_segments != report.announced_segments:
        announced = count(report.announced_segments, "segment")
        yield pair("announced", f"{announced}, {report.found_segments:,} found", width=WIDTH)
    yield pair("verified", amount(report.verified), width=WIDTH)
    if report.dry_run:
        yield pair("imported", "nothing: a dry run", width=WIDTH)
    else:
        yield pair("imported", amount(report.imported), width=WIDTH)
        yield pair("present", amount(report.present), width=WIDTH)
    if report.unsigned or report.unreadable:
        refused = f"{report.unsigned:,} not signed, {report.unreadable:,} with a key that is not here"
        yield pair("refused", refused, width=WIDTH)
    if report.erased:
        yield pair("erased", f"{count(report.erased, 'segment')}: refused here, for ever", width=WIDTH)
    if report.unwanted:
        yield pair("unwanted", f"{count(report.unwanted, 'segment')} of what was not named", width=WIDTH)
    yield from moved(report, report.verified.stored_bytes)
    if report.pack is None:
        return
    if not report.pack.whole:
        yield pair("pack", Text("not all of it is here", style="bold red"), width=WIDTH)
    if report.pack.differences:
        yield ""
        yield Text(
            "engines here differ from what it is for; it serves those that will be so:", style="yellow"
        )
        for one in report.pack.differences:
            yield Text(plain(f"  {one.path}: {one.a} here, {one.b} in the archive ({one.meaning})"))


def _pack(report: PackReport) -> Renderables:
    """Yields what an archive says of its prompts, and a line for each."""
    yield pair("model", report.model, width=WIDTH)
    yield pair("weights", report.weights, width=WIDTH)
    tenant = f"tenant {report.tenant}, namespace {report.namespace}"
    yield pair("for", f"{tenant}, {report.dtype}, tp {report.tp}, pp {report.pp}", width=WIDTH)
    made = f"{age(time.time(), report.created_s)} ago by vLLM {report.engine}, kvstore {report.version}"
    yield pair("made", made, width=WIDTH)
    signed = (
        f"by key {report.key}" if report.checked else f"key {report.key}, not checked: no signing.keys here"
    )
    yield pair("signed", signed if report.key else "no", width=WIDTH)
    yield pair("holds", f"{size(report.stored_bytes)} in {count(report.segments, 'segment')}", width=WIDTH)
    yield ""
    shown = report.prompts[:SHOWN]
    yield TableRows(
        Column("prompt", [one.name for one in shown], wraps=True),
        Column("tokens", [f"{one.tokens:,}" for one in shown], right=True),
        Column("blocks", [f"{one.blocks:,}" for one in shown], right=True),
        Column(
            "loadable",
            ["-" if one.loadable is None else f"{one.loadable:,}" for one in shown],
            right=True,
            plain="-",
        ),
    )
    if len(report.prompts) > len(shown):
        yield Text(f"and {count(len(report.prompts) - len(shown), 'prompt')} more", style="dim")


def moved(report: ExportReport | ImportReport | WarmReport, nbytes: int) -> Renderables:
    """Yields how long it took, why it ended early, and what was left out."""
    rate = f", {nbytes / report.seconds / 1e6:,.0f} MB/s" if report.seconds and nbytes else ""
    yield pair("took", f"{report.seconds:.1f} s{rate}", width=WIDTH)
    if report.ended != "complete":
        yield pair("ended", Text(f"{report.ended}: {report.problem}", style="bold red"), width=WIDTH)
    if report.left_out:
        yield ""
        yield from left_rows(report.left_out, report.left)
