"""What text reports are made of: tables that are never cut, pairs of name and value, sizes and ages.

Whatever came from the store or from a URL goes through `plain`, so that a model's name can't carry an
escape sequence to a terminal; markup is off throughout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from kvstore.admin.reports import Amount, BackendState, Left, QuotaLine
from kvstore.index.eviction import MINUTE_S
from kvstore.index.sessions import ENDED_MINUTE
from kvstore.rules.text import readable
from kvstore.rules.units import size

Renderables = Iterator[RenderableType]

STYLES = {
    "ok": "green",
    "absent": "yellow",
    "warning": "yellow",
    "unreachable": "bold red",
    "problem": "bold red",
    "missing": "bold red",
    "damaged": "bold red",
    "unreadable": "yellow",
    "bad": "bold red",
    "high": "yellow",
    "over": "bold red",
    "pinned": "cyan",
    "gap": "bold red",
}
#: So many of the things that a report names are in its text; --json has more.
SHOWN = 20
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
        """Returns how many characters it can't be read without."""
        longest = max(len(plain(value)) for value in (self.title, *self.values))
        return min(longest, _FOLDED) if self.wraps else longest


class TableRows:
    """A table; where it does not fit, a paragraph per row instead, so that nothing is ever cut."""

    def __init__(self, *columns: Column) -> None:
        self._columns = [c for c in columns if any(value != c.plain for value in c.values)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        gaps = _GAP * (len(self._columns) - 1)
        fits = sum(column.least for column in self._columns) + gaps <= options.max_width
        yield from [self._table()] if fits else self._paragraphs()

    def _table(self) -> Table:
        table = empty_table()
        for column in self._columns:
            table.add_column(
                column.title,
                justify="right" if column.right else "left",
                no_wrap=not column.wraps,
                min_width=column.least,
                overflow="fold",
            )
        for row in zip(*(column.values for column in self._columns), strict=True):
            table.add_row(*(cell(value) for value in row))
        return table

    def _paragraphs(self) -> Renderables:
        for number, row in enumerate(zip(*(column.values for column in self._columns), strict=True)):
            if number:
                yield ""
            for i, (column, value) in enumerate(zip(self._columns, row, strict=True)):
                yield pair(f"{'  ' if i else ''}{column.title}", cell(value), width=14)


def plain(text: object) -> str:
    """Returns `text` without anything that a terminal would obey."""
    return readable(text, None, keep="\n")


def age(now_s: float, then_s: float) -> str:
    """Says how long ago, in one unit: 45s, 12m, 3h, 5d."""
    seconds = max(0, round(now_s - then_s))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def use_age(now_s: float, then_s: float) -> str:
    """Says how long ago something was used; `ended` of what only a session used that has ended. Uses are
    noted to the minute: seconds would be invented."""
    if then_s <= ENDED_MINUTE * MINUTE_S:
        return "ended"
    return age(now_s, then_s) if now_s - then_s >= 60 else "<1m"


def span(seconds: float) -> str:
    """Says a length of time: `-` for none, 0.04ms, 340ms, 1.5s, 12m, 3.2h."""
    if seconds <= 0:
        return "-"
    if seconds < 1:
        return f"{seconds * 1000:.{'0' if seconds >= 0.01 else '2'}f}ms"
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f}{unit}"
    return f"{seconds:.1f}s"


def share(part: float, whole: float) -> str:
    """Says `12%`, and `-` where the whole is nothing."""
    return f"{part / whole:.0%}" if whole else "-"


def quota_rows(lines: Sequence[QuotaLine]) -> TableRows:
    """Returns a line per quota."""
    return TableRows(
        Column("quota", [line.scope for line in lines], wraps=True),
        Column("used", [size(line.used_bytes) for line in lines], right=True),
        Column("of", [size(line.quota_bytes) for line in lines], right=True),
        Column("full", [share(line.used_bytes, line.quota_bytes) for line in lines], right=True),
        Column(
            "pinned",
            [size(line.pinned_bytes) if line.pinned_bytes else "-" for line in lines],
            right=True,
            plain="-",
        ),
        Column("from", [line.source if line.known else "set, unknown here" for line in lines]),
        Column("", [line.state for line in lines], plain="ok"),
    )


def left_rows(number: int, left: Sequence[Left]) -> Renderables:
    """Yields how many segments were left out, and a line for each of the first ones."""
    shown = left[:SHOWN]
    more = f", {len(shown)} of them here" if len(shown) < number else ""
    yield Text(f"{count(number, 'segment')} left out{more}", style="yellow")
    yield TableRows(
        Column("namespace", [each.namespace for each in shown]),
        Column("segment", [each.segment for each in shown]),
        Column("reason", [each.reason for each in shown], wraps=True),
    )


def count(number: int, noun: str) -> str:
    """Says `1 block`, `2,000 blocks`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def amount(amount: Amount) -> str:
    """Says `1.0 GiB in 3 segments, 12 blocks`."""
    blocks = count(amount.blocks, "block")
    return f"{size(amount.stored_bytes)} in {count(amount.segments, 'segment')}, {blocks}"


def backend(name: str, backend: BackendState) -> Renderables:
    """Yields where it is and whether it answers."""
    state = Text(backend.state, style=STYLES[backend.state])
    yield pair(name, Text.assemble(plain(backend.url), "  ", state))
    if backend.problem:
        yield pair("", backend.problem)


def cell(value: object) -> Text:
    """Returns a value as text, a state in its colour."""
    return Text(plain(value), style=STYLES.get(str(value), ""))


def pair(name: str, value: str | Text, *, width: int = 11) -> RenderableType:
    """Returns a name and its value, which wraps beside it."""
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(min_width=width - 1, no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    grid.add_row(name, value if isinstance(value, Text) else plain(value))
    return grid


def empty_table() -> Table:
    """Returns a table without lines."""
    return Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), header_style="bold")
