"""The ledger's tables, and LedgerFile: the SQLite file that holds them, which is replaced when it is damaged.

Each object has one connection, and one transaction at a time. No call waits longer than about `timeout_s` for
another process or thread. kvstore.sqlite says which error a failure becomes; after several TransientErrors in
a row calls raise BreakerOpen, at once, for a while. A file of a newer release is a TransientError too.

The first process that meets damage deletes the file, and the next call makes a new one. Deleting takes a
lock, which every opening of a connection takes as well: a connection to the old file must not find the new
one's -wal and -shm, or the other way round. Connections that are open already keep their own (deleted) ones,
see that the path names another file now, and switch to it with their next transaction.

Why synchronous = OFF: on a disk that takes gigabytes of payload, a sync of a few pages can take seconds. A
killed process damages nothing without the sync; a power cut can, so a ledger from before the last boot is
made anew. Only the order of use is lost with it: files are adopted in the order of their times.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

from kvstore.breaker import Breaker
from kvstore.errors import DeadlineExceeded, KVStoreError, PermissionDenied, TransientError
from kvstore.files import OWNER, Access
from kvstore.payloads.tiered.locks import OPENING, RangeLocks
from kvstore.sqlite import Connection, SqliteFile, begun, is_damage, is_full, set_wal, stamps
from schemas.settings import BreakerSettings

log = logging.getLogger(__name__)

#: Rises with every change of the schema.
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


class _Foreign(sqlite3.DatabaseError):
    """Raised for a file that is no ledger, or can't be trusted. It is treated as damage."""

    sqlite_errorcode = sqlite3.SQLITE_NOTADB


class LedgerFile(SqliteFile):
    """The ledger in the file `path`. `opened` runs inside the first transaction of every connection to it."""

    kind = "tier ledger"

    def __init__(
        self,
        path: str,
        timeout_s: float,
        locks: RangeLocks,
        opened: Callable[[sqlite3.Connection], None],
        breaker: BreakerSettings | None = None,
        access: Access = OWNER,
    ) -> None:
        super().__init__(path, timeout_s, access)
        self._locks = locks
        self._opened = opened
        self._breaker = Breaker("tier ledger", breaker or BreakerSettings())
        # Held during a transaction, and while its failure is handled.
        self._turn = threading.Lock()

    def is_absent(self) -> bool:
        """Tells whether the first transaction would make the file. Raises PermissionDenied."""
        try:
            return not self._closed and not self._path.exists()
        except OSError as exc:
            raise PermissionDenied(f"tier ledger {self._path}: {exc.strerror}") from exc

    def close(self) -> None:
        """Closes the connection, after the transaction that uses it. Idempotent; later calls raise
        StoreClosed."""
        # The wait is bounded: a thread may be stuck in a system call on a dying disk.
        its_turn = self._turn.acquire(timeout=2 * self._timeout_s)
        super().close()
        if its_turn:
            self._turn.release()

    @contextmanager
    def _transaction(self, verb: str, begin: str) -> Iterator[Connection]:
        if not self._turn.acquire(timeout=self._timeout_s):
            raise DeadlineExceeded(f"tier ledger {self._path}: {verb}: another thread is at it")
        try:
            with self._breaker.guard(), super()._transaction(verb, begin) as connection:
                yield connection
        except OSError as exc:
            raise PermissionDenied(f"tier ledger {self._path}: {verb}: {exc.strerror}") from exc
        finally:
            self._turn.release()

    def _open(self) -> Connection:
        with self._opening():
            try:
                return super()._open()
            except sqlite3.DatabaseError as exc:
                if not is_damage(exc):
                    raise
                log.info("tier ledger %s is made anew: %s", self._path, exc)
                self._delete()
                return super()._open()

    def _prepare(self, connection: sqlite3.Connection) -> None:
        owner, version, new = stamps(connection)
        if not new and (owner != APPLICATION_ID or version < SCHEMA_VERSION):
            raise _Foreign("not a ledger of this release")
        if version > SCHEMA_VERSION:
            raise sqlite3.OperationalError(f"made by a newer kvstore (schema {version})")
        connection.execute("PRAGMA synchronous = OFF")
        if new:
            set_wal(connection, self._timeout_s)
            with begun(connection, "BEGIN IMMEDIATE"):
                for statement in SCHEMA:
                    connection.execute(statement)
                connection.execute("INSERT INTO totals VALUES (0, 0, 0, 0, 0, 0, ?)", (_boot(),))
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        if connection.execute("SELECT boot FROM totals").fetchone() != (_boot(),):
            raise _Foreign("it is from before the last boot")
        with begun(connection, "BEGIN IMMEDIATE"):
            self._opened(connection)

    def _failure(self, exc: sqlite3.Error, verb: str, connection: Connection | None) -> KVStoreError:
        error = super()._failure(exc, verb, connection)
        if is_damage(exc):
            self._replace(connection)
            return TransientError(f"{error}; it is being made anew")
        if is_full(exc) and connection is not None:
            # Makes the next transaction overwrite the -wal file: that takes no space, and may give some back.
            with suppress(sqlite3.Error):
                connection.execute("PRAGMA wal_checkpoint(RESTART)")
        return error

    def _replace(self, connection: Connection | None) -> None:
        """Deletes the file, unless another process was faster, so that the path names another one already."""
        with suppress(KVStoreError, OSError), self._opening():
            if connection is not None and connection.file == self._file_now() is not None:
                self._delete()

    def _delete(self) -> None:
        # The file comes last: as long as it is there, another process sees that it must be deleted.
        for suffix in ("-wal", "-shm", ""):
            Path(self.where + suffix).unlink(missing_ok=True)

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

    def _forked(self) -> None:
        super()._forked()
        self._turn = threading.Lock()


@cache
def _boot() -> str:
    """Returns an id that changes with every boot of this machine; "" if there is none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
    except OSError:
        return ""
