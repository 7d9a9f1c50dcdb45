"""The database of an index in SQLite. The schema stands in kvstore.index.sqlite.schema.

    IndexFile      a file, shared by every process and thread of a machine
    IndexMemory    a database inside this process, for tests

kvstore.sqlite says which error a failure becomes. A file that a newer release made raises ConfigError, and a
damaged file TransientError, because the index is a hint: deleting the file is a repair.
"""

from __future__ import annotations

import atexit
import sqlite3
import threading
from typing import ClassVar

from kvstore.errors import DeadlineExceeded, KVStoreError, TransientError
from kvstore.index.sqlite.schema import SCHEMA_VERSION, make_schema, version_of
from kvstore.sqlite import Connection, SqliteDatabase, SqliteFile, begun, connect, is_damage, set_wal


class IndexFile(SqliteFile):
    """A file with the schema of this release; one of an older release is brought up to date."""

    def _prepare(self, connection: sqlite3.Connection) -> None:
        with begun(connection, "BEGIN"):
            version = version_of(connection, self.where)
        if version != SCHEMA_VERSION:
            set_wal(connection, self._timeout_s)
            make_schema(connection, self.where)
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
        make_schema(self._connection, self.where)

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
