"""What `serve --once` and `serve --probe` print as text."""

from __future__ import annotations

from kvstore.admin.machine import size
from kvstore.cli.tables import Column, Renderables, Rows, age, backend, count, pair
from schemas.janitor import DONE, JanitorState
from schemas.reports import Backend
from schemas.serving import Answering, ProbeReport, ServingReport

_LINES = 10


def serving(report: ServingReport) -> Renderables:
    """What there is, then what the janitor did, then what went wrong."""
    yield from backend("index", _backend(report.index))
    yield from backend("payloads", _backend(report.payloads))
    if report.looked_s is None:
        yield pair("stored", "unknown: the index can't be asked")
    else:
        held = report.total
        amount = f"{size(held.stored_bytes)} of {size(report.capacity_bytes)}"
        namespaces = count(len(report.namespaces) + report.others, "namespace")
        yield pair(
            "stored",
            f"{amount} in {count(held.segments, 'segment')}, {count(held.blocks, 'block')}, {namespaces}",
        )
        if held.trashed_segments or held.bygone_segments:
            waiting = f"{held.trashed_segments:,} evicted, {held.bygone_segments:,} invalidated"
            yield pair("to delete", f"segments: {waiting}")
    if report.janitor is not None:
        yield from _janitor(report.janitor)
    for fault in report.faults[:_LINES]:
        yield pair("fault", f"{age(report.at_s, fault.at_s)} ago, {fault.where}: {fault.problem}")


def probed(report: ProbeReport) -> Renderables:
    """Its own sentence."""
    yield pair("ready" if report.ready else "not ready", f"{report.url}: {report.found}")


def _janitor(state: JanitorState) -> Renderables:
    who = "leader" if state.leader or state.rounds else f"standby: {state.leaseholder or 'nobody'} works"
    yield pair("janitor", f"{who}, {count(state.rounds, 'round')}")
    if state.lease_problem:
        yield pair("", state.lease_problem)
    begun = [step for step in state.steps if step.runs]
    if begun:
        yield ""
        yield Rows(
            Column("step", [step.step for step in begun]),
            Column("done", [f"{step.done:,}" for step in begun], right=True),
            Column("", [DONE[step.step] for step in begun]),
            Column("failures", [step.failures for step in begun], right=True, plain=0),
            Column("problem", [step.problem for step in begun], wraps=True, plain=""),
        )


def _backend(found: Answering) -> Backend:
    state = found.state if found.state != "unknown" else "unreachable"
    return Backend(url=found.url, state=state, problem=found.problem)
