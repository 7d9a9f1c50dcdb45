"""Strays: what lies beside the payloads, in the same folder or under the same prefix, and is none.

    probe       an object of a ping whose process died before it deleted it (S3)
    temporary   a file of a put whose process died (a folder)
    upload      parts of an upload that was never completed (S3)
    foreign     anything else; not kvstore's, and never removed

Only `fsck` asks for strays, which is why Strays is not part of PayloadStore.
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

from kvstore.errors import KVStoreError, PermissionDenied, TransientError
from kvstore.keys import parse_payload_name
from kvstore.payloads.local import remove_if_abandoned

_TEMPORARY = re.compile(r"[0-9a-f]{32}")
_NAMESPACE = re.compile(r"[0-9a-f]{16}")
_FAN = re.compile(r"[0-9a-f]{2}")

_Each = Callable[[os.DirEntry[str], str], "Iterator[Stray]"]


StrayKind = Literal["probe", "temporary", "upload", "foreign"]


@dataclass(frozen=True, slots=True)
class Stray:
    """One object that is no payload."""

    #: Path below the folder or prefix. A foreign folder's ends in a slash and stands for all in it.
    name: str
    kind: StrayKind
    #: 0 where it is not known.
    nbytes: int
    modified_s: float
    #: S3's id of this upload.
    upload: str = ""


class Strays(ABC):
    """Lists and removes the strays of one payload store. Raises what its payload store raises."""

    @abstractmethod
    def list(self) -> Iterator[Stray]:
        """Yields all strays, in no order."""

    @abstractmethod
    def remove(self, strays: Sequence[Stray], *, now_s: float, older_than_s: float) -> Sequence[Stray]:
        """Removes those strays that are not foreign, and leaves one that turns out to be in use.

        Returns the removed ones.
        """

    @abstractmethod
    def close(self) -> None:
        """Releases connections."""


class NoStrays(Strays):
    """The strays of a store that can hold nothing but payloads."""

    def list(self) -> Iterator[Stray]:
        return iter(())

    def remove(self, strays: Sequence[Stray], *, now_s: float, older_than_s: float) -> Sequence[Stray]:
        return ()

    def close(self) -> None:
        pass


class LocalStrays(Strays):
    """The strays of LocalPayloads. `ours` are files in the root that belong to the index."""

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
        """Removes temporary files; one whose writer lives is locked, and stays."""
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
