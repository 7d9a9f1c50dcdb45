"""The node-local staging folder: verified encoder outputs, between the store and the workers.

A folder and not memory, because the scheduler fetches and the workers, other processes of this
node, load; in the page cache it is memory all the same. One owner (the scheduler's half) writes and
evicts, so its accounting needs no lock file. Each engine has a folder of its own, named for its
process; what a dead process left is removed when the next one starts.

Names are digests of identifiers, never identifiers.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import threading
from collections import OrderedDict
from pathlib import Path

from kvstore.errors import CapacityExceeded, ConfigError, TransientError

_PREFIX = "kvstore-ec-"


class StagingFolder:
    """Bounded; least recently used items go first, pinned ones never. Any thread."""

    def __init__(self, parent: str | None, capacity_bytes: int) -> None:
        base = Path(parent or tempfile.gettempdir())
        try:
            base.mkdir(parents=True, exist_ok=True)
            self._root = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
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
        """Write an item, pinned once, and return its path. Raises CapacityExceeded, TransientError.

        An item of that name is replaced in one piece: a worker may be about to read it.
        """
        with self._lock:
            self._make_room(data.nbytes - self._sizes.get(name, 0), keep=name)
            self._used += data.nbytes - self._sizes.get(name, 0)
            self._sizes[name] = data.nbytes
            self._sizes.move_to_end(name)
            self._pins[name] = self._pins.get(name, 0) + 1
        path = self._root / name
        fresh = path.with_name(f"{name}.{threading.get_ident()}")
        try:
            fresh.write_bytes(data)
            fresh.replace(path)
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
        """Keep the item until it is unpinned; False if it has gone already."""
        with self._lock:
            if name not in self._sizes:
                return False
            self._pins[name] = self._pins.get(name, 0) + 1
            self._sizes.move_to_end(name)
            return True

    def close(self) -> None:
        """Remove the folder."""
        shutil.rmtree(self._root, ignore_errors=True)

    def _make_room(self, nbytes: int, keep: str) -> None:
        free = [name for name in self._sizes if name not in self._pins and name != keep]
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


def _remove_stale(base: Path) -> None:
    for folder in base.glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).split("-")[0]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
