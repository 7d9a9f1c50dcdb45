"""Reports on what there is and what becomes of it, as text: a function per report, which yields what a rich
console prints. No I/O here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from rich.padding import Padding
from rich.text import Text

from kvstore.admin.inspect.reports import (
    DiffReport,
    EventLine,
    EventsReport,
    ListReport,
    NamespaceReport,
    NamespacesReport,
    NamespaceTraffic,
    OperationsReport,
    SegmentReport,
    SlotReport,
    StatsReport,
    StatusReport,
    Waiting,
)
from kvstore.cli.shown import rows, said, shown
from kvstore.cli.tables import (
    STYLES,
    Column,
    Renderables,
    TableRows,
    amount,
    backend,
    count,
    pair,
    plain,
    quota_rows,
    share,
)
from kvstore.rules.units import size

#: Digits of a namespace's id that a table shows where nobody types it, and of a long key; --json has all.
_ID_DIGITS = 8
_KEY_DIGITS = 12
#: The part of a namespace's identity that `namespaces` lists and `status` has no room for.
_IDENTITY = ("revision", "dtype", "kv_dtype", "block_tokens", "tp", "pp", "codec", "epoch", "quota_bytes")


def status(report: StatusReport) -> Renderables:
    """Yields what is opened, totals, then a line per quota, per tenant and per namespace."""
    now_s, whole = report.at_s, report.capacity_bytes
    yield from backend("index", report.index)
    yield from backend("payloads", report.payloads)
    if report.fast is not None:
        yield from backend("fast tier", report.fast)
        if report.fast.used_bytes is not None:
            waiting = f", {size(report.fast.dirty_bytes)} not uploaded yet" if report.fast.dirty_bytes else ""
            held = count(report.fast.payloads or 0, "payload")
            used = f"{size(report.fast.used_bytes)} of {size(report.fast.capacity_bytes)} in {held}{waiting}"
            yield pair("", used)
    if report.total is None:
        yield pair("capacity", size(whole))
        yield pair("stored", "unknown: the index can't be asked")
        return
    yield pair("capacity", f"{size(whole)}, {share(report.total.stored_bytes, whole)} used")
    yield pair("stored", f"{amount(report.total)}, {count(len(report.namespaces), 'namespace')}")
    if report.upkeep != Waiting():
        yield pair("", said("upkeep", report.upkeep, now_s))
    yield pair("janitor", "at work" if report.janitor else "none; engines evict when they save")
    # The store's own stands above.
    if quotas := [line for line in report.quotas if line.scope != "store" or line.state != "ok"]:
        yield ""
        yield quota_rows(quotas)
    if len(report.tenants) > 1:
        yield ""
        yield rows(report.tenants, now_s)
    if lines := report.namespaces:
        yield ""
        shares = [share(line.usage.stored_bytes, whole) for line in lines]
        yield rows(lines, now_s, Column("share", shares, right=True), leave=_IDENTITY)


def ls(report: ListReport) -> Renderables:
    """Yields a line per segment."""
    if report.segments and report.namespace:
        yield rows(report.segments, report.at_s, leave=("namespace",))
    else:
        yield from shown(report)


def namespaces(report: NamespacesReport) -> Renderables:
    """Yields a line per namespace."""
    if not (lines := report.namespaces):
        yield "no namespaces: no engine has registered with this index yet"
        return
    sizes = [size(line.usage.stored_bytes) for line in lines]
    yield rows(lines, 0, Column("size", sizes, right=True), leave=("usage",))


def diff(report: DiffReport) -> Renderables:
    """Yields a paragraph per field that differs."""
    if report.same:
        yield "same"
        return
    for difference in report.differences:
        yield Text(plain(difference.path), style="bold")
        yield pair(f"  {report.a}", _value(difference.a), width=20)
        yield pair(f"  {report.b}", _value(difference.b), width=20)
        yield Padding(Text(difference.meaning, style="dim"), (0, 0, 0, 2))


def show(report: NamespaceReport | SegmentReport) -> Renderables:
    """Yields a namespace with its JSON, or a segment with its parts and slots."""
    if isinstance(report, NamespaceReport):
        yield from shown(report)
        yield ""
        yield Text(json.dumps(report.namespace, indent=2, sort_keys=True))
        return
    yield pair("segment", report.segment)
    yield pair("namespace", f"{report.namespace} ({report.kind or 'kind unknown'}, {report.model or '?'})")
    if report.salt:
        yield pair("salt id", report.salt)
    if report.index.state == "unreachable":
        yield from backend("index", report.index)
    elif report.record is None:
        yield pair(
            "index", Text("does not name it: evicted, or never committed. Nothing serves it", style="yellow")
        )
    else:
        yield from shown(report.record, report.at_s, leave=("namespace", "segment"))
    for part in report.parts:
        yield ""
        yield pair(f"rank {part.rank}", Text(part.state, style=STYLES[part.state]))
        yield from shown(part, leave=("slots",))
        if part.slots:
            yield _slots(part.slots)


def _slots(slots: Sequence[SlotReport]) -> TableRows:
    """Returns a line per slot, with exact sizes: another tool may have the same ones."""
    raw = [slot.raw_bytes if slot.raw_bytes != slot.stored_bytes else "-" for slot in slots]
    return rows(
        [slot.model_copy(update={"key": f"{slot.key[:_KEY_DIGITS]}.."}) for slot in slots],
        0,
        Column("bytes", [slot.stored_bytes for slot in slots], right=True),
        Column("raw", raw, right=True, plain="-"),
        leave=("raw_bytes", "stored_bytes"),
    )


def stats(report: StatsReport) -> Renderables:
    """Yields totals, a line per namespace, then why blocks were missed and not stored."""
    total = report.total
    yield pair(
        "time", "since the index was made" if report.seconds is None else f"the last {report.seconds:.1f} s"
    )
    yield from shown(total, leave=("served", "stored", "hit_ratio"))
    if not (lines := report.namespaces):
        return
    yield ""
    yield rows(lines, report.at_s)
    yield from _reasons("missed because", total.misses, [line.misses for line in lines], lines, total.asked)
    yield from _reasons(
        "not stored because", total.unsaved, [line.unsaved for line in lines], lines, total.offered
    )


def _reasons(
    title: str,
    total: Mapping[str, int],
    each: Sequence[Mapping[str, int]],
    lines: Sequence[NamespaceTraffic],
    whole: int,
) -> Renderables:
    """Yields a row per reason; a column per namespace where there are several."""
    if not total:
        return
    several = [(line.id[:_ID_DIGITS], reasons) for line, reasons in zip(lines, each, strict=True) if reasons]
    yield ""
    yield TableRows(
        Column(title, list(total)),
        Column("blocks", [f"{blocks:,}" for blocks in total.values()], right=True),
        Column("share", [share(blocks, whole) for blocks in total.values()], right=True),
        *(
            Column(name, [f"{reasons.get(reason, 0):,}" for reason in total], right=True)
            for name, reasons in (several if len(several) > 1 else [])
        ),
    )


def events(report: EventsReport) -> Renderables:
    """Yields a line per event, in columns that don't depend on the others."""
    if not report.events:
        yield "no events"
    for line in report.events:
        yield from event(line)


def event(event: EventLine) -> Renderables:
    """Yields one event in one line, however narrow the terminal is: other tools cut it up."""
    text = Text(f"{_when(event.at_s)}  {event.namespace[:_ID_DIGITS]}  ", no_wrap=True)
    text.append(f"{event.op:<10}", style=STYLES.get(event.op, ""))
    if event.op == "gap":
        text.append("  events before this are lost")
        yield text
        return
    where = event.segment or "everything"
    text.append(
        f"  {plain(where):<16}  {event.blocks:>6} blocks from {event.depth:<7} {size(event.stored_bytes):>10}"
    )
    if event.rule is not None:
        text.append(f"  {event.rule}")
    if event.by:
        text.append(f"  by {plain(event.by)}")
    yield text


def operations(report: OperationsReport) -> Renderables:
    """Yields a line per operation."""
    if not report.operations:
        yield "no operations"
    for line in report.operations:
        text = Text(f"{_when(line.at_s)}  ", no_wrap=True)
        text.append(f"{plain(line.by)}  {plain(line.verb)}  {plain(line.what)}")
        yield text


def _when(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ") if at_s else "-" * 20


def _value(value: Any) -> str:
    return "(none)" if value is None else json.dumps(value)
