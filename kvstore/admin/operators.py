"""The name of whoever runs a command, as the journal and the operations have it.

It is a record for those who trust each other, not a proof: whoever may write to the index may write any name.
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Iterable, Mapping

from kvstore.build import OPERATOR

#: Characters of a name.
_MOST_NAME = 64
#: Characters of what was done, and names in it of one kind.
_MOST_WORDS = 400
_NAMED = 8


def operator(environ: Mapping[str, str]) -> str:
    """Returns the name that KVSTORE_OPERATOR gives, or else USER@HOST of the process."""
    return written(environ.get(OPERATOR, "").strip() or f"{_user()}@{socket.gethostname()}", _MOST_NAME)


def janitor() -> str:
    """Returns the name of a janitor: its host's, which on Kubernetes is its pod's."""
    return written(socket.gethostname(), _MOST_NAME)


def written(text: object, most: int = _MOST_WORDS) -> str:
    """Returns `text` on one line, at most so long, without what changes how the rest reads.

    That is control characters, directional overrides and halves of surrogate pairs.
    """
    clean = "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text)[:most])
    return clean if len(clean) <= most else f"{clean[: most - 1]}…"


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())  # as in a container: a number without a name


def among(names: Iterable[str]) -> str:
    """Returns the first few of these names, and how many there are besides."""
    found = list(dict.fromkeys(names))
    more = len(found) - _NAMED
    return ", ".join(found[:_NAMED]) + (f" and {more} more" if more > 0 else "")
