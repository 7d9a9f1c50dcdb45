"""LocalPayloads: payloads as files under one folder, shared by any number of processes.

    <root>/<namespace id>/<2 hex>/<segment id>.<rank>    a payload (kvstore.keys.payload_name)
    <root>/.tmp/<32 hex>                                 a payload that is being written

Order of a put, so that a crash after any step is harmless (invariants 1 and 4 of docs/format.md):
    1. create   .tmp/<random>, and lock it              crash: an empty temporary file
    2. write    every buffer                            crash: a partial temporary file
    3. sync     the file (`data`, `full`)               crash: a whole temporary file
    4. mkdir    the folders that the name lacks         crash: the same, and empty folders
    5. rename   the file to its name                    crash: a whole payload that nothing names
    6. sync     the folders (`full`)                    crash: the same
Readers open payloads by their names only, and step 5 makes a name appear with the whole payload. Without
step 3 a power cut may leave a payload short, or with holes, under its name: length and checksums tell, so
it is a miss.

How a dead writer's temporary file is told from one in use: a writer holds a lock (flock) on its file until
it is renamed, and the kernel drops a lock with its process. So opening a store removes the temporary files
whose lock is free and which nobody has written for a minute (a network file system may keep locks per host);
where locks don't work at all, it removes those of an hour ago. If a writer's file is removed all the same,
its put fails.

Why through the page cache: O_DIRECT writes faster, but payloads are written to be read, on the path of a
request, and would then come from the disk. 32 MiB segments, ext4 on virtio, one thread:
    buffered   put 1.5 GB/s (0.5 into never-used guest memory), 0.30 CPU s/GB; first read 18 GB/s
    O_DIRECT   put 2.0 GB/s,                                    0.08 CPU s/GB; first read 1.9 GB/s
A segment that is read even once is cheaper buffered, and the writer is a background thread.

No symbolic link below the root is followed, in any component of a path: names are checked, and folders are
opened one inside the other. Whatever the umask, files and folders are the owner's alone (kvstore.files).
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Literal

from kvstore.errors import CapacityExceeded, KVStoreError, PermissionDenied, TransientError
from kvstore.files import OWNER, Access, make_folder, open_file, tighten
from kvstore.keys import parse_payload_name
from kvstore.payloads.buffers import flat
from kvstore.payloads.port import Listed, PayloadStore
from kvstore.rules.tiers import Tier

#: Most buffers that the kernel takes in one call.
IOV_MAX = 1024
#: Most temporary files that one removal looks at, so that opening a store never takes long.
MAX_TEMPORARY = 256
#: Seconds without a write after which a temporary file is removed: with a free lock; where locks don't work.
UNLOCKED_S, UNLOCKABLE_S = 60.0, 3600.0

_TMP = ".tmp"
_TEMPORARY = re.compile(r"[0-9a-f]{32}")
_NAMESPACE = re.compile(r"[0-9a-f]{16}")
_FAN = re.compile(r"[0-9a-f]{2}")

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
#: Nonblocking, or a FIFO in a payload's place would hang its reader. It makes no difference for a file.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
#: Errors that say: the name is not there, or something is that no put has made (a folder, link, socket).
_ABSENT = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.ESPIPE})

Fsync = Literal["none", "data", "full"]


class LocalPayloads(PayloadStore):
    """Payloads under the folder `root`, which the first put makes.

    `fsync` is what a put promises when it returns: `none`, that the payload survives the process; `data`,
    that its bytes survive a power cut; `full`, that its name does as well. The store holds no descriptor
    between calls, so `close` does nothing and the folder may be deleted at any time.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        fsync: Fsync = "none",
        clock: Callable[[], float] = time.time,
        access: Access = OWNER,
    ) -> None:
        # Made absolute here, once: a later chdir must not move the cache.
        self._root = str(Path(root).absolute())
        self._fsync = fsync
        self._access = access
        tighten(self._root, access)
        remove_temporary(self._root, clock())

    def __repr__(self) -> str:
        return f"LocalPayloads({self._root!r}, fsync={self._fsync!r})"

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        namespace, fan, leaf = _split(name)
        try:
            with _temporary(self._root, self._access) as (tmp, temporary, fd):
                _write(fd, buffers)
                if self._fsync != "none":
                    os.fdatasync(fd)
                # NFS and FUSE report late write errors when a descriptor is closed. Closing a copy
                # asks for them before the rename, and keeps the lock.
                os.close(os.dup(fd))
                folder = _open_folder(self._root, namespace, fan, create=self._access)
                try:
                    os.rename(temporary, leaf, src_dir_fd=tmp, dst_dir_fd=folder)
                finally:
                    os.close(folder)
            if self._fsync == "full":
                # All three, even if they existed: another thread may have made one and not synced it yet.
                for parts in ((namespace, fan), (namespace,), ()):
                    _sync_folder(self._root, *parts)
        except OSError as exc:
            raise self._error(f"put {name}", exc) from exc

    def read(
        self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None
    ) -> int | None:
        namespace, fan, leaf = _split(name)
        if offset < 0:
            raise ValueError(f"negative offset {offset}")
        try:
            folder = _open_folder(self._root, namespace, fan)
            try:
                fd = os.open(leaf, _READ, dir_fd=folder)
            finally:
                os.close(folder)
            try:
                return _read(fd, offset, into)
            finally:
                os.close(fd)
        except OSError as exc:
            if exc.errno in _ABSENT:
                return None
            raise self._error(f"read {name}", exc) from exc

    def tier(self, name: str, nbytes: int) -> Tier:
        return "disk"

    def delete(self, names: Sequence[str]) -> int:
        removed = 0
        failed: tuple[str, OSError] | None = None
        for name, (namespace, fan, leaf) in [(name, _split(name)) for name in names]:
            try:
                folder = _open_folder(self._root, namespace, fan)
                try:
                    os.unlink(leaf, dir_fd=folder)
                finally:
                    os.close(folder)
                removed += 1
            except OSError as exc:
                # One bad folder must not keep the rest of a batch alive.
                if exc.errno not in _ABSENT:
                    failed = failed or (name, exc)
        if failed:
            raise self._error(f"delete {failed[0]}", failed[1]) from failed[1]
        return removed

    def list(self, prefix: str = "") -> Iterator[Listed]:
        try:
            for namespace in _folders(self._root, (), _NAMESPACE, prefix):
                for fan in _folders(self._root, (namespace,), _FAN, prefix):
                    yield from _payloads(self._root, namespace, fan, prefix)
        except OSError as exc:
            raise self._error("list", exc) from exc

    def ping(self) -> None:
        """Writes and reads a temporary file. Makes the folder for it if that is missing."""
        probe = secrets.token_bytes(4096)
        back = bytearray(len(probe))
        try:
            with _temporary(self._root, self._access) as (_, _name, fd):
                _write(fd, [memoryview(probe)])
                _read(fd, 0, [memoryview(back)])
        except OSError as exc:
            raise self._error("write and read a temporary file", exc) from exc
        if back != probe:
            raise TransientError(f"payload folder {self._root}: a file reads back other than written")

    def close(self) -> None:
        pass

    def _error(self, what: str, exc: OSError) -> KVStoreError:
        # strerror says it in words: "Read-only file system", "No space left on device", ...
        text = f"payload folder {self._root}: can't {what}: {exc.strerror or exc}"
        if exc.errno in _FULL:
            return CapacityExceeded(text)
        if exc.errno in _DENIED:
            return PermissionDenied(f"{text} (as user {os.geteuid()})")
        return TransientError(text)


def _split(name: str) -> tuple[str, str, str]:
    if parse_payload_name(name) is None:
        raise ValueError(f"not a payload name: {name!r}")
    namespace, fan, leaf = name.split("/")
    return namespace, fan, leaf


def _open_folder(root: str, *parts: str, create: Access | None = None) -> int:
    """Returns a descriptor of the folder `root`/`parts`, and follows no link below the root on the way. Makes
    what is missing if `create` says how."""
    try:
        fd = os.open(root, _FOLDER)
    except FileNotFoundError:
        if create is None:
            raise
        make_folder(root, create)
        fd = os.open(root, _FOLDER)
    for part in parts:
        parent = fd
        try:
            fd = _open_child(parent, part, create)
        finally:
            os.close(parent)
    return fd


def _open_child(parent: int, part: str, create: Access | None) -> int:
    try:
        return os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    except FileNotFoundError:
        if create is None:
            raise
    make_folder(part, create, dir_fd=parent)
    return os.open(part, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)


def _sync_folder(root: str, *parts: str) -> None:
    fd = _open_folder(root, *parts)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def _temporary(root: str, access: Access) -> Iterator[tuple[int, str, int]]:
    """Makes a locked file in .tmp and yields (folder, name, descriptor). Removes it at the end unless it was
    renamed."""
    folder = _open_folder(root, _TMP, create=access)
    try:
        name = secrets.token_hex(16)
        fd = open_file(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, access, dir_fd=folder)
        try:
            # Nobody else knows the name yet. Where locks don't work, its age protects the file.
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield folder, name, fd
        finally:
            with suppress(OSError):
                os.unlink(name, dir_fd=folder)
            os.close(fd)
    finally:
        os.close(folder)


def remove_temporary(root: str, now: float, unlocked_s: float = UNLOCKED_S) -> bool:
    """Removes temporary files that a crash has left. Never raises: a put will meet the same error.

    A file whose lock is free goes once nobody has written to it for `unlocked_s`; on a local disk, where
    locks are reliable, a second will do. Returns whether all files were looked at.
    """
    try:
        folder = _open_folder(root, _TMP)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, MAX_TEMPORARY)]
        for name in names:
            if _TEMPORARY.fullmatch(name):
                with suppress(OSError):
                    remove_if_abandoned(folder, name, now, unlocked_s)
        return len(names) < MAX_TEMPORARY
    except OSError:
        return False
    finally:
        os.close(folder)


def remove_if_abandoned(folder: int, name: str, now: float, unlocked_s: float) -> bool:
    """Removes one temporary file of the folder if its writer is gone. Returns whether it did. Raises
    OSError."""
    # Opened for writing, because NFS turns flock into a range lock, which needs that.
    fd = open_file(name, os.O_RDWR, dir_fd=folder)
    try:
        age = now - os.fstat(fd).st_mtime
        if age < unlocked_s:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError:
            if age < UNLOCKABLE_S:
                return False
        os.unlink(name, dir_fd=folder)
        return True
    finally:
        os.close(fd)


def _write(fd: int, buffers: Sequence[memoryview]) -> None:
    """Writes all buffers from the file's start on, without joining them."""
    views = flat(buffers)
    first = position = 0
    while first < len(views):
        count = os.pwritev(fd, views[first : first + IOV_MAX], position)
        if not count:
            raise OSError(errno.EIO, "wrote nothing")
        position += count
        first = _skip(views, first, count)


def _read(fd: int, offset: int, into: Sequence[memoryview]) -> int:
    """Fills the buffers with the bytes from `offset` on. Returns how many there were."""
    views = flat(into)
    first = total = 0
    while first < len(views):
        count = os.preadv(fd, views[first : first + IOV_MAX], offset + total)
        if not count:
            break
        total += count
        first = _skip(views, first, count)
    return total


def _skip(views: list[memoryview], first: int, count: int) -> int:
    """Cuts `count` transferred bytes off the views. Returns the number of the first that still has some."""
    while count:
        size = views[first].nbytes
        if count < size:
            views[first] = views[first][count:]
            return first
        count -= size
        first += 1
    return first


def _entries(root: str, *parts: str) -> Iterator[os.DirEntry[str]]:
    """Yields the entries of one folder; none if it is gone, or is no folder."""
    with suppress(FileNotFoundError, NotADirectoryError):
        fd = _open_folder(root, *parts)
        try:
            with os.scandir(fd) as entries:
                yield from entries
        finally:
            os.close(fd)


def _folders(root: str, parts: tuple[str, ...], pattern: re.Pattern[str], prefix: str) -> list[str]:
    """Returns the names of the folders in `root`/`parts` that may hold payloads of that prefix."""

    def fits(entry: os.DirEntry[str]) -> bool:
        path = "/".join((*parts, entry.name, ""))
        within = path.startswith(prefix) or prefix.startswith(path)
        return within and pattern.fullmatch(entry.name) is not None and entry.is_dir(follow_symlinks=False)

    return [entry.name for entry in _entries(root, *parts) if fits(entry)]


def _payloads(root: str, namespace: str, fan: str, prefix: str) -> list[Listed]:
    """Returns the payloads in one folder, which is one 256th of a namespace, all at once."""
    found = []
    for entry in _entries(root, namespace, fan):
        name = f"{namespace}/{fan}/{entry.name}"
        if name.startswith(prefix) and parse_payload_name(name):
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(status.st_mode):
                    found.append(Listed(name, status.st_size, status.st_mtime))
    return found
