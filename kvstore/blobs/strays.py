"""What lies beside the payloads, in the same folder or under the same prefix: leftovers of ours, and things
that are not ours.

    probe       of a ping whose process died before it deleted it (S3)
    temporary   of a put whose process died (a folder)
    upload      parts of an upload that was never completed (S3)
    foreign     anything else that is no payload; never removed

`gc` alone asks for it, which is why it is no part of PayloadStore.
"""

from __future__ import annotations

import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from kvstore.blobs.local import remove_if_abandoned
from kvstore.errors import KVStoreError, PermissionDenied, TransientError
from kvstore.keys import parse_payload_name

_TEMPORARY = re.compile(r"[0-9a-f]{32}")
_NAMESPACE = re.compile(r"[0-9a-f]{16}")
_FAN = re.compile(r"[0-9a-f]{2}")

_Each = Callable[[os.DirEntry[str], str], "Iterator[Stray]"]


StrayKind = Literal["probe", "temporary", "upload", "foreign"]


@dataclass(frozen=True, slots=True)
class Stray:
    """One object that is no payload."""

    #: Below the folder or prefix; a folder of somebody else's ends in a slash and stands for all in it.
    name: str
    kind: StrayKind
    #: 0 where it is not known.
    nbytes: int
    modified_s: float
    #: What S3 calls this upload.
    upload: str = ""


class Strays(ABC):
    """Of one payload store. Raises what its payload store raises."""

    @abstractmethod
    def list(self) -> Iterator[Stray]:
        """All there are, in no order."""

    @abstractmethod
    def remove(self, strays: Sequence[Stray], *, now_s: float, older_than_s: float) -> Sequence[Stray]:
        """Remove those that are not foreign; returns which. One that turns out to be in use stays."""

    @abstractmethod
    def close(self) -> None:
        """Release connections."""


class NoStrays(Strays):
    """Of a store that can hold nothing but payloads."""

    def list(self) -> Iterator[Stray]:
        return iter(())

    def remove(self, strays: Sequence[Stray], *, now_s: float, older_than_s: float) -> Sequence[Stray]:
        return ()

    def close(self) -> None:
        pass


class LocalStrays(Strays):
    """Beside the files of LocalPayloads. `ours` are files of the root that belong to the index."""

    def __init__(self, root: str, ours: Sequence[str] = ()) -> None:
        self._root = Path(root).absolute()
        self._ours = frozenset(ours)

    def list(self) -> Iterator[Stray]:
        try:
            for entry in _scan(self._root):
                if entry.name == ".tmp" and entry.is_dir(follow_symlinks=False):
                    yield from self._within(entry, self._temporary)
                elif _NAMESPACE.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                    yield from self._within(entry, self._fan)
                elif entry.name not in self._ours:
                    yield from _stray(entry, "", "foreign")
        except OSError as exc:
            raise self._error("list", exc) from exc

    def _within(self, folder: os.DirEntry[str], each: _Each) -> Iterator[Stray]:
        for entry in _scan(folder.path):
            yield from each(entry, f"{folder.name}/")

    def _temporary(self, entry: os.DirEntry[str], above: str) -> Iterator[Stray]:
        ours = _TEMPORARY.fullmatch(entry.name) and entry.is_file(follow_symlinks=False)
        yield from _stray(entry, above, "temporary" if ours else "foreign")

    def _fan(self, entry: os.DirEntry[str], above: str) -> Iterator[Stray]:
        if not _FAN.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
            yield from _stray(entry, above, "foreign")
            return
        for leaf in _scan(entry.path):
            name = f"{above}{entry.name}/{leaf.name}"
            if not parse_payload_name(name) or not leaf.is_file(follow_symlinks=False):
                yield from _stray(leaf, f"{above}{entry.name}/", "foreign")

    def remove(self, strays: Sequence[Stray], *, now_s: float, older_than_s: float) -> Sequence[Stray]:
        """A temporary file whose writer lives is locked, and stays."""
        removed = []
        try:
            folder = os.open(self._root / ".tmp", os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except OSError as exc:
            raise self._error("remove temporary files", exc) from exc
        try:
            for stray in strays:
                if stray.kind == "temporary":
                    name = stray.name.rpartition("/")[2]
                    with suppress(OSError):
                        if remove_if_abandoned(folder, name, now_s, older_than_s):
                            removed.append(stray)
        finally:
            os.close(folder)
        return removed

    def close(self) -> None:
        pass

    def _error(self, what: str, exc: OSError) -> KVStoreError:
        text = f"payload folder {self._root}: can't {what}: {exc.strerror or exc}"
        return PermissionDenied(text) if isinstance(exc, PermissionError) else TransientError(text)


def _scan(folder: str | os.PathLike[str]) -> Iterator[os.DirEntry[str]]:
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        yield from entries


def _stray(entry: os.DirEntry[str], above: str, kind: Literal["temporary", "foreign"]) -> Iterator[Stray]:
    with suppress(FileNotFoundError):
        status = entry.stat(follow_symlinks=False)
        folder = stat.S_ISDIR(status.st_mode)
        name = f"{above}{entry.name}{'/' if folder else ''}"
        yield Stray(name, kind, 0 if folder else status.st_size, status.st_mtime)
