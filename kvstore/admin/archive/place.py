"""The place of an archive: a file, named by its path or as file:///PATH, or an object, s3://BUCKET/KEY."""

from __future__ import annotations

import io
import mmap
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from kvstore.admin.archive.export import ArchiveFile
from kvstore.admin.backends import Refused, UnknownName
from kvstore.build import open_object
from kvstore.errors import ConfigError, KVStoreError
from kvstore.payloads.port import PayloadStore
from kvstore.rules.text import readable
from schemas.base import redact
from schemas.settings import Settings
from schemas.urls import check_folder, local_path, s3_location

#: Bytes of an object that are asked for at once.
_STEP = 8 << 20


@contextmanager
def opened(where: str, settings: Settings) -> Iterator[tuple[BinaryIO, int | None]]:
    """Yields an archive to read, and its size if that is known. Raises ConfigError for a file that can't be
    read, UnknownName if there is no such object, and what reading raises.
    """
    path = _local(where)
    if path is not None:
        try:
            file = path.open("rb")
        except OSError as exc:
            raise ConfigError(f"can't read {readable(path)}: {exc.strerror}") from exc
        with file:
            yield file, path.stat().st_size if path.is_file() else None
        return
    size, payloads = open_object(where, settings)
    with payloads:
        nbytes = size()
        if nbytes is None:
            raise UnknownName(f"there is no {redact(where)}")
        with io.BufferedReader(_Object(payloads, nbytes), _STEP) as reader:
            yield reader, nbytes


@contextmanager
def writable(where: str, settings: Settings, *, overwrite: bool) -> Iterator[Path]:
    """Yields the file to write an archive to. One for a bucket is put there at the end, if it was written.

    Raises Refused if the archive exists, ConfigError, and what asking the bucket and the put raise.
    """
    path = _local(where)
    if path is not None:
        ArchiveFile.check(path, overwrite=overwrite)
        yield path
        return
    size, payloads = open_object(where, settings)
    with payloads, tempfile.TemporaryDirectory(prefix="kvstore-export-") as folder:
        if not overwrite and size() is not None:
            raise Refused(f"{redact(where)} exists; --force overwrites it")
        path = Path(folder) / "archive.tar"
        yield path
        if path.exists():
            with (
                path.open("rb") as file,
                mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
                memoryview(mapped) as view,
            ):
                payloads.put("", [view])


def _local(where: str) -> Path | None:
    """Returns the path of an archive that is a file, None of one in a bucket. Raises ConfigError."""
    scheme, mark, _ = where.partition("://")
    try:
        if not mark:
            return Path(where)
        if scheme == "file":
            return Path(local_path(check_folder(where)))
        if scheme == "s3" and s3_location(where).prefix:
            return None
    except ValueError as exc:
        raise ConfigError(f"{redact(where)}: {exc}") from None
    raise ConfigError(
        f"{redact(where)}: an archive is at a path, file:///PATH or s3://BUCKET/FOLDER/NAME.tar"
    )


class _Object(io.RawIOBase):
    """An object as a file that is read by ranges, so that what is skipped is not fetched."""

    def __init__(self, payloads: PayloadStore, nbytes: int) -> None:
        self._payloads, self._nbytes, self._at = payloads, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._nbytes}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        view = memoryview(buffer).cast("B")[: max(0, self._nbytes - self._at)]
        got = self._payloads.read("", self._at, [view]) if view else 0
        if got is None:
            raise KVStoreError("the archive was deleted while it was read")
        self._at += got
        return got
