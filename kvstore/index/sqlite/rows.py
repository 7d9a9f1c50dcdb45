"""The base of SqliteIndex's parts, and the rows that all of them read and write.

The schema stands in kvstore.index.sqlite.schema. The functions here are called inside a transaction.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from kvstore.index.contract import cached, whole_seconds
from kvstore.index.maintenance import Usage
from kvstore.index.numbers import MOST, whole
from kvstore.keys import NamespaceId, SegmentId
from kvstore.rules.units import batches
from kvstore.sqlite import SqliteDatabase
from schemas.records import unpack_record
from schemas.settings import JournalSettings

#: Segments that one write transaction moves: a few milliseconds, for which other writers wait.
SLICE = 64

#: Before a namespace's id: the row of `quotas` that has the time to live to which the index holds there.
LIVES = "lives/"

record_of = cached(unpack_record)

_T = TypeVar("_T")


class SqlitePart:
    """The base of every part of SqliteIndex."""

    def __init__(
        self, database: SqliteDatabase, journal: JournalSettings, clock: Callable[[], float], by: str = ""
    ) -> None:
        """`by`: see Event."""
        self._database = database
        self._journal = journal
        self._clock = clock
        self._by = by

    def _changed(
        self,
        verb: str,
        namespace: NamespaceId,
        items: Sequence[_T],
        change: Callable[[sqlite3.Connection, NamespaceNumbers, Sequence[_T]], int],
        most: int = SLICE,
    ) -> int:
        """Changes `items` in transactions of at most `most` each. Returns the sum of what `change` answers, 0
        for an unknown namespace."""
        count = 0
        for some in batches(items, most):
            with self._database.writing(verb) as db:
                place = place_of(db, namespace)
                count += change(db, place, some) if place else 0
        return count


class NamespaceNumbers(NamedTuple):
    """How other tables name a namespace, and its kind."""

    key: int
    #: `namespace` in the rows of its visible segments and of its incomplete commits.
    generation: int
    kind: str


def place_of(db: sqlite3.Connection, namespace: NamespaceId) -> NamespaceNumbers | None:
    """Returns the numbers of a namespace; None if it is unknown."""
    row = db.execute("SELECT key, generation, kind FROM namespaces WHERE id = ?", (namespace,)).fetchone()
    return NamespaceNumbers(*row) if row else None


def invalidated_generations(db: sqlite3.Connection, place: NamespaceNumbers) -> list[int]:
    """Returns the generations that were invalidated and are not in the trash yet, the oldest first."""
    rows = db.execute(
        "SELECT number FROM generations WHERE namespace = ? AND number <> ? ORDER BY number",
        (place.key, place.generation),
    )
    return [number for (number,) in rows]


def new_generation(db: sqlite3.Connection, key: int) -> None:
    """Gives a namespace a generation that nothing belongs to yet."""
    number = db.execute("INSERT INTO generations (namespace) VALUES (?)", (key,)).lastrowid
    db.execute("UPDATE namespaces SET generation = ? WHERE key = ?", (number, key))


def account(db: sqlite3.Connection, key: int, change: Usage) -> None:
    """Adds `change` to a namespace's usage."""
    db.execute(
        "UPDATE namespaces SET nbytes = nbytes + ?, segments = segments + ?, blocks = blocks + ?, "
        "pinned = pinned + ?, cost = cost + ? WHERE key = ?",
        (change.nbytes, change.segments, change.blocks, change.pinned_bytes, change.cost_us, key),
    )


def number_in(value: object, least: int = -MOST, most: int = MOST) -> int:
    """Returns a number of a row, 0 if it is damaged: a column holds text and bytes as well, and what can't be
    must cost nobody but its namespace. A usage may be below 0 until it is reconciled."""
    try:
        return whole(value, least=least, most=most)
    except ValueError:
        return 0


def add_to_trash(
    db: sqlite3.Connection, key: int, segment: SegmentId, ranks: int, delete_after_s: float
) -> None:
    """Records that a segment's payloads are to be deleted."""
    db.execute(
        "INSERT OR REPLACE INTO trash VALUES (?, ?, ?, ?)",
        (key, segment, ranks, whole_seconds(delete_after_s)),
    )
