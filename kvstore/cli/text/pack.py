"""What is in a pack, and what became of it, as text."""

from __future__ import annotations

import time

from rich.text import Text

from kvstore.admin.pack.reports import PackApplyReport, PackBuildReport, PackReport, PackVerifyReport
from kvstore.cli.tables import SHOWN, Column, Renderables, TableRows, age, count, pair, plain
from kvstore.cli.text import archive as archive_text
from kvstore.rules.units import size

WIDTH = archive_text.WIDTH


def build(report: PackBuildReport) -> Renderables:
    """Yields the pack that was written, or why there is none."""
    if report.pack is not None:
        yield from inspect(report.pack)
        yield pair("computed", f"in {report.compute_s:.1f} s", width=WIDTH)
    else:
        yield pair("pack", "none", width=WIDTH)
    yield from archive_text.moved(report.export, report.export.exported.stored_bytes)


def inspect(report: PackReport) -> Renderables:
    """Yields what a pack says of itself, and a line per prompt."""
    yield pair("pack", f"{report.source}  {size(report.pack_bytes)}", width=WIDTH)
    yield pair("model", report.model, width=WIDTH)
    yield pair("weights", report.weights, width=WIDTH)
    tenant = f"tenant {report.tenant}, namespace {report.namespace}"
    yield pair("for", f"{tenant}, {report.dtype}, tp {report.tp}, pp {report.pp}", width=WIDTH)
    made = f"{age(time.time(), report.created_s)} ago by vLLM {report.engine}, kvstore {report.version}"
    yield pair("made", made, width=WIDTH)
    yield pair("signed", f"by key {report.key}" if report.key else "no", width=WIDTH)
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


def verify(report: PackVerifyReport) -> Renderables:
    """Yields what the pack says of itself, and whether it is so."""
    yield from inspect(report.pack)
    yield ""
    yield from archive_text.import_(report.archive)
    word, style = ("good", "green") if report.good else ("not whole", "bold red")
    yield pair("pack", Text(word, style=style), width=WIDTH)


def apply(report: PackApplyReport) -> Renderables:
    """Yields what the pack says of itself, and what became of it here."""
    yield from inspect(report.pack)
    yield ""
    yield from archive_text.import_(report.archive)
    if not report.whole:
        yield pair("pack", Text("not all of it is here", style="bold red"), width=WIDTH)
    if report.differences:
        yield ""
        yield Text(
            "engines here differ from what it is for; it serves those that will be so:", style="yellow"
        )
        for one in report.differences:
            yield Text(plain(f"  {one.path}: {one.a} here, {one.b} in the pack ({one.meaning})"))
