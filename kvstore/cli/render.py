"""Reports as text: one function per report, which yields what a rich console prints, and does no I/O.

Whatever came from the store or from a URL goes through `plain`, so that a model's name can't carry an
escape sequence to a terminal; markup is off throughout.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from kvstore.admin.machine import size
from schemas.reports import (
    Amount,
    Backend,
    DiffReport,
    DoctorReport,
    ListReport,
    NamespaceReport,
    NamespacesReport,
    PartReport,
    SegmentReport,
    SegmentSummary,
    StatusReport,
    VllmConfigReport,
)

Renderables = Iterator[RenderableType]

_STYLES = {
    "ok": "green",
    "absent": "yellow",
    "warning": "yellow",
    "unreachable": "bold red",
    "problem": "bold red",
    "missing": "bold red",
    "damaged": "bold red",
    "bad": "bold red",
}
#: Digits of a long key that a table shows; --json has all.
_KEY_DIGITS = 12
#: Spaces between columns, and the width to which a column that wraps may shrink.
_GAP = 2
_FOLDED = 10


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table. One that is `plain` in every row is left out of the text."""

    title: str
    values: Sequence[object]
    right: bool = False
    wraps: bool = False
    plain: object = None

    @property
    def least(self) -> int:
        """Characters without which it can't be read."""
        longest = max(len(plain(value)) for value in (self.title, *self.values))
        return min(longest, _FOLDED) if self.wraps else longest


class Rows:
    """A table; where it does not fit, a paragraph per row instead, so that nothing is ever cut."""

    def __init__(self, *columns: Column) -> None:
        self._columns = [c for c in columns if any(value != c.plain for value in c.values)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        gaps = _GAP * (len(self._columns) - 1)
        fits = sum(column.least for column in self._columns) + gaps <= options.max_width
        yield from [self._table()] if fits else self._paragraphs()

    def _table(self) -> Table:
        table = _empty_table()
        for column in self._columns:
            table.add_column(
                column.title,
                justify="right" if column.right else "left",
                no_wrap=not column.wraps,
                min_width=column.least,
                overflow="fold",
            )
        for row in zip(*(column.values for column in self._columns), strict=True):
            table.add_row(*(_cell(value) for value in row))
        return table

    def _paragraphs(self) -> Renderables:
        for number, row in enumerate(zip(*(column.values for column in self._columns), strict=True)):
            if number:
                yield ""
            for i, (column, value) in enumerate(zip(self._columns, row, strict=True)):
                yield _pair(f"{'  ' if i else ''}{column.title}", _cell(value), width=14)


def status(report: StatusReport) -> Renderables:
    """What is opened, totals, then a line per namespace."""
    yield from _backend("index", report.index)
    yield from _backend("payloads", report.payloads)
    yield _pair("capacity", f"{size(report.capacity_bytes)} per namespace")
    if report.total is None:
        yield _pair("stored", "unknown: the index can't be asked")
        return
    yield _pair("stored", f"{_amount(report.total)}, {count(len(report.namespaces), 'namespace')}")
    lines = report.namespaces
    if lines:
        yield ""
        yield Rows(
            Column("namespace", [line.id for line in lines]),
            Column("kind", [line.kind for line in lines]),
            Column("model", [line.model for line in lines], wraps=True),
            Column("segments", [f"{line.usage.segments:,}" for line in lines], right=True),
            Column("blocks", [f"{line.usage.blocks:,}" for line in lines], right=True),
            Column("size", [size(line.usage.stored_bytes) for line in lines], right=True),
            Column(
                "full",
                [f"{line.usage.stored_bytes / report.capacity_bytes:.0%}" for line in lines],
                right=True,
            ),
            Column(
                "used",
                [_ages(report.at_s, line.newest_use_s, line.oldest_use_s) for line in lines],
                right=True,
            ),
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
        yield _pair(f"  {report.a}", _value(difference.a), width=20)
        yield _pair(f"  {report.b}", _value(difference.b), width=20)
        yield Padding(Text(difference.meaning, style="dim"), (0, 0, 0, 2))


def show(report: NamespaceReport | SegmentReport) -> Renderables:
    """A namespace with its JSON, or a segment with its parts and slots."""
    if isinstance(report, NamespaceReport):
        yield _pair("namespace", report.id)
        yield _pair("stored", _amount(report.usage))
        yield _pair("capacity", size(report.capacity_bytes))
        yield ""
        yield Text(json.dumps(report.namespace, indent=2, sort_keys=True))
        return
    yield _pair("segment", report.segment)
    yield _pair("namespace", f"{report.namespace} ({report.kind or 'kind unknown'}, {report.model or '?'})")
    if report.index.state == "unreachable":
        yield from _backend("index", report.index)
    elif report.record is None:
        yield _pair(
            "index", Text("does not name it: evicted, or never committed. Nothing serves it", style="yellow")
        )
    else:
        yield from _record(report.record, report.at_s)
    for part in report.parts:
        yield ""
        yield from _part(part, verified=report.verified)


def _record(record: SegmentSummary, now_s: float) -> Renderables:
    yield _pair("stored", f"{size(record.stored_bytes)}, {count(record.slots, 'slot')}, codec {record.codec}")
    yield _pair("depth", f"{record.depth} blocks before its first slot")
    made, used = age(now_s, record.created_s), _last_use(now_s, record)
    yield _pair("made", f"{made} ago, last used {used} ago")


def _part(part: PartReport, *, verified: bool) -> Renderables:
    yield _pair(f"rank {part.rank}", Text(part.state, style=_STYLES[part.state]))
    yield _pair("payload", part.location)
    if part.stored_bytes is not None:
        start = "" if part.data_start is None else f", data from byte {part.data_start:,} on"
        by = f", written by {part.writer}" if part.writer else ""
        yield _pair("size", f"{part.stored_bytes:,} bytes{start}{by}")
    for problem in part.problems:
        yield _pair("problem", Text(plain(problem), style="red"))
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
    table = _empty_table()
    table.add_column("")
    table.add_column("check")
    table.add_column("found", overflow="fold")
    for check in report.checks:
        found = Text(plain(check.found))
        if check.advice:
            found.append(f"\n-> {plain(check.advice)}", style="bold")
        table.add_row(Text(check.state, style=_STYLES[check.state]), check.name, found)
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


def plain(text: object) -> str:
    """`text` without anything that a terminal would obey."""
    return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in str(text))


def age(now_s: float, then_s: float) -> str:
    """How long ago, in one unit: 45s, 12m, 3h, 5d."""
    seconds = max(0, round(now_s - then_s))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def count(number: int, noun: str) -> str:
    """`1 block`, `2,000 blocks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _ages(now_s: float, newest_s: float | None, oldest_s: float | None) -> str:
    if newest_s is None or oldest_s is None:
        return "-"
    newest, oldest = _use_age(now_s, newest_s), _use_age(now_s, oldest_s)
    return newest if newest == oldest else f"{newest}-{oldest}"


def _last_use(now_s: float, segment: SegmentSummary) -> str:
    # The minute of its first use began before it was made.
    return _use_age(now_s, max(segment.last_use_s, segment.created_s))


def _use_age(now_s: float, then_s: float) -> str:
    # Uses are noted to the minute: seconds would be invented.
    return age(now_s, then_s) if now_s - then_s >= 60 else "<1m"


def _amount(amount: Amount) -> str:
    blocks = count(amount.blocks, "block")
    return f"{size(amount.stored_bytes)} in {count(amount.segments, 'segment')}, {blocks}"


def _backend(name: str, backend: Backend) -> Renderables:
    state = Text(backend.state, style=_STYLES[backend.state])
    yield _pair(name, Text.assemble(plain(backend.url), "  ", state))
    if backend.problem:
        yield _pair("", backend.problem)


def _value(value: Any) -> str:
    return "(none)" if value is None else json.dumps(value)


def _cell(value: object) -> Text:
    return Text(plain(value), style=_STYLES.get(str(value), ""))


def _pair(name: str, value: str | Text, *, width: int = 11) -> RenderableType:
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(min_width=width - 1, no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    grid.add_row(name, value if isinstance(value, Text) else plain(value))
    return grid


def _empty_table() -> Table:
    return Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
