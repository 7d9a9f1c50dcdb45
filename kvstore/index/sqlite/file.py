"""The database of the index in SQLite.

    IndexFile      a file, shared by every process and thread of a machine
    IndexMemory    a database inside this process, for tests

kvstore.sqlite says which error a failure becomes. A file that a newer release made raises ConfigError, and a
damaged file TransientError, because the index is a hint: deleting the file is a repair. A file of an older
release is emptied, for the same reason: saves fill it again, and `cache-admin rebuild --apply` at once.
"""

from __future__ import annotations

import atexit
import logging
import sqlite3
import threading
from typing import ClassVar, Final

from kvstore.errors import ConfigError, DeadlineExceeded, KVStoreError, TransientError
from kvstore.sqlite import (
    Connection,
    SqliteDatabase,
    SqliteFile,
    begun,
    connect,
    is_damage,
    set_wal,
    stamps,
)

log = logging.getLogger(__name__)

#: "kvsi": tells an index from any other SQLite file, also to the command `file`.
APPLICATION_ID: Final = 0x6B767369
#: Raised with every change of the tables (golden test: tests/index/sqlite/test_file.py).
SCHEMA_VERSION: Final = 11

#: What Redis keeps under a key, in one table for each kind. `length` is a string's, or a stream's number of
#: entries; `last_ms` and `last_number` are the last id that a stream has given.
SCHEMA: Final = """
CREATE TABLE keys (
    id INTEGER PRIMARY KEY, name BLOB NOT NULL, kind BLOB NOT NULL, expires_ms INTEGER,
    length INTEGER NOT NULL DEFAULT 0, last_ms INTEGER NOT NULL DEFAULT 0,
    last_number INTEGER NOT NULL DEFAULT 0);
CREATE INDEX keys_by_name ON keys (name, kind, expires_ms);
CREATE INDEX keys_by_expiry ON keys (expires_ms) WHERE expires_ms IS NOT NULL;
CREATE TABLE fields (
    key INTEGER NOT NULL, field BLOB NOT NULL, value BLOB NOT NULL, PRIMARY KEY (key, field)) WITHOUT ROWID;
CREATE TABLE members (
    key INTEGER NOT NULL, member BLOB NOT NULL, score REAL NOT NULL, PRIMARY KEY (key, member)) WITHOUT ROWID;
CREATE INDEX members_by_score ON members (key, score, member);
CREATE TABLE chunks (
    key INTEGER NOT NULL, number INTEGER NOT NULL, value BLOB NOT NULL,
    PRIMARY KEY (key, number)) WITHOUT ROWID;
CREATE TABLE entries (
    key INTEGER NOT NULL, ms INTEGER NOT NULL, number INTEGER NOT NULL, fields BLOB NOT NULL,
    PRIMARY KEY (key, ms, number)) WITHOUT ROWID;
"""


class IndexFile(SqliteFile):
    """A file with the tables of this release."""

    def _prepare(self, connection: sqlite3.Connection) -> None:
        with begun(connection, "BEGIN"):
            version = _version_of(connection, self.where)
        if version != SCHEMA_VERSION:
            set_wal(connection, self._timeout_s)
            _make_tables(connection, self.where)
        # Safe if a process is killed; after a power cut the newest commits may be gone.
        connection.execute("PRAGMA synchronous = NORMAL")

    def _failure(self, exc: sqlite3.Error, verb: str, connection: Connection | None) -> KVStoreError:
        error = super()._failure(exc, verb, connection)
        if not is_damage(exc):
            return error
        return TransientError(
            f"{error}; the index is only a hint: delete it with its -wal and -shm, and the cache refills"
        )


class IndexMemory(SqliteDatabase):
    """A named database that lasts as long as this process. Transactions take turns, also those that only
    read."""

    #: Every named database. `_naming` guards it and the making of a database.
    _named: ClassVar[dict[str, IndexMemory]] = {}
    _naming: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: str, turn_timeout_s: float) -> None:
        self._name = name
        self._turn_timeout_s = turn_timeout_s
        self._turn = threading.Lock()
        self._connection = connect(":memory:", 0.0)
        atexit.register(self._connection.close)
        _make_tables(self._connection, self.where)

    @classmethod
    def named(cls, name: str, turn_timeout_s: float = 10.0) -> IndexMemory:
        """Returns the one database of that name. Not for use across a fork."""
        with cls._naming:
            if name not in cls._named:
                cls._named[name] = cls(name, turn_timeout_s)
            return cls._named[name]

    @property
    def where(self) -> str:
        return f"memory://{self._name}"

    def close(self) -> None:
        """Does nothing: others may hold the same database."""

    def _borrow(self) -> Connection:
        if not self._turn.acquire(timeout=self._turn_timeout_s):
            raise DeadlineExceeded(f"sqlite {self.where}: busy")
        return self._connection

    def _give_back(self, connection: Connection, *, sound: bool) -> None:
        self._turn.release()


def _make_tables(connection: sqlite3.Connection, where: str) -> None:
    """Makes the tables in an empty database, or in one of an older release, which is emptied."""
    with begun(connection, "BEGIN IMMEDIATE"):
        version = _version_of(connection, where)
        if version == SCHEMA_VERSION:
            return  # another process was faster
        if version:
            log.warning(
                "sqlite %s: an older kvstore made this index (schema %d, this one has %d): it is empty now; "
                "`cache-admin rebuild --apply` fills it from the payloads, or engines do as they save",
                where,
                version,
                SCHEMA_VERSION,
            )
            names = connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            for (name,) in names:
                if not name.startswith("sqlite_"):
                    connection.execute(f'DROP TABLE "{name}"')
        for statement in SCHEMA.strip().split(";\n"):
            connection.execute(statement)
        connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def _version_of(connection: sqlite3.Connection, where: str) -> int:
    """Returns the schema's version, 0 for an empty database. Raises ConfigError for a foreign or newer
    one."""
    owner, version, new = stamps(connection)
    if owner != APPLICATION_ID and not new:
        raise ConfigError(f"sqlite {where}: this is another program's database; name another file")
    if version > SCHEMA_VERSION:
        raise ConfigError(
            f"sqlite {where}: made by a newer kvstore (schema {version}, this one knows {SCHEMA_VERSION}); "
            "upgrade this one, or delete the file: the cache refills"
        )
    return version
