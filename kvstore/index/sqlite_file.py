"""One SQLite database: its schema, its connections and its errors.

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
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import ClassVar

from kvstore.errors import (
    CapacityExceeded,
    Closed,
    ConfigError,
    DeadlineExceeded,
    KVStoreError,
    PermissionDenied,
    TransientError,
)

#: "kvsi": tells an index from any other SQLite file, and `file` from both.
APPLICATION_ID = 0x6B767369

# Entries name segments by a number that is never used again (AUTOINCREMENT), so that a dangling entry
# can't come to name a later segment. `segments_by_use` is the order of eviction.
_SCHEMA_1 = """
CREATE TABLE namespaces (
    key INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, json TEXT NOT NULL, nbytes INTEGER NOT NULL DEFAULT 0,
    segments INTEGER NOT NULL DEFAULT 0, blocks INTEGER NOT NULL DEFAULT 0, swept BLOB NOT NULL DEFAULT x'');
CREATE TABLE segments (
    key INTEGER PRIMARY KEY AUTOINCREMENT, namespace INTEGER NOT NULL, id BLOB NOT NULL,
    checksum BLOB NOT NULL, record BLOB NOT NULL, nbytes INTEGER NOT NULL, slots INTEGER NOT NULL,
    ranks INTEGER NOT NULL, used INTEGER NOT NULL, depth INTEGER NOT NULL, UNIQUE (namespace, id));
CREATE INDEX segments_by_use ON segments (namespace, used, depth DESC, id);
CREATE TABLE entries (
    namespace INTEGER NOT NULL, digest BLOB NOT NULL, segment INTEGER NOT NULL, slot INTEGER NOT NULL,
    PRIMARY KEY (namespace, digest)) WITHOUT ROWID;
CREATE TABLE trash (
    namespace INTEGER NOT NULL, id BLOB NOT NULL, ranks INTEGER NOT NULL, due INTEGER NOT NULL,
    PRIMARY KEY (namespace, id)) WITHOUT ROWID;
CREATE INDEX trash_by_time ON trash (namespace, due);
CREATE TABLE parts (
    namespace INTEGER NOT NULL, id BLOB NOT NULL, rank INTEGER NOT NULL, agreement BLOB NOT NULL,
    part BLOB NOT NULL, nbytes INTEGER NOT NULL, ranks INTEGER NOT NULL, expires REAL NOT NULL,
    PRIMARY KEY (namespace, id, rank)) WITHOUT ROWID;
CREATE INDEX parts_by_time ON parts (expires);
CREATE TABLE claims (
    namespace INTEGER NOT NULL, digest BLOB NOT NULL, segment BLOB NOT NULL, expires REAL NOT NULL,
    PRIMARY KEY (namespace, digest)) WITHOUT ROWID;
CREATE INDEX claims_by_time ON claims (expires);
"""

# The sketch of uses (kvstore.index.sketch), a row per line that has bits. Two windows take turns in the
# same rows: a line whose `sketch` is not the one asked for is empty, and is overwritten.
_SCHEMA_2 = """
CREATE TABLE uses (
    namespace INTEGER NOT NULL, parity INTEGER NOT NULL, line INTEGER NOT NULL, sketch TEXT NOT NULL,
    bits BLOB NOT NULL, PRIMARY KEY (namespace, parity, line)) WITHOUT ROWID;
"""

#: What each version added to the one before. A file of an older release is brought up to date by the
#: first that opens it; releases older than a file refuse it.
SCHEMAS = (_SCHEMA_1, _SCHEMA_2)
#: Raised with every change of the schema (golden test: tests/index/test_sqlite.py).
SCHEMA_VERSION = len(SCHEMAS)

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
            with _begun(connection, "BEGIN"):
                version = _version(connection, self.where)
            if version != SCHEMA_VERSION:
                _set_wal(connection, self._timeout_s)
                _make_schema(connection, self.where)
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
        _make_schema(self._connection, self.where)

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


def _make_schema(connection: sqlite3.Connection, where: str) -> None:
    with _begun(connection, "BEGIN IMMEDIATE"):
        # None are missing if another process was faster.
        for schema in SCHEMAS[_version(connection, where) :]:
            for statement in schema.strip().split(";\n"):
                connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


@contextmanager
def _begun(connection: sqlite3.Connection, begin: str) -> Iterator[None]:
    connection.execute(begin)
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _version(connection: sqlite3.Connection, where: str) -> int:
    """The schema's version, 0 for an empty database. Raises ConfigError for any other database."""
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    owner = int(connection.execute("PRAGMA application_id").fetchone()[0])
    tables = int(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
    if owner != APPLICATION_ID and (owner or version or tables):
        raise ConfigError(f"sqlite {where}: this is another program's database; name another file")
    if version > SCHEMA_VERSION:
        raise ConfigError(
            f"sqlite {where}: made by a newer kvstore (schema {version}, this one knows {SCHEMA_VERSION}); "
            "upgrade this one, or delete the file: the cache refills"
        )
    return version
