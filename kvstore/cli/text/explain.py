"""Explanations as text: where a chain stops and why, the newest reason first."""

from __future__ import annotations

import json

from rich.padding import Padding
from rich.text import Text

from kvstore.admin.explain.reports import Block, Chain, ExplainReport, Finding, GroupChain, Reach, Told
from kvstore.cli.shown import rows
from kvstore.cli.tables import Renderables, age, count, pair, plain

_GOOD = ("stored",)


def explain(report: ExplainReport) -> Renderables:
    """Yields the answer first, then what engines have told, then how far all of it reaches."""
    yield pair(report.subject, report.name)
    if report.chain is not None:
        yield from _chain(report.chain, report.at_s)
    for block in report.blocks:
        yield ""
        yield pair("namespace", block.namespace)
        yield from _block(block, report.at_s)
    if report.subject == "request":
        for told in report.told:
            yield ""
            yield from _told_in_full(told, report.at_s)
    elif report.told:
        yield ""
        yield rows(report.told, report.at_s, leave=("namespace", "text", "because", "block"))
    if report.reach:
        yield ""
    for reach in report.reach:
        yield _reach(reach, report.at_s)


def _chain(chain: Chain, now_s: float) -> Renderables:
    yield pair("namespace", f"{chain.namespace} ({chain.model})")
    share = f" of {chain.tokens:,}" if chain.resumable_tokens < chain.tokens else ""
    yield pair("loaded", f"an engine would load {chain.resumable_tokens:,}{share} tokens")
    several = len(chain.groups) > 1
    if several:
        yield ""
        yield rows(chain.groups, now_s, leave=("stop",))
    for group in chain.groups:
        yield from _group(group, now_s, several=several)


def _group(group: GroupChain, now_s: float, *, several: bool) -> Renderables:
    stop = group.stop
    if stop is None and several:
        return
    yield ""
    where = f"group {group.group}" if several else "blocks"
    if stop is None:
        yield pair(where, f"all {count(group.blocks, 'full block')} are stored")
        return
    held = f"{group.leading:,} of {count(group.blocks, 'full block')} are stored from the start"
    if group.stored > group.leading:
        held += f", {group.stored - group.leading:,} more after that"
    yield pair(where, held)
    yield pair("stops at", f"block {stop.block:,}, token {stop.token:,}")
    yield from _block(stop, now_s)


def _block(block: Block, now_s: float) -> Renderables:
    yield pair("digest", block.digest)
    for number, finding in enumerate(block.findings):
        yield from _finding("because" if not number else "", finding, now_s)


def _finding(title: str, finding: Finding, now_s: float) -> Renderables:
    style = "green" if finding.cause in _GOOD else "bold" if title else ""
    text = Text(plain(finding.text), style=style)
    if finding.at_s is not None:
        text.append(f", {age(now_s, finding.at_s)} ago", style="default")
    more = [f"{name} {value}" for name, value in _more(finding) if value]
    if more:
        text.append(f" ({'; '.join(more)})", style="dim")
    yield pair(title, text)
    for one in finding.differences:
        line = f"{plain(one.path)}: {plain(json.dumps(one.a))} here, {plain(json.dumps(one.b))} there"
        yield Padding(Text(f"{line}; {one.meaning}", style="dim"), (0, 0, 0, 13))


def _more(finding: Finding) -> list[tuple[str, str]]:
    return [("rule", finding.rule), ("segment", finding.segment), ("request", plain(finding.request))]


def _told_in_full(told: Told, now_s: float) -> Renderables:
    yield pair(told.op, f"{plain(told.request)}, {age(now_s, told.at_s)} ago, namespace {told.namespace}")
    done = {"match": "were served", "load": "were loaded", "save": "were saved"}[told.op]
    yield pair(
        "", f"{told.served:,} of {count(told.asked, 'block')} {done}; from block {told.position:,} on not"
    )
    yield pair("because", Text(plain(f"{told.reason}: {told.text}"), style="bold"))
    if told.because is not None:
        yield from _finding("", told.because, now_s)
    if told.block is not None:
        yield pair("now", f"digest {told.block.digest}")
        for finding in told.block.findings:
            yield from _finding("", finding, now_s)


def _reach(reach: Reach, now_s: float) -> Text:
    def since(since_s: float | None) -> str:
        return "" if since_s is None else f" of the last {age(now_s, since_s)}"

    whole = ", all since the journal began" if reach.events_complete else ""
    events = f"{reach.events:,} commits and evictions{since(reach.events_since_s)}{whole}"
    outcomes = f"{count(reach.outcomes, 'outcome')}{since(reach.outcomes_since_s)}"
    return Text(f"journal of {reach.namespace}: {events}; {outcomes}", style="dim")
