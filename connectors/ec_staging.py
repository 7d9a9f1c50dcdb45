"""The node-local staging folder: verified encoder outputs, between the store and the workers.

A folder and not memory, because the scheduler fetches and the workers, other processes of this
node, load; in the page cache it is memory all the same. One owner (the scheduler's half) writes and
evicts, so its accounting needs no shared state. Each engine has a folder of its own and holds a lock
in it for life: a folder whose lock is free was left by a dead engine, whatever container it ran in, and
is removed when the next one starts.

Names are digests of identifiers and segments, never identifiers; what has a name never changes.
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

_PREFIX = "kvstore-ec-"
_LOCK = ".lock"
#: A folder this young may be about to be locked.
_YOUNG_S = 60.0


class StagingFolder:
    """Bounded; least recently used items go first, pinned ones never. Any thread."""

    def __init__(self, parent: str | None, capacity_bytes: int) -> None:
        base = Path(parent or tempfile.gettempdir())
        try:
            base.mkdir(parents=True, exist_ok=True)
            self._root = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
            self._held = _lock(self._root / _LOCK)
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
        """Bytes in the folder now."""
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
            path.write_bytes(data)
        except OSError as exc:
            with self._lock:
                self._forget(name)
            raise TransientError(f"staging folder: {exc.strerror}") from exc
        return str(path)

    def unpin(self, name: str) -> None:
        """The item may go when room is needed."""
        with self._lock:
            if self._pins.get(name, 0) <= 1:
                self._pins.pop(name, None)
            else:
                self._pins[name] -= 1

    def pin(self, name: str) -> bool:
        """Keep the item until it is unpinned; False if it has gone, by itself or by somebody's hand."""
        with self._lock:
            return self._keep(name)

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._root, ignore_errors=True)
        with contextlib.suppress(OSError):
            os.close(self._held)

    def _keep(self, name: str) -> bool:
        if name not in self._sizes:
            return False
        try:
            os.utime(self._root / name)  # there, and of interest to whoever tidies by age
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


def _lock(path: Path) -> int:
    """An open file with this process's lock on it. Raises BlockingIOError if another holds it."""
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(held)
        raise
    return held


def _remove_stale(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        try:
            if time.time() - folder.stat().st_mtime < _YOUNG_S and not (folder / _LOCK).exists():
                continue
            held = _lock(folder / _LOCK)
        except OSError:
            continue
        shutil.rmtree(folder, ignore_errors=True)
        os.close(held)
