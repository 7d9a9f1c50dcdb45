"""Markers: they name the payloads of the fast folder that the shared store does not have yet.

    <folder>/.tier/dirty/<namespace id>.<segment id>.<rank> -> <bytes>    a symbolic link that points nowhere

A link is made in one step, with its content, and both are metadata: a file system with an ordered journal
that brings a payload's name back after a power cut brings its marker back as well, because the marker is
older. So the truth about what must still be uploaded outlives the ledger, which is a hint that can be
rebuilt.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import CapacityExceeded, KVStoreError, PermissionDenied, TransientError
from kvstore.files import OWNER, Access, make_folder
from kvstore.keys import parse_payload_name

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


@dataclass(frozen=True, slots=True)
class Marker:
    """One payload that waits for its upload."""

    name: str
    #: Its size; a smaller file in the folder was cut short by a power cut.
    nbytes: int


class Markers:
    """The markers below the tier's folder. Safe for any number of threads and processes.

    Raises TransientError, PermissionDenied, CapacityExceeded.
    """

    def __init__(self, folder: str, access: Access = OWNER) -> None:
        self._access = access
        self._folder = Path(folder) / ".tier" / "dirty"

    def add(self, name: str, nbytes: int) -> None:
        """Marks `name`, before its payload is written. A marker that is there stays as it is."""
        path = self._path(name)
        try:
            try:
                path.symlink_to(str(nbytes))
            except FileNotFoundError:
                for each in (self._folder.parent.parent, self._folder.parent, self._folder):
                    make_folder(each, self._access)
                path.symlink_to(str(nbytes))
        except FileExistsError:
            pass
        except OSError as exc:
            raise self._error(f"add {name}", exc) from exc

    def find(self, name: str) -> Marker | None:
        """Returns the marker of `name`; None if it is not dirty."""
        try:
            text = str(self._path(name).readlink())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as exc:
            raise self._error(f"look for {name}", exc) from exc
        return Marker(name, int(text)) if text.isdecimal() else None

    def remove(self, name: str) -> bool:
        """Removes the marker of `name`. Returns False if there is none (any more)."""
        try:
            self._path(name).unlink()
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as exc:
            raise self._error(f"remove {name}", exc) from exc
        return True

    def all(self) -> list[Marker]:
        """Returns every marker. Scans one folder, which doesn't exist before the first marker."""
        try:
            with os.scandir(self._folder) as entries:
                leaves = [entry.name for entry in entries]
        except (FileNotFoundError, NotADirectoryError):
            return []
        except OSError as exc:
            raise self._error("list them", exc) from exc
        found = []
        for leaf in leaves:
            name = _name_of(leaf)
            if name is not None:
                with suppress(KVStoreError):
                    marker = self.find(name)
                    if marker is not None:
                        found.append(marker)
        return found

    def _path(self, name: str) -> Path:
        namespace, _, leaf = name.split("/")
        return self._folder / f"{namespace}.{leaf}"

    def _error(self, what: str, exc: OSError) -> KVStoreError:
        text = f"markers in {self._folder}: can't {what}: {exc.strerror or exc}"
        if exc.errno in _FULL:
            return CapacityExceeded(text)
        return PermissionDenied(text) if exc.errno in _DENIED else TransientError(text)


def _name_of(leaf: str) -> str | None:
    namespace, _, rest = leaf.partition(".")
    name = f"{namespace}/{rest[:2]}/{rest}"
    return name if parse_payload_name(name) else None
