"""stats, top, du and events as text. No I/O here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

from rich.text import Text

from kvstore.admin.machine import size
from kvstore.cli.tables import (
    STYLES,
    Column,
    Renderables,
    Rows,
    age,
    amount,
    count,
    pair,
    plain,
    share,
    span,
    use_age,
)
from schemas.usage import (
    DuReport,
    EventLine,
    EventsReport,
    NamespaceTraffic,
    StatsReport,
    TopLine,
    TopReport,
)

_ID_DIGITS = 8


def stats(report: StatsReport) -> Renderables:
    """Totals, a line per namespace, then why blocks were missed and not stored."""
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
    yield Rows(
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
    """A row per reason; a column per namespace where there are several."""
    if not total:
        return
    several = [(line.id[:_ID_DIGITS], reasons) for line, reasons in zip(lines, each, strict=True) if reasons]
    yield ""
    yield Rows(
        Column(title, list(total)),
        Column("blocks", [f"{blocks:,}" for blocks in total.values()], right=True),
        Column("share", [share(blocks, whole) for blocks in total.values()], right=True),
        *(
            Column(name, [f"{reasons.get(reason, 0):,}" for reason in total], right=True)
            for name, reasons in (several if len(several) > 1 else [])
        ),
    )


def top(report: TopReport) -> Renderables:
    """Two tables."""
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


def _top_rows(lines: Sequence[TopLine], now_s: float) -> Rows:
    minutes = ["-" if line.minutes is None else f"{line.minutes:.1f}" for line in lines]
    return Rows(
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
    """A line per namespace and state."""
    total = f"{size(report.stored_bytes)} in {count(report.payloads, 'payload')}"
    yield pair("payloads", f"{total}, listed in {report.seconds:.1f} s")
    yield pair("index", f"{amount(report.indexed)} visible")
    lines = report.lines
    if not lines:
        return
    yield ""
    yield Rows(
        Column("namespace", [line.namespace or "-" for line in lines]),
        Column("model", [line.model or "-" for line in lines], wraps=True),
        Column("state", [line.state for line in lines]),
        Column("payloads", [f"{line.payloads:,}" for line in lines], right=True),
        Column("size", [size(line.stored_bytes) for line in lines], right=True),
        Column("newest", [age(report.at_s, line.newest_s) for line in lines], right=True),
        Column("oldest", [age(report.at_s, line.oldest_s) for line in lines], right=True),
    )


def events(report: EventsReport) -> Renderables:
    """A line per event, in columns that don't depend on the others."""
    if not report.events:
        yield "no events"
    for line in report.events:
        yield from event(line)


def event(event: EventLine) -> Renderables:
    """One event in one line, however narrow the terminal is: other tools cut it up."""
    when = datetime.fromtimestamp(event.at_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ") if event.at_s else "-" * 20
    text = Text(f"{when}  {event.namespace[:_ID_DIGITS]}  ", no_wrap=True)
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
    yield text


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f" ({ratio:.1%})"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.1%}"
