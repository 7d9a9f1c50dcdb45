"""Writer: who writes what this process saves, as headers and records name it."""

from __future__ import annotations

import secrets
import socket

from kvstore import __version__
from kvstore.keys import WriterId, writer_id

#: Most characters of a name.
_NAME_CHARS = 128


class Writer:
    """One start of one engine, or of another process that saves: version, host, and a number of that start.

    An engine's processes have one name, or its ranks could not commit one segment. Its scheduler half makes
    it up, and its workers adopt it with the first message that has something to save.
    """

    def __init__(self) -> None:
        start = secrets.token_hex(8)
        host = socket.gethostname()[: _NAME_CHARS - 64]
        self.adopt(f"kvstore/{__version__} {host} {start}")

    def __repr__(self) -> str:
        return f"Writer({self.name!r})"

    def adopt(self, name: str) -> None:
        """Writes under this name from now on."""
        self.name = name
        self.id: WriterId = writer_id(name)
