"""Uses of segments in SQLite, called inside a write transaction.

While a segment is retained (kvstore.index.sessions), `used` and `keep` of its row are those of a use at the
end of that, and its true last use stands in `retained`.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable

from kvstore.index.contract import HOT_KEPT, HOT_MOST
from kvstore.index.eviction import MINUTE_S, WORTH_MINUTES
from kvstore.index.sqlite.rows import NamespaceNumbers

#: Segments whose time is over that one call restores.
_AT_ONCE = 200
_GONE = (
    "NOT EXISTS (SELECT 1 FROM segments AS s WHERE s.key = retained.segment AND s.namespace = ? "
    "AND s.nbytes = retained.nbytes AND s.salt = retained.salt)"
)


def count_as_used(db: sqlite3.Connection, key: int, used: float) -> None:
    """Sets the minute that counts as a segment's last use."""
    db.execute(
        "UPDATE segments SET used = ?, keep = ? + worth * ? WHERE key = ?", (used, used, WORTH_MINUTES, key)
    )


def note_uses(db: sqlite3.Connection, uses: Iterable[tuple[int, float]], used: float) -> None:
    """Notes uses of segments, by key, in the minute `used`, with the minute that each counts as.

    A segment that is retained counts as used later already; its true last use is set.
    """
    for key, counted in uses:
        db.execute(
            "UPDATE segments SET used = ?, keep = ? + worth * ? WHERE key = ? AND used < ?",
            (counted, counted, WORTH_MINUTES, key, counted),
        )
        db.execute(
            "UPDATE retained SET used = min(?, until / ?) WHERE segment = ? AND used < ?",
            (int(used), MINUTE_S, key, int(used)),
        )


def note_load(db: sqlite3.Connection, place: NamespaceNumbers, key: int) -> None:
    """Notes that a load began with a segment, in a minute in which it had not been used."""
    db.execute(
        "INSERT INTO hot SELECT key, ?, 1 FROM segments WHERE namespace = ? AND key = ? "
        "ON CONFLICT (segment) DO UPDATE SET minutes = minutes + 1",
        (place.key, place.generation, key),
    )
    (watched,) = db.execute("SELECT count(*) FROM hot WHERE namespace = ?", (place.key,)).fetchone()
    if watched > HOT_MOST:
        db.execute(
            "DELETE FROM hot WHERE segment IN "
            "(SELECT segment FROM hot WHERE namespace = ? ORDER BY minutes, segment LIMIT ?)",
            (place.key, watched - HOT_KEPT),
        )


def expire_retained(db: sqlite3.Connection, place: NamespaceNumbers, now: float) -> int:
    """Restores retained segments whose time is over, some at a time. Returns how many."""
    rows = db.execute(
        "SELECT segment, until, used FROM retained WHERE namespace = ? AND until <= ? ORDER BY until LIMIT ?",
        (place.key, now, _AT_ONCE),
    ).fetchall()
    _restore(db, rows)
    return len(rows)


def restore_retained(db: sqlite3.Connection, keys: Iterable[int]) -> None:
    """Restores those segments that are retained."""
    query = "SELECT segment, until, used FROM retained WHERE segment = ?"
    _restore(db, [row for key in keys for row in db.execute(query, (key,))])


def retained_and_gone(db: sqlite3.Connection, place: NamespaceNumbers) -> list[int]:
    """Returns the keys of retained segments that are gone; another may have got the key of one."""
    rows = db.execute(
        f"SELECT segment FROM retained WHERE namespace = ? AND {_GONE}", (place.key, place.generation)
    )
    return [key for (key,) in rows]


def release_gone(db: sqlite3.Connection, place: NamespaceNumbers, keys: Iterable[int]) -> None:
    """Retains those of the segments no more that are gone."""
    query = f"DELETE FROM retained WHERE segment = ? AND namespace = ? AND {_GONE}"
    db.executemany(query, [(key, place.key, place.generation) for key in keys])


def _restore(db: sqlite3.Connection, rows: Iterable[tuple[int, int, int]]) -> None:
    """They are retained no more, and count as used when they were, unless they were used since."""
    for key, until, used in rows:
        db.execute(
            "UPDATE segments SET used = ?, keep = ? + worth * ? WHERE key = ? AND used <= ?",
            (used, used, WORTH_MINUTES, key, until // MINUTE_S),
        )
        db.execute("DELETE FROM retained WHERE segment = ?", (key,))
