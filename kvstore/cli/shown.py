"""Reports as text, by their models: a field is a line, a tuple of models is a table.

The text calls a field by its `title` in the model, or else by its name without the unit. A field with an
empty title is for `--json` alone. A field's `description` is its sentence: `{}` stands for the value,
`{name}` for another field's, and `{name:segment}` counts segments. The description of a tuple is the text
of an empty one. The text leaves out a field that has its default, and a column that has it in every row. The
end of a name tells the unit.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Group, RenderableType
from rich.text import Text

from kvstore.admin.repair.reports import Counted
from kvstore.admin.reports import Amount, BackendState
from kvstore.cli.tables import (
    STYLES,
    Column,
    Renderables,
    TableRows,
    age,
    amount,
    backend,
    left_rows,
    pair,
    plain,
    quota_rows,
    span,
    use_age,
)
from kvstore.rules.units import size

#: Titles of fields that many reports have, and units that they end in.
_TITLES = {
    "at_s": "", "version": "", "applied": "", "dry_run": "", "ended": "", "left_out": "",
    "stored_bytes": "size", "created_s": "made", "last_use_s": "used", "seconds": "took", "id": "namespace",
}  # fmt: skip
_UNITS = ("_bytes", "_s", "_us", "_ratio")
#: Points in time, in the past and to come. Other fields in seconds are lengths of time.
_AGO = ("at_s", "created_s", "seen_s", "newest_s", "oldest_s")
_UNTIL = ("until_s", "delete_after_s", "due_s")
#: Columns whose values may be broken into lines.
_WRAPS = ("model", "request", "revision", "tenant", "scope", "reason", "shape")
#: Results of a run: shown where something was applied, also if they are nothing.
_RESULTS = ("changed", "deleted_payloads", "evicted_segments", "hidden_segments", "invalidated", "warm")
#: Columns that say what a row is about.
_FIRST = ("namespace", "id", "kind", "model", "tenant")


class _Words(str):
    """A value as text, which a sentence may count things with: `{segments:segment}`."""

    __slots__ = ()

    def __format__(self, noun: str) -> str:
        return f"{self} {noun}{'' if self == '1' else 's'}" if noun else str(self)


def shown(
    report: BaseModel, now_s: float | None = None, *, width: int = 11, leave: Container[str] = ()
) -> Renderables:
    """Yields a report in the order of its fields, with a blank line before and after a table.

    Ages count from `now_s`, or from when the report says that it was made.
    """
    before: bool | None = None
    for is_table, renderable in _blocks(report, now_s, width, leave):
        if before is not None and (is_table or before):
            yield ""
        yield renderable
        before = is_table


def _blocks(
    report: Any, now_s: float | None, width: int, leave: Container[str]
) -> Iterator[tuple[bool, RenderableType]]:
    now_s = getattr(report, "at_s", 0.0) if now_s is None else now_s
    ends = isinstance(getattr(report, "ended", None), str)
    done = getattr(report, "applied", False) or not getattr(report, "dry_run", True)
    for name, title, field in _fields(type(report)):
        value = getattr(report, name)
        if name in leave or (name == "problem" and ends):
            continue
        style = "bold red" if name in ("problem", "problems") else STYLES.get(str(value), "")
        if value == () and field.description:
            yield False, field.description
        elif isinstance(value, tuple) and value and isinstance(value[0], BaseModel):
            yield True, Group(*_table(report, name, field, now_s))
        elif isinstance(value, tuple):
            for number, line in enumerate(value):
                yield False, pair("" if number else title, Text(plain(line), style), width=width)
        elif isinstance(value, BackendState):
            yield False, Group(*backend(title, value))
        elif field.is_required() or value != _default(field) or (name in _RESULTS and done):
            text = Text(plain(_sentence(report, name, field, now_s)), style)
            yield False, pair(title, text, width=width)
    if ends and report.ended != "complete" and "ended" not in leave:
        yield False, pair("ended", Text(plain(f"{report.ended}: {report.problem}"), "bold red"), width=width)


def _table(report: Any, name: str, field: FieldInfo, now_s: float) -> Renderables:
    lines = getattr(report, name)
    if name == "left":
        yield from left_rows(report.left_out, lines)
        return
    if field.title:
        yield Text(field.title, style="bold")
    yield quota_rows(lines) if name == "quotas" else rows(lines, now_s)


def rows(lines: Sequence[BaseModel], now_s: float, *more: Column, leave: Container[str] = ()) -> TableRows:
    """Returns a row per model, and `more` columns at the end."""
    return TableRows(*(_columns(lines, now_s, leave) if lines else ()), *more)


def _columns(lines: Sequence[BaseModel], now_s: float, leave: Container[str] = ()) -> Iterator[Column]:
    for name, title, field in sorted(_fields(type(lines[0])), key=lambda each: each[0] not in _FIRST):
        values = [_value(line, name) for line in lines]
        one = values[0]
        if name in leave or isinstance(one, dict):
            continue
        if isinstance(one, BaseModel) and not isinstance(one, Counted):
            if not field.is_required() and all(value == _default(field) for value in values):
                continue
            first, *others = _columns(values, now_s)
            yield replace(first, title=field.title or first.title, plain=None)
            # An amount of nothing is an amount: its columns stay.
            yield from (replace(other, plain=None) if isinstance(one, Amount) else other for other in others)
        elif isinstance(one, bool):
            yield Column("", [title if value else "" for value in values], plain="")
        else:
            usual = None if field.is_required() else said(name, _default(field), now_s)
            texts = [said(name, value, now_s) for value in values]
            is_words = any(isinstance(value, str) for value in values)
            yield Column(title, texts, right=not is_words, wraps=name in _WRAPS, plain=usual)


def _fields(model: type[BaseModel]) -> Iterator[tuple[str, str, FieldInfo]]:
    for name, field in model.model_fields.items():
        bare = next((name.removesuffix(unit) for unit in _UNITS if name.endswith(unit)), name)
        title = _TITLES.get(name, bare.replace("_", " ")) if field.title is None else field.title
        if title:
            yield name, title, field


def _value(model: BaseModel, name: str) -> Any:
    value = getattr(model, name)
    # The minute of a first use began before the segment was made.
    made_s = getattr(model, "created_s", 0) if name == "last_use_s" else 0
    return made_s if made_s and made_s - 60 < value < made_s else value


def _default(field: FieldInfo) -> Any:
    return field.get_default(call_default_factory=True)


def _sentence(model: BaseModel, name: str, field: FieldInfo, now_s: float) -> str:
    value = _value(model, name)
    if value is None:
        return "none"
    if not field.description:
        return said(name, value, now_s)
    others = {"exact": _Words(f"{value:,}")} if isinstance(value, int) else {}
    others |= {other: _Words(said(other, getattr(model, other), now_s)) for other in type(model).model_fields}
    return field.description.format(others[name], **others)


def said(name: str, value: Any, now_s: float = 0.0) -> str:
    """Returns a field's value as text: by its type, or else by the unit in the field's name."""
    match value:
        case None | "":
            return "-"
        case bool():
            return "yes" if value else "no"
        case Amount():
            return amount(value)
        case Counted():
            return f"{value.objects:,} ({size(value.stored_bytes)})" if value.objects else "-"
        case BaseModel():
            parts = [
                _sentence(value, inner, field, now_s) + (f" {title}" if not field.description else "")
                for inner, title, field in _fields(type(value))
                if field.is_required() or getattr(value, inner) != _default(field)
            ]
            return ", ".join(parts) or "-"
        case tuple():
            return ("x" if all(isinstance(one, int) for one in value) else ", ").join(map(str, value))
        case int() | float():
            return _number(name, value, now_s)
    return str(value)


def _number(name: str, value: float, now_s: float) -> str:
    if name.endswith("bytes_s"):
        return f"{value / 1e6:,.0f} MB/s" if value else "-"
    if name.endswith("bytes"):
        return size(value)
    if name.endswith("_us"):
        return span(value / 1e6)
    if name.endswith("use_s"):
        return use_age(now_s, value)
    if name in _AGO:
        return age(now_s, value)
    if name in _UNTIL:
        return span(value - now_s) if value > now_s else "0s"
    if name.endswith("_s") or name == "seconds":
        return span(value)
    if name.endswith("_ratio"):
        return f"{value:.1%}"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.1f}"
