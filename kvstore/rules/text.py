"""Makes text that a stranger has chosen fit for logs, terminals, labels and pages."""

from __future__ import annotations

from typing import Final

#: Most characters of a name, a request's id or a server's sentence that are shown.
SHOWN_CHARS: Final = 128


def readable(text: object, most: int | None = SHOWN_CHARS, *, keep: str = "") -> str:
    """Returns `text` without anything that changes how the rest of a line reads, or that a terminal obeys.

    Line ends, control characters (C0 and C1), overrides of the direction of text, lone surrogates and all
    else that isn't printable are written as Python writes them: `\\x9b`. The first `most` characters are
    taken (None: all); those in `keep` stay as they are.
    """
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in str(text)[:most])
