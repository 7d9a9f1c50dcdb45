"""A plot of curves over capacity, as SVG and as text. No dependency.

The horizontal axis is a size, logarithmic; the vertical one a share, from 0 to a round number above the
largest. Series differ in colour, dash and marker, so that they can be told apart without colours too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, log

from kvstore.rules.units import size


@dataclass(frozen=True, slots=True)
class Series:
    """Points (bytes, share), ascending, at least one, bytes above 0."""

    name: str
    points: Sequence[tuple[int, float]]
    #: Whether this is a bound and not a result: it is drawn thin and grey, behind the others.
    bound: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot's texts and series."""

    title: str
    subtitle: str
    x_label: str
    y_label: str
    series: Sequence[Series]


#: Okabe and Ito's colours, which people with defective colour vision can tell apart, less the pale ones.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7A5195", "#8C510A")
_DASHES = ("", "8 4", "2 3", "10 3 2 3", "5 5", "1 4", "12 4")
_GREY = "#8a8a8a"
_TEXT_MARKS = "o+x*#%@"
_WIDTH, _HEIGHT = 900, 540
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 28, 78, 96
_FONT = "font-family=\"system-ui, 'Segoe UI', Helvetica, Arial, sans-serif\""


class _Axes:
    """The scales of both axes: a point's place on each, from 0 to 1."""

    def __init__(self, plot: Plot) -> None:
        places = [x for series in plot.series for x, _ in series.points]
        self.least, self.most = min(places), max(places)
        if self.least == self.most:
            self.least, self.most = max(1, self.least // 2), self.most * 2
        highest = max(y for series in plot.series for _, y in series.points)
        self.step = next((step for step in (0.01, 0.02, 0.05, 0.1, 0.2) if highest <= 8 * step), 0.2)
        self.top = max(1, ceil(highest / self.step - 1e-9)) * self.step

    def x(self, nbytes: float) -> float:
        return log(nbytes / self.least) / log(self.most / self.least)

    def y(self, share: float) -> float:
        return share / self.top

    def x_ticks(self, most: int) -> list[int]:
        """Returns round sizes, at most `most`."""
        for mantissas in ((1, 2, 5, 10, 20, 50, 100, 200, 500), (1, 10, 100), (1,)):
            units = [1 << (10 * power) for power in range(7)]
            found = [m * unit for unit in units for m in mantissas]
            ticks = [tick for tick in found if self.least <= tick <= self.most]
            if len(ticks) <= most:
                break
        # A range of less than one order of magnitude may have no round size in it.
        return ticks if len(ticks) > 1 else [self.least, self.most]

    def y_ticks(self) -> list[float]:
        return [number * self.step for number in range(round(self.top / self.step) + 1)]


def svg(plot: Plot) -> str:
    """Returns the plot as an SVG document."""
    return "\n".join(_svg(plot)) + "\n"


def _svg(plot: Plot) -> Iterator[str]:
    axes = _Axes(plot)
    wide, high = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    places = _legend_places(plot.series)
    total = round(places[-1][1]) + 26

    def x(nbytes: float) -> float:
        return round(_LEFT + axes.x(nbytes) * wide, 1)

    def y(share: float) -> float:
        return round(_HEIGHT - _BOTTOM - axes.y(share) * high, 1)

    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {total}" width="{_WIDTH}" '
        f'height="{total}" {_FONT} role="img">'
    )
    yield f"<title>{_safe(plot.title)}</title>"
    yield f'<rect width="{_WIDTH}" height="{total}" fill="#ffffff"/>'
    yield _words(_LEFT, 30, plot.title, 18, weight="600")
    yield _words(_LEFT, 52, plot.subtitle, 12.5, fill="#555555")
    for share in axes.y_ticks():
        line = "#444444" if not share else "#e4e4e4"
        yield f'<path d="M{_LEFT} {y(share)}H{_WIDTH - _RIGHT}" stroke="{line}"/>'
        yield _words(_LEFT - 10, y(share) + 4, f"{share:.0%}", 12.5, anchor="end")
    for tick in axes.x_ticks(10):
        yield f'<path d="M{x(tick)} {_TOP}V{_HEIGHT - _BOTTOM + 5}" stroke="#e4e4e4"/>'
        yield _words(x(tick), _HEIGHT - _BOTTOM + 22, _short(tick), 12.5, anchor="middle")
    yield _words(_LEFT + wide / 2, _HEIGHT - _BOTTOM + 44, plot.x_label, 13, anchor="middle")
    middle = _TOP + high / 2
    yield (
        f'<g transform="rotate(-90 20 {middle})">{_words(20, middle, plot.y_label, 13, anchor="middle")}</g>'
    )
    styles = _styles(plot.series)
    for series, (colour, dash, mark) in sorted(zip(plot.series, styles, strict=True), key=_bounds_first):
        path = "L".join(f"{x(nbytes)} {y(share)}" for nbytes, share in series.points)
        yield f'<path d="M{path}" {_stroke(series, colour, dash)}/>'
        if not series.bound:
            for nbytes, share in series.points:
                yield _marker(mark, x(nbytes), y(share), colour)
    for series, style, place in zip(plot.series, styles, places, strict=True):
        yield from _legend(series, style, *place)
    yield "</svg>"


_Style = tuple[str, str, int]


def _styles(series: Sequence[Series]) -> list[_Style]:
    """Returns colour, dash and marker of each series."""
    out, number = [], 0
    for one in series:
        if one.bound:
            out.append((_GREY, "3 4", -1))
        else:
            out.append((_COLOURS[number % len(_COLOURS)], _DASHES[number % len(_DASHES)], number % 4))
            number += 1
    return out


def _bounds_first(item: tuple[Series, _Style]) -> bool:
    return not item[0].bound


def _stroke(series: Series, colour: str, dash: str) -> str:
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    return f'fill="none" stroke="{colour}" stroke-width="{1.5 if series.bound else 2.2}"{dashes}'


def _marker(kind: int, x: float, y: float, colour: str) -> str:
    shapes = (
        f'<circle cx="{x}" cy="{y}" r="3.6"',
        f'<rect x="{x - 3.3:.1f}" y="{y - 3.3:.1f}" width="6.6" height="6.6"',
        f'<path d="M{x} {y - 4.4:.1f}l4.4 7.6h-8.8z"',
        f'<path d="M{x} {y - 4.8:.1f}l4.8 4.8l-4.8 4.8l-4.8 -4.8z"',
    )
    return f'{shapes[kind]} fill="{colour}" stroke="#ffffff" stroke-width="0.8"/>'


def _legend_places(series: Sequence[Series]) -> list[tuple[float, float]]:
    """Returns the places of the names: below the plot, in rows as wide as it is."""
    x, y, places = float(_LEFT), float(_HEIGHT - 26), []
    for one in series:
        width = 62 + 7.2 * len(one.name)
        if x > _LEFT and x + width > _WIDTH - _RIGHT + 18:
            x, y = float(_LEFT), y + 20
        places.append((x, y))
        x += width
    return places


def _legend(series: Series, style: _Style, x: float, y: float) -> Iterator[str]:
    colour, dash, mark = style
    yield f'<path d="M{x:.0f} {y:g}h34" {_stroke(series, colour, dash)}/>'
    if mark >= 0:
        yield _marker(mark, round(x + 17), y, colour)
    yield _words(x + 42, y + 4, series.name, 12.5)


def _words(
    x: float, y: float, text: str, pixels: float, *, anchor: str = "start", weight: str = "", fill: str = ""
) -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{pixels:g}" fill="{fill or "#222222"}" '
        f'text-anchor="{anchor}"{bold}>{_safe(text)}</text>'
    )


def _safe(text: str) -> str:
    """Escapes text that may come from anywhere, such as a file's name."""
    return escape("".join(c if c.isprintable() else "?" for c in text))


def _short(nbytes: int) -> str:
    return size(nbytes).replace(".0 ", " ")


def text(plot: Plot, width: int, height: int = 18) -> list[str]:
    """Returns the plot in characters, as lines of at most `width` (at least 40) characters."""
    axes = _Axes(plot)
    columns = max(32, width - 8)
    rows = [[" "] * columns for _ in range(height)]
    marks = _text_marks(plot.series)
    # The first ones last, so that they are seen where several meet.
    for series, mark in reversed(list(zip(plot.series, marks, strict=True))):
        found = {column: _at(series, axes, column / (columns - 1)) for column in range(columns)}
        found |= {round(axes.x(nbytes) * (columns - 1)): share for nbytes, share in series.points}
        for column, share in found.items():
            if share is not None:
                rows[height - 1 - round(axes.y(share) * (height - 1))][column] = mark
    labels = {height - 1 - round(axes.y(share) * (height - 1)): share for share in axes.y_ticks()}
    lines = [plot.y_label]
    for number, row in enumerate(rows):
        label = f"{labels[number]:.0%}" if number in labels else ""
        lines.append(f"{label:>5} {'┤' if label else '│'}{''.join(row).rstrip()}")
    lines += _text_axis(axes, columns)
    lines.append(" " * 7 + plot.x_label)
    lines.append(
        " " * 7 + "   ".join(f"{mark} {series.name}" for series, mark in zip(plot.series, marks, strict=True))
    )
    return lines


def _text_marks(series: Sequence[Series]) -> list[str]:
    plain = iter(_TEXT_MARKS * (1 + len(series) // len(_TEXT_MARKS)))
    return ["·" if one.bound else next(plain) for one in series]


def _text_axis(axes: _Axes, columns: int) -> list[str]:
    line, labels = ["─"] * columns, [" "] * columns
    free = 0
    for tick in axes.x_ticks(max(2, columns // 9)):
        at, label = round(axes.x(tick) * (columns - 1)), _short(tick)
        begin = max(0, min(at - len(label) // 2, columns - len(label)))
        line[at] = "┬"
        if begin >= free:
            labels[begin : begin + len(label)] = label
            free = begin + len(label) + 2
    return [f"      └{''.join(line)}", " " * 7 + "".join(labels).rstrip()]


def _at(series: Series, axes: _Axes, place: float) -> float | None:
    """Returns the interpolated share at a place of the horizontal axis; None outside of the points."""
    places = [axes.x(nbytes) for nbytes, _ in series.points]
    number = bisect_right(places, place) - 1
    if not 0 <= number < len(places) - 1:
        return None
    part = (place - places[number]) / (places[number + 1] - places[number])
    low, high = series.points[number][1], series.points[number + 1][1]
    return low + part * (high - low)
