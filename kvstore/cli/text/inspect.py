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
    DuReport,
    EventLine,
    EventsReport,
    ListReport,
    NamespaceReport,
    NamespacesReport,
    NamespaceTraffic,
    OperationsReport,
    PartReport,
    SegmentReport,
    StatsReport,
    StatusReport,
    TopLine,
    TopReport,
    Waiting,
)
from kvstore.admin.reports import QuotaLine, SegmentSummary
from kvstore.cli.tables import (
    STYLES,
    Column,
    Renderables,
    TableRows,
    age,
    amount,
    backend,
    count,
    pair,
    plain,
    quota_rows,
    share,
    span,
    use_age,
)
from kvstore.rules.units import size

#: Digits of a namespace's id that a table shows where nobody types it, and of a long key; --json has all.
_ID_DIGITS = 8
_KEY_DIGITS = 12


def status(report: StatusReport) -> Renderables:
    """Yields what is opened, totals, then a line per quota, per tenant and per namespace."""
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
        yield pair("capacity", size(report.capacity_bytes))
        yield pair("stored", "unknown: the index can't be asked")
        return
    used = share(report.total.stored_bytes, report.capacity_bytes)
    yield pair("capacity", f"{size(report.capacity_bytes)}, {used} used")
    yield pair("stored", f"{amount(report.total)}, {count(len(report.namespaces), 'namespace')}")
    if waits := _waits(report.upkeep):
        yield pair("", waits)
    yield pair("janitor", "at work" if report.janitor else "none; engines evict when they save")
    # The store's own stands above.
    yield from _quota_table([line for line in report.quotas if line.scope != "store" or line.state != "ok"])
    yield from _tenant_table(report)
    yield from _namespace_table(report)


def _waits(waiting: Waiting) -> str:
    parts = [f"{size(waiting.pinned_bytes)} pinned"] if waiting.pinned_bytes else []
    if waiting.trashed:
        parts.append(f"{count(waiting.trashed, 'evicted segment')} to be deleted")
    if waiting.bygone:
        parts.append(f"{count(waiting.bygone, 'invalidated segment')} to be evicted")
    return ", ".join(parts)


def _quota_table(lines: Sequence[QuotaLine]) -> Renderables:
    if lines:
        yield ""
        yield quota_rows(lines)


def _tenant_table(report: StatusReport) -> Renderables:
    lines = report.tenants
    if len(lines) < 2:
        return
    quotas = [size(line.quota_bytes) if line.quota_bytes is not None else "-" for line in lines]
    yield ""
    yield TableRows(
        Column("tenant", [line.tenant for line in lines], wraps=True),
        Column("namespaces", [line.namespaces for line in lines], right=True),
        Column("segments", [f"{line.usage.segments:,}" for line in lines], right=True),
        Column("blocks", [f"{line.usage.blocks:,}" for line in lines], right=True),
        Column("size", [size(line.usage.stored_bytes) for line in lines], right=True),
        Column("quota", quotas, right=True, plain="-"),
        Column("pinned", [_bytes(line.upkeep.pinned_bytes) for line in lines], right=True, plain="-"),
    )


def _namespace_table(report: StatusReport) -> Renderables:
    lines = report.namespaces
    if not lines:
        return
    shares = [share(line.usage.stored_bytes, report.capacity_bytes) for line in lines]
    trash = [line.upkeep.trashed + line.upkeep.bygone or "-" for line in lines]
    yield ""
    yield TableRows(
        Column("namespace", [line.id for line in lines]),
        Column("kind", [line.kind for line in lines]),
        Column("model", [line.model for line in lines], wraps=True),
        Column("segments", [f"{line.usage.segments:,}" for line in lines], right=True),
        Column("blocks", [f"{line.usage.blocks:,}" for line in lines], right=True),
        Column("size", [size(line.usage.stored_bytes) for line in lines], right=True),
        Column("share", shares, right=True),
        Column("pinned", [_bytes(line.upkeep.pinned_bytes) for line in lines], right=True, plain="-"),
        Column("trash", trash, right=True, plain="-"),
        Column("shards", [line.shards for line in lines], right=True, plain=1),
        Column("ttl", [span(line.ttl_s or 0) for line in lines], right=True, plain="-"),
        Column("cost", [span(line.cost_s) for line in lines], right=True, plain="-"),
        Column("opened", [_age_or_dash(report.at_s, line.seen_s) for line in lines], right=True),
        Column("oldest", [_age_or_dash(report.at_s, line.oldest_use_s) for line in lines], right=True),
    )


def ls(report: ListReport) -> Renderables:
    """Yields a line per segment."""
    lines = report.segments
    if not lines:
        yield "no segments"
        return
    yield TableRows(
        Column(
            "namespace",
            [line.namespace[:_ID_DIGITS] for line in lines],
            plain=(report.namespace or "")[:_ID_DIGITS],
        ),
        Column("segment", [line.segment for line in lines]),
        Column("slots", [line.slots for line in lines], right=True),
        Column("size", [size(line.stored_bytes) for line in lines], right=True),
        Column("depth", [line.depth for line in lines], right=True),
        Column("codec", [line.codec for line in lines]),
        Column("ranks", [line.ranks for line in lines], right=True, plain=1),
        Column("cost", [span(line.cost_us / 1e6) for line in lines], right=True, plain="-"),
        Column("", ["pinned" if line.pinned else "" for line in lines], plain=""),
        Column("made", [age(report.at_s, line.created_s) for line in lines], right=True),
        Column("used", [_last_use(report.at_s, line) for line in lines], right=True),
    )


def namespaces(report: NamespacesReport) -> Renderables:
    """Yields a line per namespace."""
    lines = report.namespaces
    if not lines:
        yield "no namespaces: no engine has registered with this index yet"
        return
    yield TableRows(
        Column("namespace", [line.id for line in lines]),
        Column("kind", [line.kind for line in lines]),
        Column("model", [line.model for line in lines], wraps=True),
        Column("revision", [line.revision for line in lines], wraps=True, plain=""),
        Column("tenant", [line.tenant for line in lines], wraps=True, plain="default"),
        Column("dtype", [line.dtype for line in lines]),
        Column("kv", [line.kv_dtype or "-" for line in lines], plain="-"),
        Column("tokens", [line.block_tokens or "-" for line in lines], right=True, plain="-"),
        Column("tp", [line.tp for line in lines], right=True, plain=1),
        Column("pp", [line.pp for line in lines], right=True, plain=1),
        Column("codec", [line.codec for line in lines], plain="none"),
        Column("epoch", [line.epoch for line in lines], right=True, plain=0),
        Column("size", [size(line.usage.stored_bytes) for line in lines], right=True),
    )


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
        yield pair("namespace", report.id)
        yield pair("stored", amount(report.usage))
        if waits := _waits(report.upkeep):
            yield pair("", waits)
        if report.cost_s:
            yield pair("cost", f"{span(report.cost_s)} to compute it again")
        if report.seen_s is not None:
            yield pair("opened", f"{age(report.at_s, report.seen_s)} ago, by an engine")
        if report.shards > 1:
            yield pair("shards", str(report.shards))
        yield ""
        yield quota_rows(report.quotas)
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
        yield from _record(report.record, report.at_s)
    for part in report.parts:
        yield ""
        yield from _part(part, verified=report.verified)


def _record(record: SegmentSummary, now_s: float) -> Renderables:
    yield pair("stored", f"{size(record.stored_bytes)}, {count(record.slots, 'slot')}, codec {record.codec}")
    yield pair("depth", f"{record.depth} blocks before its first slot")
    made, used = age(now_s, record.created_s), _last_use(now_s, record)
    yield pair("made", f"{made} ago, last used {used} ago{', pinned' if record.pinned else ''}")
    if record.cost_us:
        yield pair("cost", f"{span(record.cost_us / 1e6)} to compute it again")


def _part(part: PartReport, *, verified: bool) -> Renderables:
    yield pair(f"rank {part.rank}", Text(part.state, style=STYLES[part.state]))
    yield pair("payload", part.location)
    if part.stored_bytes is not None:
        start = "" if part.data_start is None else f", data from byte {part.data_start:,} on"
        by = f", written by {part.writer}" if part.writer else ""
        yield pair("size", f"{part.stored_bytes:,} bytes{start}{by}")
    if part.key is not None:
        yield pair("signed", f"with key {part.key}{', and encrypted' if part.encrypted else ''}")
    for problem in part.problems:
        yield pair("problem", Text(plain(problem), style="red"))
    slots = part.slots
    if slots:
        yield TableRows(
            Column("slot", [slot.slot for slot in slots], right=True),
            Column("key", [f"{slot.key[:_KEY_DIGITS]}.." for slot in slots]),
            Column("dtype", [slot.dtype for slot in slots]),
            Column("shape", ["x".join(map(str, slot.shape)) for slot in slots], wraps=True),
            Column("bytes", [slot.stored_bytes for slot in slots], right=True),
            Column(
                "raw",
                [slot.raw_bytes if slot.raw_bytes != slot.stored_bytes else "-" for slot in slots],
                right=True,
                plain="-",
            ),
            Column("codec", [slot.codec for slot in slots]),
            Column("xxh3", [slot.checksum for slot in slots]),
            *([Column("check", [slot.check for slot in slots])] if verified else []),
        )


def stats(report: StatsReport) -> Renderables:
    """Yields totals, a line per namespace, then why blocks were missed and not stored."""
    total = report.total
    yield pair(
        "time", "since the index was made" if report.seconds is None else f"the last {report.seconds:.1f} s"
    )
    yield pair("requests", f"{total.requests:,}")
    yield pair("asked", f"{count(total.asked, 'block')}, {total.served:,} served{_ratio(total.hit_ratio)}")
    yield pair("offered", f"{count(total.offered, 'block')}, {total.stored:,} stored")
    yield pair("evicted", f"{size(total.evicted_bytes)} to keep a quota")
    lines = report.namespaces
    if not lines:
        return
    yield ""
    yield TableRows(
        Column("namespace", [line.id for line in lines]),
        Column("kind", [line.kind for line in lines]),
        Column("model", [line.model for line in lines], wraps=True),
        Column("tenant", [line.tenant for line in lines], wraps=True, plain="default"),
        Column("requests", [f"{line.requests:,}" for line in lines], right=True),
        Column("asked", [f"{line.asked:,}" for line in lines], right=True),
        Column("served", [f"{line.served:,}" for line in lines], right=True),
        Column("hits", [_percent(line.hit_ratio) for line in lines], right=True),
        Column("offered", [f"{line.offered:,}" for line in lines], right=True),
        Column("stored", [f"{line.stored:,}" for line in lines], right=True),
        Column("evicted", [size(line.evicted_bytes) for line in lines], right=True),
    )
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


def top(report: TopReport) -> Renderables:
    """Yields two tables: the hottest and the coldest."""
    if not report.hottest and not report.coldest:
        yield "no segments"
        return
    if report.hottest:
        yield Text("where most loads begin", style="bold")
        yield _top_rows(report.hottest, report.at_s)
    if report.coldest:
        if report.hottest:
            yield ""
        yield Text("what would be evicted next", style="bold")
        yield _top_rows(report.coldest, report.at_s)


def _top_rows(lines: Sequence[TopLine], now_s: float) -> TableRows:
    minutes = ["-" if line.minutes is None else f"{line.minutes:.1f}" for line in lines]
    return TableRows(
        Column("segment", [line.segment for line in lines]),
        Column("namespace", [line.namespace[:_ID_DIGITS] for line in lines]),
        Column("kind", [line.kind for line in lines]),
        Column("model", [line.model for line in lines], wraps=True),
        Column("depth", [line.depth for line in lines], right=True),
        Column("blocks", [line.blocks for line in lines], right=True),
        Column("size", [size(line.stored_bytes) for line in lines], right=True),
        Column("cost", [span(line.cost_us / 1e6) for line in lines], right=True, plain="-"),
        Column("used", [use_age(now_s, line.last_use_s) for line in lines], right=True),
        Column("minutes", minutes, right=True, plain="-"),
        Column("", ["pinned" if line.pinned else "" for line in lines], plain=""),
    )


def du(report: DuReport) -> Renderables:
    """Yields a line per namespace and state."""
    total = f"{size(report.stored_bytes)} in {count(report.payloads, 'payload')}"
    yield pair("payloads", f"{total}, listed in {report.seconds:.1f} s")
    yield pair("index", f"{amount(report.indexed)} visible")
    lines = report.lines
    if not lines:
        return
    yield ""
    yield TableRows(
        Column("namespace", [line.namespace or "-" for line in lines]),
        Column("model", [line.model or "-" for line in lines], wraps=True),
        Column("state", [line.state for line in lines]),
        Column("payloads", [f"{line.payloads:,}" for line in lines], right=True),
        Column("size", [size(line.stored_bytes) for line in lines], right=True),
        Column("newest", [age(report.at_s, line.newest_s) for line in lines], right=True),
        Column("oldest", [age(report.at_s, line.oldest_s) for line in lines], right=True),
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


def _bytes(nbytes: int) -> str:
    return size(nbytes) if nbytes else "-"


def _age_or_dash(now_s: float, then_s: float | None) -> str:
    return "-" if then_s is None else use_age(now_s, then_s)


def _last_use(now_s: float, segment: SegmentSummary) -> str:
    # The minute of its first use began before it was made, less than a minute ago.
    made_then = segment.created_s - 60 < segment.last_use_s < segment.created_s
    return use_age(now_s, segment.created_s if made_then else segment.last_use_s)


def _value(value: Any) -> str:
    return "(none)" if value is None else json.dumps(value)


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f" ({ratio:.1%})"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"
