"""Drops files from the page cache: what was just written would otherwise be read from memory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path


def drop(folder: Path | None, names: Iterable[str]) -> None:
    """Drops these files of a payload folder from the page cache, as far as their file system can.

    It never fails: at worst they are read from memory.
    """
    if folder is None or not hasattr(os, "posix_fadvise"):
        return
    for name in names:
        with suppress(OSError):
            fd = os.open(folder / name, os.O_RDONLY | os.O_CLOEXEC)
            try:
                # Only what is on the disk can be dropped.
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(fd)
