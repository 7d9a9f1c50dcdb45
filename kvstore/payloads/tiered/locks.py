"""RangeLocks: advisory locks on numbers between the processes of one machine, in one empty file.

Each number is one byte of the file's address space, locked with an open file description lock (fcntl(2),
F_OFD_SETLK). The kernel drops a lock with its process, however that ends. Compared with one file and flock
per name there is nothing to create, nothing to clean up, and no race between one process's unlink and
another's lock. A lock and its release cost about 2 us.

A lock belongs to one RangeLocks object: threads of one process that share the object exclude each other,
and so do two objects in one process. The child of a fork holds nothing.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import struct
import threading
from pathlib import Path

from kvstore.errors import PermissionDenied, TransientError
from kvstore.files import OWNER, Access, make_folder, open_file

#: struct flock: l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = struct.Struct("hhqqi4x")
_CONFLICT = frozenset({errno.EAGAIN, errno.EACCES})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


#: Ranges of numbers in the tier's one file of locks. The first three are added to the 60 bits of a name.
FETCHING = 0 << 60  # reads the payload from the shared store
FILLING = 1 << 60  # has it, and is about to write it to the folder
UPLOADING = 2 << 60
#: Added to the 60 random bits of a ledger's owner, which holds the lock as long as it lives.
OWNERS = 3 << 60
OPENING = 4 << 60  # a connection to the ledger is being opened, or the ledger replaced
SCANNING = OPENING + 1  # the folder is being compared with the ledger


def number_of(name: str) -> int:
    """Returns 60 bits of a name's hash: two names with the same number merely wait for each other."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) >> 4


class RangeLocks:
    """Locks in the file `path`, which the first lock makes together with its folder. Thread-safe.

    If the file is deleted or replaced, the next call takes the held locks in the new one and goes on with it.
    Every method but `release` and `close` raises PermissionDenied or TransientError if the file can't be
    opened or locked.
    """

    def __init__(self, path: str, access: Access = OWNER) -> None:
        self._path = path
        self._access = access
        self._pid = os.getpid()
        # The mutex guards the fields below it.
        self._mutex = threading.Lock()
        self._file: _File | None = None
        self._held: set[int] = set()

    def acquire(self, number: int) -> bool:
        """Takes the lock if no object has it, this one included. Returns whether it did. Never waits."""
        self._after_fork()
        with self._mutex:
            if number in self._held:
                return False
            if not self._lock(self._opened(), number):
                return False
            self._held.add(number)
            return True

    def release(self, number: int) -> None:
        """Gives the lock back. Does nothing if it isn't held."""
        self._after_fork()
        with self._mutex:
            if number in self._held:
                self._held.discard(number)
                if self._file is not None:
                    # A failure here (the file system has gone away) has dropped the lock as well.
                    _unlock(self._file.fd, number)

    def taken(self, first: int, count: int = 1) -> bool:
        """Returns whether another object, in any process, has one of `count` numbers from `first` on."""
        self._after_fork()
        with self._mutex:
            request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, first, count, 0)
            try:
                answer = fcntl.fcntl(self._opened().fd, fcntl.F_OFD_GETLK, request)
            except OSError as exc:
                raise self._error(exc) from exc
            return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)

    def close(self) -> None:
        """Drops every lock. Idempotent; a later call opens the file anew."""
        self._after_fork()
        with self._mutex:
            self._held.clear()
            if self._file is not None:
                self._file.close()
                self._file = None

    def _opened(self) -> _File:
        try:
            if self._file is not None:
                if self._file.is_at(self._path):
                    return self._file
                self._file.close()
                self._file = None
            parent = Path(self._path).parent
            make_folder(parent.parent, self._access)
            make_folder(parent, self._access)
            self._file = _File(self._path, self._access)
        except OSError as exc:
            raise self._error(exc) from exc
        for number in self._held:
            self._lock(self._file, number)
        return self._file

    def _lock(self, file: _File, number: int) -> bool:
        try:
            fcntl.fcntl(file.fd, fcntl.F_OFD_SETLK, _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
        except OSError as exc:
            if exc.errno in _CONFLICT:
                return False
            raise self._error(exc) from exc
        return True

    def _error(self, exc: OSError) -> PermissionDenied | TransientError:
        text = f"lock file {self._path}: {exc.strerror or exc}"
        return PermissionDenied(text) if exc.errno in _DENIED else TransientError(text)

    def _after_fork(self) -> None:
        """In the child of a fork, lets go of the locks, which it shares with its parent and which stay the
        parent's."""
        if self._pid != os.getpid():
            self._pid = os.getpid()
            self._mutex = threading.Lock()
            self._held = set()
            # Closing doesn't unlock: the parent still has the file description open.
            self._file = None


class _File:
    """A descriptor that is closed together with this object."""

    def __init__(self, path: str, access: Access) -> None:
        self.fd = open_file(path, os.O_RDWR | os.O_CREAT, access)
        status = os.fstat(self.fd)
        self._identity = (status.st_dev, status.st_ino)

    def is_at(self, path: str) -> bool:
        try:
            status = Path(path).lstat()
        except FileNotFoundError:
            return False
        return (status.st_dev, status.st_ino) == self._identity

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        # If opening failed, there is no descriptor.
        if getattr(self, "fd", -1) >= 0:
            self.close()


def _unlock(fd: int, number: int) -> None:
    request = _FLOCK.pack(fcntl.F_UNLCK, os.SEEK_SET, number, 1, 0)
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, request)
    except OSError as exc:
        if exc.errno not in (errno.EBADF, errno.EIO, errno.ESTALE, errno.ENOLCK):
            raise
