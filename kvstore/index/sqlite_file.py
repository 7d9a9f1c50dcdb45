"""One SQLite database: its connections and its errors. The schema stands in sqlite_schema.

    SqliteFile     a file, shared by every process and thread of a machine, in WAL mode
    SqliteMemory   a database inside this process, for tests

Both lend a connection to one thread at a time, inside a transaction: `reading()` sees one snapshot,
`writing()` is alone among writers. What a failure becomes:

    the file is busy for longer than the timeout            DeadlineExceeded
    no space                                                CapacityExceeded
    the file or its folder can't be opened or written       PermissionDenied
    the file is damaged, or anything else                   TransientError
    the file was made by a newer release                    ConfigError

A damaged file is transient because the index is a hint: deleting the file (with its -wal and -shm) is
a repair, also under running processes. They notice that their file is gone and go on with a new one.
"""

from __future__ import annotations

import atexit
import os
import sqlite3
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

from kvstore.errors import (
    CapacityExceeded,
    Closed,
    DeadlineExceeded,
    KVStoreError,
    PermissionDenied,
    TransientError,
)
from kvstore.index.sqlite_schema import SCHEMA_VERSION, begun, make_schema, version_of

_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_INTERRUPT}
_DENIED = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_CANTOPEN}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}

#: Connections made before a fork. SQLite forbids their use in the child, and even closing them there
#: would drop the locks that the child's own connections hold on the file; so they are kept for good.
_INHERITED: list[_Connection] = []
_FILES: weakref.WeakSet[SqliteFile] = weakref.WeakSet()


class _Connection(sqlite3.Connection):
    """Knows which file it has open, by device and inode."""

    file: tuple[int, int] | None = None


class SqliteDatabase(ABC):
    """Transactions on connections that no two threads use at once."""

    @property
    @abstractmethod
    def where(self) -> str:
        """The file or the name, for messages."""

    @abstractmethod
    def close(self) -> None:
        """Close every connection; one that is in use closes when its transaction ends. Idempotent."""

    @abstractmethod
    def _borrow(self) -> _Connection: ...

    @abstractmethod
    def _give_back(self, connection: _Connection, *, sound: bool) -> None: ...

    @contextmanager
    def reading(self, verb: str) -> Iterator[sqlite3.Connection]:
        """A connection whose statements all see the database of one moment."""
        with self._transaction(verb, "BEGIN") as connection:
            yield connection

    @contextmanager
    def writing(self, verb: str) -> Iterator[sqlite3.Connection]:
        """A connection whose statements take effect together, or not at all on an exception."""
        with self._transaction(verb, "BEGIN IMMEDIATE") as connection:
            yield connection

    @contextmanager
    def _transaction(self, verb: str, begin: str) -> Iterator[sqlite3.Connection]:
        sound = False
        try:
            connection = self._borrow()
            try:
                connection.execute(begin)
                yield connection
                connection.execute("COMMIT")
                sound = True
            except sqlite3.Error as exc:
                # A full disk or a lost lock has ended the transaction; other errors have not.
                sound = _code(exc) not in _DAMAGED and _rolled_back(connection)
                raise
            except BaseException:
                sound = _rolled_back(connection)
                raise
            finally:
                self._give_back(connection, sound=sound)
        except sqlite3.Error as exc:
            raise classified(exc, self.where, verb) from exc


class SqliteFile(SqliteDatabase):
    """A database file, made on first use together with its folder."""

    def __init__(self, path: str, busy_timeout_s: float) -> None:
        self._path = Path(path)
        self._timeout_s = busy_timeout_s
        # The lock guards the fields below it.
        self._lock = threading.Lock()
        self._idle: list[_Connection] = []
        self._closed = False
        _FILES.add(self)

    @property
    def where(self) -> str:
        return str(self._path)

    def _borrow(self) -> _Connection:
        file = self._file_now()
        with self._lock:
            if self._closed:
                raise Closed(f"sqlite {self._path}: closed")
            while self._idle:
                connection = self._idle.pop()
                if connection.file == file:
                    return connection
                connection.close()
        return self._open()

    def _give_back(self, connection: _Connection, *, sound: bool) -> None:
        with self._lock:
            if sound and not self._closed:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().close()

    def _forked(self) -> None:
        """In the child of a fork: nothing of the parent's is used, not even its lock."""
        _INHERITED.extend(self._idle)
        self._idle, self._lock = [], threading.Lock()

    def _file_now(self) -> tuple[int, int] | None:
        """Which file the path names, to notice that it was deleted or replaced."""
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_dev, stat.st_ino

    def _open(self) -> _Connection:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise PermissionDenied(f"sqlite {self._path}: can't make its folder: {exc.strerror}") from exc
        connection = _connect(self.where, self._timeout_s)
        try:
            with begun(connection, "BEGIN"):
                version = version_of(connection, self.where)
            if version != SCHEMA_VERSION:
                _set_wal(connection, self._timeout_s)
                make_schema(connection, self.where)
            # Safe against a killed process; after a power cut the newest commits may be gone.
            connection.execute("PRAGMA synchronous = NORMAL")
        except BaseException:
            connection.close()
            raise
        connection.file = self._file_now()
        return connection


def _after_fork() -> None:
    for file in _FILES:
        file._forked()


os.register_at_fork(after_in_child=_after_fork)


class SqliteMemory(SqliteDatabase):
    """A database of this process, by name, that lasts as long as the process. One transaction at a time."""

    #: Every named database; guarded, like its making, by the lock.
    _named: ClassVar[dict[str, SqliteMemory]] = {}
    _naming: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: str, turn_timeout_s: float) -> None:
        self._name = name
        self._turn_timeout_s = turn_timeout_s
        self._turn = threading.Lock()
        self._connection = _connect(":memory:", 0.0)
        atexit.register(self._connection.close)
        make_schema(self._connection, self.where)

    @classmethod
    def named(cls, name: str, turn_timeout_s: float = 10.0) -> SqliteMemory:
        """The one database of that name. Not for use across a fork."""
        with cls._naming:
            if name not in cls._named:
                cls._named[name] = cls(name, turn_timeout_s)
            return cls._named[name]

    @property
    def where(self) -> str:
        return f"memory://{self._name}"

    def close(self) -> None:
        """Does nothing: others may hold the same database."""

    def _borrow(self) -> _Connection:
        if not self._turn.acquire(timeout=self._turn_timeout_s):
            raise DeadlineExceeded(f"sqlite {self.where}: busy")
        return self._connection

    def _give_back(self, connection: _Connection, *, sound: bool) -> None:
        self._turn.release()


def classified(exc: sqlite3.Error, where: str, verb: str) -> KVStoreError:
    """The error of our tree for one of SQLite's."""
    code = _code(exc)
    head = f"sqlite {where}: {verb}: {exc}"
    if code in _BUSY:
        return DeadlineExceeded(head)
    if code == sqlite3.SQLITE_FULL:
        return CapacityExceeded(head)
    if code in _DENIED:
        return PermissionDenied(head)
    if code in _DAMAGED:
        return TransientError(
            f"{head}; the index is only a hint: delete it with its -wal and -shm, and the cache refills"
        )
    return TransientError(head)


def _code(exc: sqlite3.Error) -> int:
    """SQLite's primary result code; 0 if the error is Python's own."""
    return int(getattr(exc, "sqlite_errorcode", 0)) & 0xFF


def _rolled_back(connection: sqlite3.Connection) -> bool:
    """Leave the transaction, whatever state it is in; False if the connection is not to be used again."""
    try:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
    except sqlite3.Error:
        return False
    return True


def _connect(path: str, timeout_s: float) -> _Connection:
    # Autocommit: transactions are begun and ended by the statements above and by nothing else.
    return sqlite3.connect(
        path, timeout=timeout_s, isolation_level=None, check_same_thread=False, factory=_Connection
    )


def _set_wal(connection: sqlite3.Connection, timeout_s: float) -> None:
    """Switch to WAL once. The switch needs the file for itself and doesn't wait for it, so wait here."""
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
