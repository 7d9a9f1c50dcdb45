"""The node-local staging folder: verified encoder outputs, between the store and the workers.

It is a folder and not memory, because the scheduler fetches items and other processes of this node, the
workers, load them. In the page cache it is memory all the same. One owner (the scheduler's half) writes and
evicts, so its accounting needs no shared state. Each engine has a folder of its own and holds a lock in it
for life: a free lock shows that a dead engine has left the folder, whatever container it ran in. The next
engine of this user then removes the folder. Any user may put anything into a folder for temporary files. So
the engine looks only into real folders that belong to this user and are closed to all others, and follows no
link.

A file's name is a digest of an identifier and a segment, never the identifier; its content never changes.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import threading
import time
from collections import OrderedDict
from pathlib import Path

from kvstore.errors import CapacityExceeded, ConfigError, TransientError
from kvstore.files import open_file

_PREFIX = "kvstore-ec-"
_LOCK = ".lock"
#: Age up to which a folder without a lock may be about to get one, in seconds.
_YOUNG_S = 60.0


class StagingFolder:
    """A bounded folder: the least recently used items go first, pinned ones never. Safe for threads."""

    def __init__(self, parent: str | None, capacity_bytes: int) -> None:
        """Make a folder in `parent`, or the system's for temporary files. Raises ConfigError if it can't."""
        base = Path(parent or tempfile.gettempdir())
        try:
            base.mkdir(parents=True, exist_ok=True)
            self._root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            self._held = _lock(self._root)
        except OSError as exc:
            raise ConfigError(
                f"kvstore: ec.staging_dir {base}: {exc.strerror}; name a writable folder"
            ) from exc
        _remove_stale(base)
        self._capacity = capacity_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()
        self._pins: dict[str, int] = {}
        self._used = 0

    @property
    def used_bytes(self) -> int:
        """Returns how many bytes are in the folder now."""
        return self._used

    def put(self, name: str, data: memoryview) -> str:
        """Write an item, pinned once, and return its path; if it is there already, only pin it.

        Raises CapacityExceeded, TransientError.
        """
        path = self._root / name
        with self._lock:
            if self._keep(name):
                return str(path)
            self._make_room(data.nbytes)
            self._used += data.nbytes
            self._sizes[name] = data.nbytes
            self._pins[name] = 1
        try:
            with os.fdopen(open_file(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), "wb") as file:
                file.write(data)
        except OSError as exc:
            with self._lock:
                self._forget(name)
            raise TransientError(f"staging folder: {exc.strerror}") from exc
        return str(path)

    def unpin(self, name: str) -> None:
        """Take back one pin: without any, the item may go when room is needed."""
        with self._lock:
            if self._pins.get(name, 0) <= 1:
                self._pins.pop(name, None)
            else:
                self._pins[name] -= 1

    def pin(self, name: str) -> bool:
        """Keep the item until it is unpinned; False if it is gone, evicted here or removed by somebody."""
        with self._lock:
            return self._keep(name)

    def open(self, name: str) -> int | None:
        """Opens a pinned item's file. Returns its descriptor, for the caller to close, or None if that
        fails."""
        try:
            return open_file(self._root / name, os.O_RDONLY)
        except OSError:
            return None

    def holds(self, name: str) -> bool:
        """Returns whether the item was put here and not removed since by this process."""
        with self._lock:
            return name in self._sizes

    def clear(self) -> None:
        """Remove all items but the pinned ones."""
        with self._lock:
            for name in [name for name in self._sizes if name not in self._pins]:
                self._forget(name)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._root, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._held)

    def _keep(self, name: str) -> bool:
        if name not in self._sizes:
            return False
        try:
            os.utime(self._root / name)  # it is there, and now too young for a cleaner that removes old files
        except OSError:
            self._forget(name)
            return False
        self._pins[name] = self._pins.get(name, 0) + 1
        self._sizes.move_to_end(name)
        return True

    def _make_room(self, nbytes: int) -> None:
        free = [name for name in self._sizes if name not in self._pins]
        excess = self._used + nbytes - self._capacity
        if excess > sum(self._sizes[name] for name in free):
            raise CapacityExceeded(f"staging folder: {nbytes} bytes more don't fit into {self._capacity}")
        for name in free:
            if self._used + nbytes <= self._capacity:
                return
            self._forget(name)

    def _forget(self, name: str) -> None:
        self._used -= self._sizes.pop(name, 0)
        self._pins.pop(name, None)
        with contextlib.suppress(OSError):
            (self._root / name).unlink()


def _lock(folder: Path, flags: int = os.O_RDWR | os.O_CREAT, *, dir_fd: int | None = None) -> int:
    """Returns an open file of the folder with this process's lock on it. Raises BlockingIOError if another
    holds it."""
    held = open_file(folder / _LOCK if dir_fd is None else _LOCK, flags, dir_fd=dir_fd)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise
    return held


def _remove_stale(base: Path) -> None:
    """Removes the folders of this user's dead engines."""
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                _remove_if_stale(folder, fd)
            finally:
                os.close(fd)


def _remove_if_stale(folder: Path, fd: int) -> None:
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        return
    try:
        held = _lock(folder, os.O_RDWR, dir_fd=fd)
    except FileNotFoundError:
        # Its engine died before it took the lock, or is about to.
        if time.time() - found.st_mtime >= _YOUNG_S:
            shutil.rmtree(folder, ignore_errors=True)
        return
    shutil.rmtree(folder, ignore_errors=True)
    os.close(held)
