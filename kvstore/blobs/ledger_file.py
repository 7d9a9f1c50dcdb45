"""LedgerFile: the SQLite file of the tier's ledger: opened, shared by processes, replaced when damaged.

One connection per object and one transaction at a time. No call waits longer than about `timeout_s` for
another process or thread. What a failure becomes:

    another process is in a transaction for longer        DeadlineExceeded
    no space                                              CapacityExceeded
    the file or its folder can't be opened or written     PermissionDenied
    damaged, made by a newer release, anything else       TransientError
    several TransientErrors in a row                      BreakerOpen, at once, for a while

A damaged file is deleted by the first process that meets the damage, and the next call makes a new one.
Why under a lock, which every opening of a connection takes as well: a connection to the old file must not
find the new one's -wal and -shm, or the other way round. Connections that are open already keep their own
(deleted) ones, see that the path names another file now, and go over to it with their next transaction.

Why synchronous = OFF: on a disk that takes gigabytes of payload, a sync of a few pages can take seconds. A
killed process damages nothing without it; a power cut can, so a ledger from before the last boot is made
anew. All that is lost with it is the order of use: files are adopted in the order of their times.
"""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from kvstore.blobs.rangelocks import OPENING, RangeLocks
from kvstore.breaker import Breaker
from kvstore.errors import (
    CapacityExceeded,
    Closed,
    DeadlineExceeded,
    KVStoreError,
    PermissionDenied,
    TransientError,
)
from schemas.settings import BreakerSettings

log = logging.getLogger(__name__)

#: Raised with every change of the schema.
SCHEMA_VERSION = 1
#: "kvst": tells a ledger from any other SQLite file.
APPLICATION_ID = 0x6B767374

# `entries` are payloads in the folder, `reservations` are payloads that are being written. `totals` is kept
# by the triggers, within each transaction, so that a reservation costs the same in a folder of millions.
# `used` counts uses, not seconds (no clock can step back); adopted files come before all others.
SCHEMA = (
    """CREATE TABLE entries (
    name TEXT PRIMARY KEY, nbytes INTEGER NOT NULL, used INTEGER NOT NULL, dirty INTEGER NOT NULL
    ) WITHOUT ROWID""",
    "CREATE INDEX entries_by_use ON entries (dirty, used, nbytes)",
    """CREATE TABLE reservations (
    token INTEGER PRIMARY KEY, name TEXT NOT NULL, nbytes INTEGER NOT NULL, dirty INTEGER NOT NULL,
    owner INTEGER NOT NULL, cancelled INTEGER NOT NULL DEFAULT 0)""",
    "CREATE INDEX reservations_by_name ON reservations (name)",
    """CREATE TABLE totals (
    nbytes INTEGER NOT NULL, payloads INTEGER NOT NULL, dirty_bytes INTEGER NOT NULL,
    dirty_payloads INTEGER NOT NULL, uses INTEGER NOT NULL, scanned_s REAL NOT NULL, boot TEXT NOT NULL)""",
    """CREATE TRIGGER entry_added AFTER INSERT ON entries BEGIN UPDATE totals SET
    nbytes = nbytes + new.nbytes, payloads = payloads + 1,
    dirty_bytes = dirty_bytes + new.dirty * new.nbytes, dirty_payloads = dirty_payloads + new.dirty; END""",
    """CREATE TRIGGER entry_removed AFTER DELETE ON entries BEGIN UPDATE totals SET
    nbytes = nbytes - old.nbytes, payloads = payloads - 1,
    dirty_bytes = dirty_bytes - old.dirty * old.nbytes, dirty_payloads = dirty_payloads - old.dirty; END""",
    """CREATE TRIGGER entry_changed AFTER UPDATE OF nbytes, dirty ON entries BEGIN UPDATE totals SET
    nbytes = nbytes + new.nbytes - old.nbytes,
    dirty_bytes = dirty_bytes + new.dirty * new.nbytes - old.dirty * old.nbytes,
    dirty_payloads = dirty_payloads + new.dirty - old.dirty; END""",
    """CREATE TRIGGER reservation_added AFTER INSERT ON reservations BEGIN UPDATE totals SET
    nbytes = nbytes + new.nbytes, dirty_bytes = dirty_bytes + new.dirty * new.nbytes; END""",
    """CREATE TRIGGER reservation_removed AFTER DELETE ON reservations BEGIN UPDATE totals SET
    nbytes = nbytes - old.nbytes, dirty_bytes = dirty_bytes - old.dirty * old.nbytes; END""",
)

_BUSY = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED, sqlite3.SQLITE_INTERRUPT}
_DENIED = {sqlite3.SQLITE_READONLY, sqlite3.SQLITE_PERM, sqlite3.SQLITE_AUTH, sqlite3.SQLITE_CANTOPEN}
_DAMAGED = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}

#: Connections made before a fork. SQLite forbids their use in the child, and even closing them there would
#: drop the locks that the child's own connection holds on the file; so they are kept for good.
_INHERITED: list[sqlite3.Connection] = []

_Identity = tuple[int, int]


class _Foreign(sqlite3.DatabaseError):
    """Not a ledger, or one that can't be trusted."""


class LedgerFile:
    """The file `path`, made on first use together with its folder. Thread-safe.

    `opened` runs inside the first transaction of every connection, before anything else.
    """

    def __init__(
        self,
        path: str,
        timeout_s: float,
        locks: RangeLocks,
        opened: Callable[[sqlite3.Connection], None],
        breaker: BreakerSettings | None = None,
    ) -> None:
        self._path = path
        self._timeout_s = timeout_s
        self._locks = locks
        self._opened = opened
        self._breaker = Breaker("tier ledger", breaker or BreakerSettings())
        self._pid = os.getpid()
        # Held throughout a transaction; guards the fields below it.
        self._mutex = threading.Lock()
        self._connection: sqlite3.Connection | None = None
        self._identity: _Identity | None = None
        self._closed = False

    def is_absent(self) -> bool:
        """Whether the first transaction would make the file. Raises PermissionDenied."""
        try:
            return not self._closed and not Path(self._path).exists()
        except OSError as exc:
            raise PermissionDenied(f"tier ledger {self._path}: {exc.strerror}") from exc

    @contextmanager
    def reading(self, verb: str) -> Iterator[sqlite3.Connection]:
        """A connection whose statements all see the ledger of one moment."""
        with self._transaction(verb, "BEGIN") as connection:
            yield connection

    @contextmanager
    def writing(self, verb: str) -> Iterator[sqlite3.Connection]:
        """A connection whose statements take effect together, or not at all on an exception."""
        with self._transaction(verb, "BEGIN IMMEDIATE") as connection:
            yield connection

    def close(self) -> None:
        """Close the connection, after the transaction that uses it. Idempotent; later calls raise Closed."""
        self._after_fork()
        # Not for ever: a thread may be stuck in a system call on a dying disk.
        if self._mutex.acquire(timeout=2 * self._timeout_s):
            try:
                self._closed = True
                self._disconnect()
            finally:
                self._mutex.release()

    @contextmanager
    def _transaction(self, verb: str, begin: str) -> Iterator[sqlite3.Connection]:
        self._after_fork()
        if not self._mutex.acquire(timeout=self._timeout_s):
            raise DeadlineExceeded(f"tier ledger {self._path}: {verb}: another thread is at it")
        try:
            if self._closed:
                raise Closed(f"tier ledger {self._path}: closed")
            with self._breaker.guard(), self._errors(verb):
                connection = self._connect()
                connection.execute(begin)
                try:
                    yield connection
                    connection.execute("COMMIT")
                except BaseException:
                    self._roll_back(connection)
                    raise
        finally:
            self._mutex.release()

    @contextmanager
    def _errors(self, verb: str) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as exc:
            code = _code(exc)
            text = f"tier ledger {self._path}: {verb}: {exc}"
            if _is_damaged(exc):
                self._replace()
                raise TransientError(f"{text}; it is being made anew") from exc
            if code in _BUSY:
                raise DeadlineExceeded(text) from exc
            if code == sqlite3.SQLITE_FULL:
                self._reuse_wal()
                raise CapacityExceeded(text) from exc
            raise (PermissionDenied(text) if code in _DENIED else TransientError(text)) from exc
        except OSError as exc:
            raise PermissionDenied(f"tier ledger {self._path}: {verb}: {exc.strerror}") from exc

    def _connect(self) -> sqlite3.Connection:
        identity = _identity(self._path)
        if self._connection is not None and identity == self._identity and identity is not None:
            return self._connection
        self._disconnect()
        Path(self._path).parent.mkdir(parents=True, exist_ok=True)
        with self._opening():
            try:
                self._connection = self._open()
            except sqlite3.DatabaseError as exc:
                if not _is_damaged(exc):
                    raise
                log.info("tier ledger %s is made anew: %s", self._path, exc)
                self._delete()
                self._connection = self._open()
            self._identity = _identity(self._path)
        return self._connection

    def _open(self) -> sqlite3.Connection:
        # Autocommit: transactions are begun and ended by the statements here and by nothing else.
        connection = sqlite3.connect(
            self._path, timeout=self._timeout_s, isolation_level=None, check_same_thread=False
        )
        try:
            _prepare(connection)
            connection.execute("BEGIN IMMEDIATE")
            self._opened(connection)
            connection.execute("COMMIT")
        except BaseException:
            connection.close()
            raise
        return connection

    def _disconnect(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _replace(self) -> None:
        """Delete the file, unless another process was faster: then the path names another one already."""
        self._disconnect()
        with suppress(KVStoreError, OSError), self._opening():
            if self._identity is not None and _identity(self._path) == self._identity:
                self._delete()

    def _delete(self) -> None:
        # The file last: as long as it is there, it is the one to delete.
        for suffix in ("-wal", "-shm", ""):
            Path(self._path + suffix).unlink(missing_ok=True)

    def _reuse_wal(self) -> None:
        """Let the next transaction write over the -wal file: it takes no space, and may give some back."""
        with suppress(sqlite3.Error):
            if self._connection is not None:
                self._connection.execute("PRAGMA wal_checkpoint(RESTART)")

    @contextmanager
    def _opening(self) -> Iterator[None]:
        until = time.monotonic() + self._timeout_s
        while not self._locks.acquire(OPENING):
            if time.monotonic() > until:
                raise DeadlineExceeded(f"tier ledger {self._path}: another process is opening it")
            time.sleep(0.002)
        try:
            yield
        finally:
            self._locks.release(OPENING)

    def _roll_back(self, connection: sqlite3.Connection) -> None:
        # A full disk or a lost lock has ended the transaction already; other errors have not.
        try:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
        except sqlite3.Error:
            self._disconnect()

    def _after_fork(self) -> None:
        if self._pid != os.getpid():
            self._pid = os.getpid()
            if self._connection is not None:
                _INHERITED.append(self._connection)
            self._connection, self._mutex = None, threading.Lock()


def _code(exc: sqlite3.Error) -> int:
    """SQLite's primary result code; 0 if the error is Python's own."""
    return int(getattr(exc, "sqlite_errorcode", 0)) & 0xFF


def _is_damaged(exc: sqlite3.Error) -> bool:
    return isinstance(exc, _Foreign) or _code(exc) in _DAMAGED


@cache
def _boot() -> str:
    """What changes with every boot of this machine."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""


def _identity(path: str) -> _Identity | None:
    """Which file the path names."""
    try:
        status = Path(path).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _prepare(connection: sqlite3.Connection) -> None:
    """Bring a connection, and a new file, into shape. The caller holds the lock for opening."""
    owner = int(connection.execute("PRAGMA application_id").fetchone()[0])
    version = int(connection.execute("PRAGMA user_version").fetchone()[0])
    tables = int(connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0])
    if (owner or version or tables) and (owner != APPLICATION_ID or version < SCHEMA_VERSION):
        raise _Foreign("not a ledger of this release")
    if version > SCHEMA_VERSION:
        raise sqlite3.OperationalError(f"made by a newer kvstore (schema {version})")
    connection.execute("PRAGMA synchronous = OFF")
    if not version:
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("BEGIN IMMEDIATE")
        for statement in SCHEMA:
            connection.execute(statement)
        connection.execute("INSERT INTO totals VALUES (0, 0, 0, 0, 0, 0, ?)", (_boot(),))
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        connection.execute("COMMIT")
    if connection.execute("SELECT boot FROM totals").fetchone() != (_boot(),):
        raise _Foreign("it is from before the last boot")
