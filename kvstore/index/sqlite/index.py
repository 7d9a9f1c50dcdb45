"""SqliteIndex: the index in one SQLite file, shared by the processes and threads of one machine.

It is the default where there is no Redis: the very scripts that Redis would run, run in this process. Reading
never waits for a writer (WAL); writers take turns, each for a millisecond or two.

A crash at any instruction loses at most the transaction that it was in: each script is one, and each command.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

from kvstore.errors import CapacityExceeded, PermissionDenied, TransientError
from kvstore.files import OWNER, Access
from kvstore.index.scripted.index import ScriptedIndex
from kvstore.index.sqlite.client import SqliteClient
from kvstore.index.sqlite.file import IndexFile, IndexMemory
from kvstore.sqlite import SqliteDatabase


class SqliteIndex(ScriptedIndex):
    """The index in one SQLite database."""

    #: One hash is one range of a B-tree here, whatever its size; an empty bucket costs a query.
    in_buckets = False

    def __init__(
        self,
        path: str | SqliteDatabase,
        *,
        busy_timeout_s: float = 2.0,
        access: Access = OWNER,
        clock: Callable[[], float] = time.time,
        **options: Any,
    ) -> None:
        """Opens the file, and makes it if there is none; `options` are
        ScriptedIndex's.

        Raises ConfigError if it is no index, or a newer release's. Every other failure is left to the
        verbs: a disk that is full right now is no reason for an engine not to start.
        """
        database = IndexFile(path, busy_timeout_s, access) if isinstance(path, str) else path
        super().__init__(SqliteClient(database, clock), clock=clock, **options)
        self._database = database
        with suppress(TransientError, PermissionDenied, CapacityExceeded), database.reading("open"):
            pass

    @classmethod
    def in_memory(cls, name: str, **options: Any) -> Self:
        """Opens, for tests, a database inside this process that all indexes of that name share."""
        return cls(IndexMemory.named(name), **options)

    def __repr__(self) -> str:
        return f"SqliteIndex({self._database.where})"

    def memory(self) -> None:
        """Returns None: the index is a file."""
        return
