"""Writer: who writes what this process saves, as headers and records name it."""

from __future__ import annotations

import hashlib
import secrets
import socket
from collections.abc import Iterable

from kvstore import __version__
from kvstore.keys import PlaceId, WriterId, place_of, writer_id

#: Most characters of a name.
_NAME_CHARS = 128


class Writer:
    """One start of one engine, or of another process that saves: version, host, place, and a number.

    An engine's processes have one name, or its ranks could not commit one segment. Its scheduler half makes
    it up, and its workers adopt it with the first message that has something to save.
    """

    def __init__(self) -> None:
        self._start = secrets.token_hex(8)
        self.computes_on(())

    def __repr__(self) -> str:
        return f"Writer({self.name!r})"

    def computes_on(self, accelerators: Iterable[str]) -> None:
        """Writes as this start of an engine on accelerators of these ids, in any order; without any its place
        is the host. The host alone is none where there are accelerators: a container has another name after
        each start."""
        host = "".join(socket.gethostname().split())[: _NAME_CHARS - 64] or "localhost"
        ids = "\n".join(sorted(filter(None, accelerators)))
        place = f" {hashlib.sha256(ids.encode()).hexdigest()[:16]}" if ids else ""
        self.adopt(f"kvstore/{__version__} {host}{place} {self._start}")

    def adopt(self, name: str) -> None:
        """Writes under this name from now on."""
        self.name = name
        self.id: WriterId = writer_id(name)
        self.place: PlaceId = place_of(name)
