"""An advice as one page of HTML that can be mailed: it has its styles and its plot inside, and no script, and
it loads nothing. Whatever came from a recording is text in it, and no markup."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from kvstore.admin.advise.plot import Plot, svg
from kvstore.rules.text import readable

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

#: The heads of a table, and its rows.
Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def html(
    title: str, kind: str, because: Sequence[str], plot: Plot, tables: Sequence[tuple[str, Table]],
    paste: str, notes: Sequence[str],
) -> str:  # fmt: skip
    """Returns the page. `kind` is its verdict, which chooses a colour."""
    return "\n".join(_lines(title, kind, because, plot, tables, paste, notes)) + "\n"


def _lines(
    title: str, kind: str, because: Sequence[str], plot: Plot, tables: Sequence[tuple[str, Table]],
    paste: str, notes: Sequence[str],
) -> Iterator[str]:  # fmt: skip
    yield "<!doctype html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{_safe(title)}</title><style>{_STYLE}</style></head><body>"
    yield f'<h1 class="{_safe(kind)}">{_safe(title)}</h1>'
    yield from _list(because)
    yield svg(plot)
    for heading, (heads, rows) in tables:
        yield f"<h2>{_safe(heading)}</h2><table><thead>{_row('th', heads)}</thead><tbody>"
        yield from (_row("td", row) for row in rows)
        yield "</tbody></table>"
    if paste:
        yield f"<h2>Settings to paste</h2><pre>{_safe(paste)}</pre>"
    yield "<h2>What these numbers leave out</h2>"
    yield from _list(notes)
    yield "</body></html>"


def _list(sentences: Sequence[str]) -> Iterator[str]:
    yield f"<ul>{''.join(f'<li>{_safe(one)}</li>' for one in sentences)}</ul>"


def _row(kind: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{kind}>{_safe(cell)}</{kind}>' for cell in cells)}</tr>"


def _safe(text: str) -> str:
    return escape(readable(text, None, keep="\n"))
