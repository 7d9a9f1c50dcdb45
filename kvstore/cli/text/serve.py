"""What `serve --once` and `serve --probe` print as text."""

from __future__ import annotations

from kvstore.admin.serve.reports import ProbeReport, ServingReport
from kvstore.cli.tables import Column, Renderables, TableRows, age, backend, count, pair
from kvstore.janitor.reports import DONE, JanitorState
from kvstore.rules.units import size

_LINES = 10


def serve(report: ServingReport) -> Renderables:
    """Yields what there is, then what the janitor did, then what went wrong."""
    status = report.status
    yield from backend("index", status.index)
    yield from backend("payloads", status.payloads)
    if (held := status.total) is None:
        yield pair("stored", "unknown: the index can't be asked")
    else:
        amount = f"{size(held.stored_bytes)} of {size(status.capacity_bytes)}"
        namespaces = count(len(status.namespaces) + report.others, "namespace")
        yield pair(
            "stored",
            f"{amount} in {count(held.segments, 'segment')}, {count(held.blocks, 'block')}, {namespaces}",
        )
        if status.upkeep.trashed or status.upkeep.bygone:
            waiting = f"{status.upkeep.trashed:,} evicted, {status.upkeep.bygone:,} invalidated"
            yield pair("to delete", f"segments: {waiting}")
    if report.janitor is not None:
        yield from _janitor(report.janitor)
    for fault in report.faults[:_LINES]:
        yield pair("fault", f"{age(report.at_s, fault.at_s)} ago, {fault.where}: {fault.problem}")


def probe(report: ProbeReport) -> Renderables:
    """Yields the sentence that it says of itself."""
    yield pair("ready" if report.ready else "not ready", f"{report.url}: {report.found}")


def _janitor(state: JanitorState) -> Renderables:
    yield pair("janitor", count(state.rounds, "round"))
    begun = [step for step in state.steps if step.runs]
    if begun:
        yield ""
        yield TableRows(
            Column("step", [step.step for step in begun]),
            Column("done", [f"{step.done:,}" for step in begun], right=True),
            Column("", [DONE[step.step] for step in begun]),
            Column("failures", [step.failures for step in begun], right=True, plain=0),
            Column("problem", [step.problem for step in begun], wraps=True, plain=""),
        )
