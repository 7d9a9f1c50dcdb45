"""Hit ratios by capacity as SVG, for the page of `advise`.

The horizontal axis is a size, logarithmic; the vertical one a share, from 0 to a round number above the
largest. Series differ in colour and in dash, so that they can be told apart without colours too.
"""

from __future__ import annotations

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
    #: Whether this is a bound and not a result: it is drawn grey.
    bound: bool = False


@dataclass(frozen=True, slots=True)
class Plot:
    """A subtitle and series: at least one, at most three that are no bounds."""

    subtitle: str
    series: Sequence[Series]


#: Okabe and Ito's colours, which people with defective colour vision can tell apart.
_STYLES = (("#0072B2", ""), ("#D55E00", "8 4"), ("#009E73", "2 3"))
_BOUND = ("#8a8a8a", "3 4")
_WIDTH, _HEIGHT = 900, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 28, 48, 116


class _Axes:
    """The scales of both axes."""

    def __init__(self, plot: Plot) -> None:
        places = [x for series in plot.series for x, _ in series.points]
        self._least, self._most = min(places), max(places)
        if self._least == self._most:
            self._least, self._most = max(1, self._least // 2), self._most * 2
        highest = max(y for series in plot.series for _, y in series.points)
        self._step = next((step for step in (0.01, 0.02, 0.05, 0.1) if highest <= 8 * step), 0.2)
        self._steps = max(1, ceil(highest / self._step - 1e-9))

    def x(self, nbytes: float) -> float:
        place = log(nbytes / self._least) / log(self._most / self._least)
        return round(_LEFT + place * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(self, share: float) -> float:
        place = share / (self._steps * self._step)
        return round(_HEIGHT - _BOTTOM - place * (_HEIGHT - _TOP - _BOTTOM), 1)

    def sizes(self) -> list[int]:
        """Returns round sizes, at most ten, or the ends of a range that has less than two."""
        for mantissas in ((1, 2, 5, 10, 20, 50, 100, 200, 500), (1, 10, 100), (1,)):
            found = [m << (10 * power) for power in range(7) for m in mantissas]
            ticks = [tick for tick in found if self._least <= tick <= self._most]
            if len(ticks) <= 10:
                break
        return ticks if len(ticks) > 1 else [self._least, self._most]

    def shares(self) -> list[float]:
        return [number * self._step for number in range(self._steps + 1)]


def svg(plot: Plot) -> str:
    """Returns the plot as an SVG document."""
    return "\n".join(_svg(plot)) + "\n"


def _svg(plot: Plot) -> Iterator[str]:
    axes = _Axes(plot)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" role="img">'
    )
    yield "<title>Hit ratio by capacity</title>"
    yield f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>'
    yield _words(_LEFT, 30, plot.subtitle)
    for share in axes.shares():
        yield f'<path d="M{_LEFT} {axes.y(share)}H{_WIDTH - _RIGHT}" stroke="#e4e4e4"/>'
        yield _words(_LEFT - 10, axes.y(share) + 4, f"{share:.0%}", "end")
    bottom = _HEIGHT - _BOTTOM
    for tick in axes.sizes():
        yield f'<path d="M{axes.x(tick)} {_TOP}V{bottom + 5}" stroke="#e4e4e4"/>'
        yield _words(axes.x(tick), bottom + 22, size(tick).replace(".0 ", " "), "middle")
    yield _words(
        _WIDTH / 2, bottom + 48, "hit ratio (of blocks asked for) by capacity (logarithmic)", "middle"
    )
    styles = iter(_STYLES)
    for number, series in enumerate(plot.series):
        colour, dash = _BOUND if series.bound else next(styles)
        stroke = f'fill="none" stroke="{colour}" stroke-width="2.2" stroke-dasharray="{dash or "none"}"'
        points = [(axes.x(nbytes), axes.y(share)) for nbytes, share in series.points]
        yield f'<path d="M{"L".join(f"{x} {y}" for x, y in points)}" {stroke}/>'
        yield from (f'<circle cx="{x}" cy="{y}" r="3.6" fill="{colour}"/>' for x, y in points)
        left = _LEFT + 200 * number
        yield f'<path d="M{left} {_HEIGHT - 26}h34" {stroke}/>'
        yield _words(left + 42, _HEIGHT - 22, series.name)
    yield "</svg>"


def _words(x: float, y: float, text: str, anchor: str = "start") -> str:
    """Escapes text that may come from anywhere, such as a recording."""
    safe = escape("".join(c if c.isprintable() else "?" for c in text))
    return f'<text x="{x:g}" y="{y:g}" font-size="13" fill="#222222" text-anchor="{anchor}">{safe}</text>'
