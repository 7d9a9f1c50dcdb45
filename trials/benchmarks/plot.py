"""A plot with two logarithmic axes, as SVG: for ratios over a quantity of several orders of magnitude."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import log

_WIDTH, _HEIGHT = 900, 520
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 28, 78, 92
#: Okabe and Ito's colours, which people with defective colour vision can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
_DASHES = ("", "8 4", "", "2 3", "10 3 2 3")
_TICKS = [mantissa * 10.0**power for power in range(-3, 7) for mantissa in (1, 2, 5)]


@dataclass(frozen=True)
class Curve:
    """Points, ascending, all of them above 0."""

    name: str
    points: Sequence[tuple[float, float]]


class _Scale:
    """The places of values on an axis from pixel `begin` to pixel `end`."""

    def __init__(self, values: Sequence[float], begin: float, end: float) -> None:
        self.least, self.most = min(values) / 1.1, max(values) * 1.1
        self._begin, self._end = begin, end

    def __call__(self, value: float) -> float:
        share = log(value / self.least) / log(self.most / self.least)
        return round(self._begin + share * (self._end - self._begin), 1)

    @property
    def ticks(self) -> list[float]:
        return [tick for tick in _TICKS if self.least <= tick <= self.most]


def log_plot(title: str, subtitle: str, x_label: str, curves: Sequence[Curve]) -> str:
    """Returns an SVG document with the curves, and a line at 1."""
    return "\n".join(_lines(title, subtitle, x_label, curves)) + "\n"


def _lines(title: str, subtitle: str, x_label: str, curves: Sequence[Curve]) -> Iterator[str]:
    points = [point for curve in curves for point in curve.points]
    x = _Scale([x for x, _ in points], _LEFT, _WIDTH - _RIGHT)
    y = _Scale([1.0, *(y for _, y in points)], _HEIGHT - _BOTTOM, _TOP)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="system-ui, Helvetica, Arial, sans-serif" role="img">'
    )
    yield f"<title>{escape(title)}</title>"
    yield f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>'
    yield _words(_LEFT, 30, title, 18)
    yield _words(_LEFT, 52, subtitle, 12.5)
    for tick in y.ticks:
        line = "#444444" if tick == 1 else "#e4e4e4"
        yield f'<path d="M{_LEFT} {y(tick)}H{_WIDTH - _RIGHT}" stroke="{line}"/>'
        yield _words(_LEFT - 10, y(tick) + 4, f"{tick:g}", 12.5, "end")
    for tick in x.ticks:
        yield f'<path d="M{x(tick)} {_TOP}V{_HEIGHT - _BOTTOM}" stroke="#e4e4e4"/>'
        yield _words(x(tick), _HEIGHT - _BOTTOM + 20, f"{tick:g}", 12.5, "middle")
    yield _words((_LEFT + _WIDTH - _RIGHT) / 2, _HEIGHT - _BOTTOM + 42, x_label, 13, "middle")
    for number, curve in enumerate(curves):
        style = (
            f'fill="none" stroke="{_COLOURS[number]}" stroke-width="2.2" stroke-dasharray="{_DASHES[number]}"'
        )
        yield f'<path d="M{"L".join(f"{x(a)} {y(b)}" for a, b in curve.points)}" {style}/>'
        for a, b in curve.points:
            yield f'<circle cx="{x(a)}" cy="{y(b)}" r="3.4" fill="{_COLOURS[number]}"/>'
        at = _LEFT + number * 200
        yield f'<path d="M{at} {_HEIGHT - 22}h34" {style}/>'
        yield _words(at + 42, _HEIGHT - 18, curve.name, 12.5)
    yield "</svg>"


def _words(x: float, y: float, text: str, pixels: float, anchor: str = "start") -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{pixels:g}" fill="#222222" text-anchor="{anchor}">'
        f"{escape(text)}</text>"
    )


@dataclass(frozen=True)
class Bars:
    """A group of bars, one for each name of the plot; None leaves one out."""

    name: str
    values: Sequence[float | None]


def bar_plot(title: str, subtitle: str, names: Sequence[str], groups: Sequence[Bars]) -> str:
    """Returns an SVG document with groups of horizontal bars, on a linear axis from 0."""
    return "\n".join(_bars(title, subtitle, names, groups)) + "\n"


def _bars(title: str, subtitle: str, names: Sequence[str], groups: Sequence[Bars]) -> Iterator[str]:
    left, thick = 210, 11
    each = thick * len(names) + 14
    height = _TOP + each * len(groups) + 50
    most = max(value for group in groups for value in group.values if value is not None)
    scale = (_WIDTH - left - 70) / most
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" font-family="system-ui, Helvetica, Arial, sans-serif" role="img">'
    )
    yield f"<title>{escape(title)}</title>"
    yield f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>'
    yield _words(24, 30, title, 18)
    yield _words(24, 52, subtitle, 12.5)
    for number, group in enumerate(groups):
        top = _TOP + each * number
        yield _words(left - 10, top + thick * len(names) / 2 + 4, group.name, 12.5, "end")
        for place, value in enumerate(group.values):
            if value is not None:
                y, long = top + place * thick, round(value * scale, 1)
                yield f'<path d="M{left} {y}h{long}v{thick - 1}h-{long}z" fill="{_COLOURS[place]}"/>'
                yield _words(left + long + 5, y + thick - 2, f"{value:.0f}", 10.5)
    for place, name in enumerate(names):
        at = left + place * 170
        yield f'<rect x="{at}" y="{height - 32}" width="12" height="12" fill="{_COLOURS[place]}"/>'
        yield _words(at + 18, height - 22, name, 12.5)
    yield "</svg>"
