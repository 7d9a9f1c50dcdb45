"""What goes, as text."""

from __future__ import annotations

from rich.text import Text

from kvstore.admin.remove.reports import DropReport, EraseReport, InvalidateReport, VersionsReport
from kvstore.cli.shown import shown
from kvstore.cli.tables import Renderables, pair

_WIDTH = 12

_DROPPED = {
    "kept": Text("nothing done; --apply drops it"),
    "erased": Text("erased", style="green"),
    "in_use": Text("an engine has stored something there since: stop it, then drop again", style="bold red"),
    "waiting": Text(
        "invisible; payloads go after the grace time, the empty namespace when drop is run again then"
    ),
}

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


def invalidate(report: InvalidateReport) -> Renderables:
    """Yields what can't be matched any more, or would not be."""
    yield from shown(report, width=_WIDTH)
    yield pair(
        "result", "invalidated" if report.applied else "nothing done; --apply invalidates it", width=_WIDTH
    )


def drop(report: DropReport) -> Renderables:
    """Yields what goes, and how far it has gone."""
    yield from shown(report, width=_WIDTH)
    yield pair("result", _DROPPED[report.state], width=_WIDTH)


def erase(report: EraseReport) -> Renderables:
    """Yields what goes, what became of it, and what this did not reach."""
    yield from shown(report, width=_WIDTH)
    yield from _versions(report.versions)
    yield pair("result", _ERASED[report.state], width=_WIDTH)


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
