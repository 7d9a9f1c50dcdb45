"""Reports on what there is as text: one function per report, which yields what a rich console prints.

No I/O here. render_usage has what becomes of blocks, render_upkeep the verbs that maintain, render_transfers
those that move payloads, render_bench the measurements.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from typing import Any

from rich.padding import Padding
from rich.text import Text

from kvstore.admin.machine import size
from kvstore.cli.tables import (
    STYLES,
    Column,
    Renderables,
    Rows,
    age,
    amount,
    backend,
    count,
    empty_table,
    pair,
    plain,
    quota_rows,
    share,
    span,
    use_age,
)
from schemas.reports import (
    DiffReport,
    DoctorReport,
    ListReport,
    NamespaceReport,
    NamespacesReport,
    PartReport,
    QuotaLine,
    SegmentReport,
    SegmentSummary,
    StatusReport,
    Upkeep,
    VllmConfigReport,
)

#: Digits of a long key that a table shows; --json has all.
_KEY_DIGITS = 12


def status(report: StatusReport) -> Renderables:
    """What is opened, totals, then a line per quota, per tenant and per namespace."""
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
    yield pair("janitor", report.janitor or "none; engines evict when they save")
    # The store's own stands above.
    yield from _quota_table([line for line in report.quotas if line.scope != "store" or line.state != "ok"])
    yield from _tenant_table(report)
    yield from _namespace_table(report)


def _waits(upkeep: Upkeep) -> str:
    parts = [f"{size(upkeep.pinned_bytes)} pinned"] if upkeep.pinned_bytes else []
    if upkeep.trashed:
        parts.append(f"{count(upkeep.trashed, 'evicted segment')} to be deleted")
    if upkeep.bygone:
        parts.append(f"{count(upkeep.bygone, 'invalidated segment')} to be evicted")
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
    yield Rows(
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
    yield Rows(
        Column("namespace", [line.id for line in lines]),
        Column("kind", [line.kind for line in lines]),
        Column("model", [line.model for line in lines], wraps=True),
        Column("segments", [f"{line.usage.segments:,}" for line in lines], right=True),
        Column("blocks", [f"{line.usage.blocks:,}" for line in lines], right=True),
        Column("size", [size(line.usage.stored_bytes) for line in lines], right=True),
        Column("share", shares, right=True),
        Column("pinned", [_bytes(line.upkeep.pinned_bytes) for line in lines], right=True, plain="-"),
        Column("trash", trash, right=True, plain="-"),
        Column("cost", [span(line.cost_s) for line in lines], right=True, plain="-"),
        Column("opened", [_age_or_dash(report.at_s, line.seen_s) for line in lines], right=True),
        Column("oldest", [_age_or_dash(report.at_s, line.oldest_use_s) for line in lines], right=True),
    )


def ls(report: ListReport) -> Renderables:
    """A line per segment."""
    lines = report.segments
    if not lines:
        yield "no segments"
        return
    yield Rows(
        Column("namespace", [line.namespace[:8] for line in lines], plain=(report.namespace or "")[:8]),
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
    """A line per namespace."""
    lines = report.namespaces
    if not lines:
        yield "no namespaces: no engine has registered with this index yet"
        return
    yield Rows(
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
    """A paragraph per field that differs."""
    if report.same:
        yield "same"
        return
    for difference in report.differences:
        yield Text(plain(difference.path), style="bold")
        yield pair(f"  {report.a}", _value(difference.a), width=20)
        yield pair(f"  {report.b}", _value(difference.b), width=20)
        yield Padding(Text(difference.meaning, style="dim"), (0, 0, 0, 2))


def show(report: NamespaceReport | SegmentReport) -> Renderables:
    """A namespace with its JSON, or a segment with its parts and slots."""
    if isinstance(report, NamespaceReport):
        yield pair("namespace", report.id)
        yield pair("stored", amount(report.usage))
        if waits := _waits(report.upkeep):
            yield pair("", waits)
        if report.cost_s:
            yield pair("cost", f"{span(report.cost_s)} to compute it again")
        if report.seen_s is not None:
            yield pair("opened", f"{age(report.at_s, report.seen_s)} ago, by an engine")
        yield ""
        yield quota_rows(report.quotas)
        yield ""
        yield Text(json.dumps(report.namespace, indent=2, sort_keys=True))
        return
    yield pair("segment", report.segment)
    yield pair("namespace", f"{report.namespace} ({report.kind or 'kind unknown'}, {report.model or '?'})")
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
    for problem in part.problems:
        yield pair("problem", Text(plain(problem), style="red"))
    slots = part.slots
    if slots:
        yield Rows(
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


def doctor(report: DoctorReport) -> Renderables:
    """A line per check, and under it what to do."""
    table = empty_table()
    table.add_column("")
    table.add_column("check")
    table.add_column("found", overflow="fold")
    for check in report.checks:
        found = Text(plain(check.found))
        if check.advice:
            found.append(f"\n-> {plain(check.advice)}", style="bold")
        table.add_row(Text(check.state, style=STYLES[check.state]), check.name, found)
    yield table
    states = [check.state for check in report.checks]
    yield ""
    yield f"{count(states.count('problem'), 'problem')}, {count(states.count('warning'), 'warning')}"


def vllm_flags(report: VllmConfigReport) -> list[str]:
    """The flags of `vllm serve`, quoted for a shell, one a line."""
    configs = {
        "--kv-transfer-config": report.kv_transfer_config,
        "--ec-transfer-config": report.ec_transfer_config,
    }
    return [
        f"{flag} {shlex.quote(json.dumps(config, separators=(',', ':')))}"
        for flag, config in configs.items()
        if config is not None
    ]


def _bytes(nbytes: int) -> str:
    return size(nbytes) if nbytes else "-"


def _age_or_dash(now_s: float, then_s: float | None) -> str:
    return "-" if then_s is None else use_age(now_s, then_s)


def _last_use(now_s: float, segment: SegmentSummary) -> str:
    # The minute of its first use began before it was made.
    return use_age(now_s, max(segment.last_use_s, segment.created_s))


def _value(value: Any) -> str:
    return "(none)" if value is None else json.dumps(value)
