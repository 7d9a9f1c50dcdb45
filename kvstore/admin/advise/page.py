"""An advice as one page of HTML that can be mailed: it has its styles and its plot inside, and no script, and
it loads nothing. Whatever came from a recording is text in it, and no markup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from math import ceil, log

from kvstore.admin.advise.reports import AdviceReport
from kvstore.rules.text import readable
from kvstore.rules.units import size

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, 'Segoe UI', Helvetica, Arial, sans-serif; max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem .25rem 0; text-align: right; border-bottom: 1px solid #8884; }
th:first-child, td:first-child { text-align: left; }
pre { padding: .8rem; border: 1px solid #8884; overflow-x: auto; }
svg { max-width: 100%; height: auto; }
.yes { color: #00704f; } .no { color: #b03a00; } .unclear { color: #9a6700; }
"""

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

#: The columns of a table: their heads and cells.
Table = Sequence[tuple[str, Sequence[str]]]
#: Okabe and Ito's colours, which people with defective colour vision can tell apart, and dashes.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES = ("none", "8 4", "2 3")
_WIDTH, _HEIGHT = 900, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 76, 28, 24, 116


def html(
    report: AdviceReport, title: str, because: Sequence[str], tables: Sequence[tuple[str, Table]],
    notes: Sequence[str],
) -> str:  # fmt: skip
    """Returns the page of a report, with its sentences and tables as its text has them."""
    return "\n".join(_lines(report, title, because, tables, notes)) + "\n"


def _lines(
    report: AdviceReport, title: str, because: Sequence[str], tables: Sequence[tuple[str, Table]],
    notes: Sequence[str],
) -> Iterator[str]:  # fmt: skip
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{_safe(title)}</title><style>{_STYLE}</style></head><body>"
    yield f'<h1 class="{report.verdict}">{_safe(title)}</h1>'
    yield from _list(because)
    yield from plot(report)
    for heading, columns in tables:
        heads, rows = [head for head, _ in columns], zip(*(cells for _, cells in columns), strict=True)
        yield f"<h2>{_safe(heading)}</h2><table><thead>{_row('th', heads)}</thead><tbody>"
        yield from (_row("td", row) for row in rows)
        yield "</tbody></table>"
    if report.settings:
        yield f"<h2>Settings to paste</h2><pre>{_safe(report.settings)}</pre>"
    yield "<h2>What these numbers leave out</h2>"
    yield from _list(notes)
    yield "</body></html>"


def plot(report: AdviceReport) -> Iterator[str]:
    """Yields the hit ratios by capacity as SVG: across a size, logarithmic, and upwards a share, from 0 to a
    round number above the largest. Curves differ in colour and in dash; the ceiling is grey."""
    curves = [(one.policy, [(p.capacity_bytes, p.hit_ratio) for p in one.points]) for one in report.curves]
    ends = [curves[0][1][0][0], curves[0][1][-1][0]]
    drawn: list[tuple[str, list[tuple[int, float]], str, str]] = [
        (name, points, _COLOURS[number], _DASHES[number % len(_DASHES)])
        for number, (name, points) in enumerate(curves)
    ]
    if report.ceiling_ratio is not None:
        drawn.append(("ceiling", [(end, report.ceiling_ratio) for end in ends], "#8a8a8a", "3 4"))
    least, most = ends if ends[0] < ends[1] else (max(1, ends[0] // 2), 2 * ends[0])
    highest = max(share for _, points, _, _ in drawn for _, share in points)
    step = next((step for step in (0.01, 0.02, 0.05, 0.1) if highest <= 8 * step), 0.2)
    steps = max(1, ceil(highest / step - 1e-9))
    bottom = _HEIGHT - _BOTTOM

    def x(nbytes: int) -> float:
        return round(_LEFT + log(nbytes / least) / log(most / least) * (_WIDTH - _LEFT - _RIGHT), 1)

    def y(share: float) -> float:
        return round(bottom - share / (steps * step) * (bottom - _TOP), 1)

    yield f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" height="{_HEIGHT}" role="img">'
    yield "<title>Hit ratio by capacity</title>"
    yield f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>'
    for share in (number * step for number in range(steps + 1)):
        yield f'<path d="M{_LEFT} {y(share)}H{_WIDTH - _RIGHT}" stroke="#e4e4e4"/>'
        yield _words(_LEFT - 10, y(share) + 4, f"{share:.0%}", "end")
    ticks = [1 << power for power in range(62) if least <= 1 << power <= most]
    for tick in ticks[:: ceil(len(ticks) / 10)] if len(ticks) > 1 else (least, most):
        yield f'<path d="M{x(tick)} {_TOP}V{bottom + 5}" stroke="#e4e4e4"/>'
        yield _words(x(tick), bottom + 22, size(tick).replace(".0 ", " "), "middle")
    label = "hit ratio (of blocks asked for) by capacity (logarithmic)"
    yield _words(_WIDTH / 2, bottom + 48, label, "middle")
    for number, (name, points, colour, dash) in enumerate(drawn):
        stroke = f'fill="none" stroke="{colour}" stroke-width="2.2" stroke-dasharray="{dash}"'
        at = [(x(nbytes), y(share)) for nbytes, share in points]
        yield f'<path d="M{"L".join(f"{across} {up}" for across, up in at)}" {stroke}/>'
        yield from (f'<circle cx="{across}" cy="{up}" r="3.6" fill="{colour}"/>' for across, up in at)
        left = 20 + 108 * number
        yield f'<path d="M{left} {_HEIGHT - 26}h20" {stroke}/>'
        yield _words(left + 25, _HEIGHT - 22, name)
    yield "</svg>"


def _words(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="13" fill="#222222" text-anchor="{anchor}">{text}</text>'


def _list(sentences: Sequence[str]) -> Iterator[str]:
    yield f"<ul>{''.join(f'<li>{_safe(one)}</li>' for one in sentences)}</ul>"


def _row(kind: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{_safe(cell)}</{kind}>' for cell in cells)}</tr>"


def _safe(text: str) -> str:
    return escape(readable(text, None, keep="\n"))
