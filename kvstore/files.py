"""Makes and opens the files and folders that hold what prompts leave behind.

Whatever the umask, what is made here is for the owner alone (OWNER), or for the owner's group as well where
several users share a folder (GROUP; the setting `local.share`). Whatever others have put there, only regular
files are opened, and none through a symbolic link: others may write in a folder for temporary files.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

log = logging.getLogger(__name__)

_NO_LINK = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
#: Most entries of a folder that `tighten` looks at.
_ENTRIES = 4096


@dataclass(frozen=True, slots=True)
class Access:
    """The permissions of what is made."""

    file: int
    folder: int


OWNER = Access(0o600, 0o700)
#: New entries of a folder get its group (the bit of 0o2000), whoever makes them.
GROUP = Access(0o660, 0o2770)


def access_of(share: Literal["owner", "group"]) -> Access:
    """Returns what the setting `local.share` means."""
    return GROUP if share == "group" else OWNER


def open_file(
    path: str | os.PathLike[str], flags: int, access: Access = OWNER, *, dir_fd: int | None = None
) -> int:
    """Opens a regular file, and makes it first if `flags` has O_CREAT. Returns its descriptor.

    Raises OSError: with ELOOP if something else is there, such as a link, a device or a FIFO, which is
    neither opened nor followed.
    """
    while True:
        try:
            found = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            with suppress(FileExistsError):
                return _made(path, flags, access, dir_fd)
        else:
            if flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))
            _check_regular(found.st_mode, path)
            with suppress(FileNotFoundError):
                fd = os.open(path, flags & ~os.O_CREAT | _NO_LINK, dir_fd=dir_fd)
                try:
                    _check_regular(os.fstat(fd).st_mode, path)
                except OSError:
                    os.close(fd)
                    raise
                return fd


def _made(path: str | os.PathLike[str], flags: int, access: Access, dir_fd: int | None) -> int:
    fd = os.open(path, flags | os.O_CREAT | os.O_EXCL | _NO_LINK, access.file, dir_fd=dir_fd)
    if access is not OWNER:
        # The umask has taken what others are to have. Some network file systems know no modes.
        with suppress(OSError):
            os.fchmod(fd, access.file)
    return fd


def _check_regular(mode: int, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(mode):
        raise OSError(errno.ELOOP, "not a regular file", os.fspath(path))


def make_folder(path: str | os.PathLike[str], access: Access = OWNER, *, dir_fd: int | None = None) -> None:
    """Makes a folder; the folders above it, where there is no `dir_fd`, are made as the umask says.

    Does nothing if it is there. Raises OSError.
    """
    if dir_fd is None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
    try:
        os.mkdir(path, access.folder & 0o777, dir_fd=dir_fd)
    except FileExistsError:
        # A link to a folder is the operator's business; whoever must not follow one opens with O_NOFOLLOW.
        if dir_fd is None and not Path(path).is_dir():
            raise
        return
    if access is not OWNER:
        with suppress(OSError):
            os.chmod(path, access.folder, dir_fd=dir_fd)


def tighten(path: str | os.PathLike[str], access: Access = OWNER) -> None:
    """Takes from a folder of this user what `access` doesn't give; of a folder that is another's, from what
    this user has in it. Never raises, and follows no link.

    An older release left it to the umask.
    """
    with suppress(OSError):
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if _tightened(fd, path, access):
                return
            with os.scandir(fd) as entries:
                for entry in islice(entries, _ENTRIES):
                    if entry.is_dir(follow_symlinks=False):
                        child = os.open(
                            entry.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd
                        )
                        try:
                            _tightened(child, f"{os.fspath(path)}/{entry.name}", access)
                        finally:
                            os.close(child)
        finally:
            os.close(fd)


def _tightened(fd: int, path: str | os.PathLike[str], access: Access) -> bool:
    """Takes from an open folder of this user what `access` doesn't give. Returns whether nobody has more."""
    found = os.fstat(fd)
    over = found.st_mode & 0o777 & ~access.folder
    if found.st_mode & stat.S_ISGID:
        # Somebody shares it with a group on purpose: these settings may not be those of all who use it.
        over &= 0o007
    if over and found.st_uid == os.geteuid():
        os.fchmod(fd, stat.S_IMODE(found.st_mode) & ~over)
        log.warning("%s was open to others (mode %03o); now it is not", path, found.st_mode & 0o777)
        return True
    return not over


def too_open(path: Path, access: Access) -> Iterator[Path]:
    """Yields what is right in the folder and may be read by others than those whom `access` lets, if they may
    enter it at all.

    Raises OSError.
    """
    if not path.stat().st_mode & 0o777 & ~access.folder & 0o055:
        return
    with os.scandir(path) as entries:
        for entry in islice(entries, _ENTRIES):
            with suppress(FileNotFoundError):
                mode = entry.stat(follow_symlinks=False).st_mode
                given = access.folder if stat.S_ISDIR(mode) else access.file
                if not stat.S_ISLNK(mode) and mode & 0o777 & ~given & 0o055:
                    yield Path(entry.path)
