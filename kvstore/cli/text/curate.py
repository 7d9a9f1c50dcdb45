"""What is kept and what is fetched, as text."""

from __future__ import annotations

import time

from kvstore.admin.curate.reports import QuotasReport, SessionReport, WarmReport
from kvstore.cli.shown import rows, shown
from kvstore.cli.tables import Renderables, count, pair, span
from kvstore.cli.text.archive import WIDTH, moved
from kvstore.index.eviction import ROOM_BYTES
from kvstore.rules.units import size


def quotas(report: QuotasReport) -> Renderables:
    """Yields a line per quota."""
    yield from shown(report)
    yield ""
    room = f"a hundredth of a quota, at most {size(ROOM_BYTES)}"
    yield f"Eviction begins where {room}, is left, and goes on until there is twice that."


def session(report: SessionReport) -> Renderables:
    """Yields a session in each namespace that knows it, and what became of it."""
    yield rows([told.session for told in report.sessions], report.at_s)
    if not report.applied:
        return
    yield ""
    if report.action == "end":
        ended = count(sum(told.moved for told in report.sessions), "segment")
        yield pair("ended", f"{ended} that only it has used go before all else")
        return
    kept = sum(told.retained_bytes for told in report.sessions)
    yield pair("retained", f"{size(kept)} go after all else, for {span((report.until_s or 0) - report.at_s)}")
    if refused := sum(told.refused_bytes for told in report.sessions):
        yield pair("no room", f"{size(refused)}: more than sessions.retain_share of a quota")


def warm(report: WarmReport) -> Renderables:
    """Yields what is in the fast tier now."""
    yield from shown(report, time.time(), width=WIDTH, leave=("left", "seconds", "ended"))
    if report.dry_run:
        yield pair("warm", "nothing fetched: a dry run", width=WIDTH)
    else:
        yield from moved(report, report.warm.stored_bytes)
