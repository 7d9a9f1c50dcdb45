"""What the halves of SqliteIndex share: its parts, and the rows that all of them read and write.

The schema stands in sqlite_schema. The functions here are called inside a transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeVar

from kvstore.catalogue import Usage
from kvstore.index.contract import whole_seconds
from kvstore.index.sqlite_file import SqliteDatabase
from kvstore.keys import NamespaceId, SegmentId
from schemas.records import unpack_record
from schemas.settings import JournalSettings

#: Segments that one write transaction moves: a few milliseconds, and other writers wait no longer.
SLICE = 64

#: The same prefixes are matched again and again, and unpacking costs as much as a look-up.
record_of = lru_cache(maxsize=8192)(unpack_record)

_T = TypeVar("_T")


class SqlitePart:
    """What each half of SqliteIndex works with."""

    def __init__(
        self, database: SqliteDatabase, journal: JournalSettings, clock: Callable[[], float]
    ) -> None:
        self._database = database
        self._journal = journal
        self._clock = clock


class Place(NamedTuple):
    """A namespace's numbers in the other tables."""

    key: int
    #: `namespace` of its visible segments and of its incomplete commits.
    generation: int
    kind: str


def place_of(db: sqlite3.Connection, namespace: NamespaceId) -> Place | None:
    """Where a namespace's rows are; None if it is unknown."""
    row = db.execute("SELECT key, generation, kind FROM namespaces WHERE id = ?", (namespace,)).fetchone()
    return Place(*row) if row else None


def bygones(db: sqlite3.Connection, place: Place) -> list[int]:
    """The generations that were invalidated and are not in the trash yet, the oldest first."""
    rows = db.execute(
        "SELECT number FROM generations WHERE namespace = ? AND number <> ? ORDER BY number",
        (place.key, place.generation),
    )
    return [number for (number,) in rows]


def new_generation(db: sqlite3.Connection, key: int) -> None:
    """Give a namespace a generation that nothing belongs to yet."""
    number = db.execute("INSERT INTO generations (namespace) VALUES (?)", (key,)).lastrowid
    db.execute("UPDATE namespaces SET generation = ? WHERE key = ?", (number, key))


def account(db: sqlite3.Connection, key: int, change: Usage) -> None:
    """Change a namespace's usage by so much."""
    db.execute(
        "UPDATE namespaces SET nbytes = nbytes + ?, segments = segments + ?, blocks = blocks + ?, "
        "pinned = pinned + ?, cost = cost + ? WHERE key = ?",
        (change.nbytes, change.segments, change.blocks, change.pinned_bytes, change.cost_us, key),
    )


def discard(db: sqlite3.Connection, key: int, segment: SegmentId, ranks: int, delete_after_s: float) -> None:
    """Put a segment's payloads on record for deletion."""
    db.execute(
        "INSERT OR REPLACE INTO trash VALUES (?, ?, ?, ?)",
        (key, segment, ranks, whole_seconds(delete_after_s)),
    )


def slices(items: Sequence[_T], size: int = SLICE) -> Iterator[Sequence[_T]]:
    """A sequence in pieces of at most `size`."""
    for start in range(0, len(items), size):
        yield items[start : start + size]
