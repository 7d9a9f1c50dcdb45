"""File systems of a row's own, which can be full, read-only or not there."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

#: Bytes of a disk that is not told otherwise: what all rows of a bed store fits.
SIZE = 1 << 30


@contextmanager
def disk(folder: Path, nbytes: int = SIZE) -> Iterator[bool]:
    """A file system of so many bytes at `folder`, where this user may mount one; gives whether it may."""
    folder.mkdir(parents=True, exist_ok=True)
    mounted = os.geteuid() == 0 and _mount(folder, nbytes)
    try:
        yield mounted
    finally:
        if mounted:
            _unmount(folder)


@contextmanager
def full(folder: Path, mounted: bool) -> Iterator[Callable[[], int]]:
    """Not a byte is left on a disk."""
    _needs(mounted)
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)) == size:
                    pass
    try:
        yield lambda: 1
    finally:
        filler.unlink()


@contextmanager
def read_only(folder: Path, mounted: bool) -> Iterator[Callable[[], int]]:
    """Nothing that is opened from now on can be written."""
    _needs(mounted)
    # A mount with a file that is open for writing can't be made so, one on top of it can. What is open stays
    # writable.
    _run("mount", "--bind", str(folder), str(folder))
    try:
        _run("mount", "-o", "remount,bind,ro", str(folder))
        yield lambda: 1
    finally:
        _unmount(folder)


@contextmanager
def not_mounted(folder: Path, mounted: bool) -> Iterator[Callable[[], int]]:
    """Where the disk was there is an empty folder; afterwards the disk is back with what it held."""
    _needs(mounted)
    assert _mount(folder, SIZE)
    try:
        yield lambda: 1
    finally:
        _unmount(folder)


def _needs(mounted: bool) -> None:
    assert mounted, "needs a file system of its own: run it as root"


def _mount(folder: Path, nbytes: int) -> bool:
    command = ["mount", "-t", "tmpfs", "-o", f"size={nbytes},mode=700", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _unmount(folder: Path) -> None:
    _run("umount", "--lazy", str(folder))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
