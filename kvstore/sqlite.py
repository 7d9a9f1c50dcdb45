"""SQLite files that threads and processes of a machine share: their connections, transactions and errors.

    SqliteDatabase   lends a connection to one thread at a time, inside a transaction: `reading()` sees one
                     snapshot, `writing()` is alone among writers
    SqliteFile       a file in WAL mode, with as many connections as threads use at once

What is in the file is its owner's business: a subclass prepares each new connection. Failures become errors
of kvstore.errors:

    the file is busy for longer than the timeout            DeadlineExceeded
    no space                                                CapacityExceeded
    the file or its folder can't be opened or written       PermissionDenied
    the file is damaged, or anything else                   TransientError

Whatever the umask, the file is its owner's alone, or its group's (kvstore.files); SQLite gives its -wal and
-shm the same. What strangers have put in its place is not opened.

Deleting a file (with its -wal and -shm) is allowed under running processes. They notice that their file is
gone and go on with a new one.
"""

from __future__ import annotations

import errno
import os
import sqlite3
import stat
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar, Protocol

from kvstore.errors import (
    CapacityExceeded,
    DeadlineExceeded,
    KVStoreError,
    PermissionDenied,
    StoreClosed,
    TransientError,
)
from kvstore.files import OWNER, Access, make_folder, open_file

#: Held while a file is made: closing a descriptor of a file drops the locks of all connections that this
#: process has to it, so none may be opened meanwhile.
_MAKING = threading.Lock()

_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_INTERRUPT}
_DENIED = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_CANTOPEN}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}

#: Connections made before a fork. SQLite forbids their use in the child, and even closing them there
#: would drop the locks that the child's own connections hold on the file; so they are kept for good.
_INHERITED: list[Connection] = []
_FILES: weakref.WeakSet[SqliteFile] = weakref.WeakSet()


class Closing(Protocol):
    def close(self) -> None: ...


class Connection(sqlite3.Connection):
    """A connection that knows which file it has open, by device and inode."""

    file: tuple[int, int] | None = None
    #: What its owner keeps with it; closed with it.
    attached: Closing | None = None

    def close(self) -> None:
        attached, self.attached = self.attached, None
        if attached is not None:
            attached.close()
        super().close()


class SqliteDatabase(ABC):
    """Transactions on connections that no two threads use at once."""

    #: The name of this kind of database in messages, before its place.
    kind: ClassVar[str] = "sqlite"

    @property
    @abstractmethod
    def where(self) -> str:
        """The file or the name, for messages."""

    @abstractmethod
    def close(self) -> None:
        """Closes every connection; one that is in use closes when its transaction ends. Idempotent."""

    @abstractmethod
    def _borrow(self) -> Connection: ...

    @abstractmethod
    def _give_back(self, connection: Connection, *, sound: bool) -> None: ...

    @contextmanager
    def reading(self, verb: str) -> Iterator[Connection]:
        """Lends a connection whose statements all see the database of one moment."""
        with self._transaction(verb, "BEGIN") as connection:
            yield connection

    @contextmanager
    def writing(self, verb: str) -> Iterator[Connection]:
        """Lends a connection whose statements take effect together, or not at all on an exception."""
        with self._transaction(verb, "BEGIN IMMEDIATE") as connection:
            yield connection

    @contextmanager
    def _transaction(self, verb: str, begin: str) -> Iterator[Connection]:
        connection: Connection | None = None
        sound = False
        try:
            connection = self._borrow()
            try:
                connection.execute(begin)
                yield connection
                connection.execute("COMMIT")
                sound = True
            except BaseException as exc:
                # A full disk or a lost lock has ended the transaction; other errors have not.
                sound = not is_damage(exc) and _rolled_back(connection)
                raise
            finally:
                self._give_back(connection, sound=sound)
        except sqlite3.Error as exc:
            raise self._failure(exc, verb, connection) from exc

    def _failure(self, exc: sqlite3.Error, verb: str, connection: Connection | None) -> KVStoreError:
        """Returns the error that a caller gets. `connection` was given back already; None: there was none."""
        return classified(exc, f"{self.kind} {self.where}: {verb}: {exc}")


class SqliteFile(SqliteDatabase):
    """A database file, made on first use together with its folder."""

    def __init__(self, path: str, timeout_s: float, access: Access = OWNER) -> None:
        self._path = Path(path)
        self._timeout_s = timeout_s
        self._access = access
        # The lock guards the fields below it.
        self._lock = threading.Lock()
        self._idle: list[Connection] = []
        self._closed = False
        _FILES.add(self)

    @property
    def where(self) -> str:
        return str(self._path)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().close()

    @abstractmethod
    def _prepare(self, connection: sqlite3.Connection) -> None:
        """Brings a new connection into shape, and a new file too."""

    def _borrow(self) -> Connection:
        file = self._file_now()
        with self._lock:
            if self._closed:
                raise StoreClosed(f"{self.kind} {self._path}: closed")
            while self._idle:
                connection = self._idle.pop()
                if connection.file == file is not None:
                    return connection
                connection.close()
        return self._open()

    def _give_back(self, connection: Connection, *, sound: bool) -> None:
        with self._lock:
            if sound and not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def _open(self) -> Connection:
        try:
            make_folder(self._path.parent, self._access)
        except OSError as exc:
            message = f"{self.kind} {self._path}: can't make its folder: {exc.strerror}"
            raise PermissionDenied(message) from exc
        try:
            self._make()
        except OSError as exc:
            raise PermissionDenied(f"{self.kind} {self._path}: {exc.strerror}") from exc
        connection = connect(self.where, self._timeout_s)
        try:
            self._prepare(connection)
        except BaseException:
            connection.close()
            raise
        connection.file = self._file_now()
        return connection

    def _make(self) -> None:
        """Makes the file if there is none, with its permissions; takes from one of this user what others had.

        Raises OSError if a stranger may have put there what there is.
        """
        exposed = self._path.parent.stat().st_mode & stat.S_IWOTH
        with _MAKING:
            for path in (self._path, *(Path(f"{self._path}{end}") for end in ("-wal", "-shm", "-journal"))):
                try:
                    found = path.lstat()
                except FileNotFoundError:
                    continue
                trusted = found.st_uid in (0, os.geteuid())
                kind = stat.S_IFMT(found.st_mode)
                if kind not in (stat.S_IFREG, stat.S_IFLNK):
                    raise OSError(errno.ELOOP, f"{path.name} is no regular file")
                if not trusted and (exposed or kind == stat.S_IFLNK):
                    raise PermissionError(errno.EPERM, f"{path.name} was put there by user {found.st_uid}")
                over = found.st_mode & 0o777 & ~self._access.file
                if over and kind == stat.S_IFREG and found.st_uid == os.geteuid():
                    with suppress(OSError):  # on a read-only file system it stays as it is
                        path.chmod(stat.S_IMODE(found.st_mode) & ~over)
            if not os.path.lexists(self._path):
                with suppress(FileExistsError):
                    os.close(open_file(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL, self._access))

    def _file_now(self) -> tuple[int, int] | None:
        """Returns which file the path names, to notice that it was deleted or replaced."""
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_dev, stat.st_ino

    def _forked(self) -> None:
        """Forgets the parent in the child of a fork: nothing of it is used, not even its lock."""
        _INHERITED.extend(self._idle)
        self._idle, self._lock = [], threading.Lock()


def _after_fork() -> None:
    global _MAKING
    _MAKING = threading.Lock()
    for file in _FILES:
        file._forked()


os.register_at_fork(after_in_child=_after_fork)


def connect(path: str, timeout_s: float) -> Connection:
    """Opens a connection in autocommit: the statements here begin and end transactions, nothing else does."""
    return sqlite3.connect(
        path, timeout=timeout_s, isolation_level=None, check_same_thread=False, factory=Connection
    )


@contextmanager
def begun(connection: sqlite3.Connection, begin: str) -> Iterator[None]:
    """Runs a transaction that ends with the block: committed, or undone on an exception."""
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def set_wal(connection: sqlite3.Connection, timeout_s: float) -> None:
    """Switches to WAL once. The switch needs the file for itself and doesn't wait for it, so wait here."""
    until = time.monotonic() + timeout_s
    while True:
        try:
            if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
                connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as exc:
            if _code(exc) not in _BUSY or time.monotonic() > until:
                raise
            time.sleep(0.005)


def stamps(connection: sqlite3.Connection) -> tuple[int, int, bool]:
    """Returns whose file it is (application_id), its version, and whether it is as good as new."""
    owner, version, tables = (
        int(connection.execute(query).fetchone()[0])
        for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_master")
    )
    return owner, version, not (owner or version or tables)


def classified(exc: sqlite3.Error, message: str) -> KVStoreError:
    """Returns the error of kvstore.errors for one of SQLite's."""
    code = _code(exc)
    if code in _BUSY:
        return DeadlineExceeded(message)
    if is_full(exc):
        return CapacityExceeded(message)
    return PermissionDenied(message) if code in _DENIED else TransientError(message)


def is_damage(exc: BaseException) -> bool:
    """Tells whether the file holds what SQLite can't have written."""
    return _code(exc) in _DAMAGED


def is_busy(exc: BaseException) -> bool:
    """Tells whether others hold what was asked for."""
    return _code(exc) in _BUSY


def is_full(exc: BaseException) -> bool:
    """Tells whether there was no space."""
    return _code(exc) == sqlite3.SQLITE_FULL


def _code(exc: BaseException) -> int:
    """Returns SQLite's primary result code; 0 if the error is Python's own."""
    return int(getattr(exc, "sqlite_errorcode", 0)) & 0xFF


def _rolled_back(connection: sqlite3.Connection) -> bool:
    """Leaves the transaction, whatever its state; returns False if the connection must not be used again."""
    try:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    except sqlite3.Error:
        return False
    return True
