"""How segments leave: the steps of eviction and upkeep in SQLite, each called inside a write transaction."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

from kvstore.catalogue import Usage
from kvstore.eviction import MINUTE_S
from kvstore.index.sqlite_catalogue import USAGE, in_order
from kvstore.index.sqlite_journal import Evicted, Writing
from kvstore.index.sqlite_rows import Place, account, bygones, discard
from kvstore.keys import NamespaceId, SegmentId
from schemas.records import EvictionRule

#: Entries that one transaction looks at, or drops.
PAGE = 2048


class Taken(NamedTuple):
    """A visible segment that isn't any more."""

    segment: SegmentId
    nbytes: int
    slots: int
    ranks: int
    pinned: int
    cost: int
    first: bytes
    depth: int


def usage_of(db: sqlite3.Connection, key: int) -> Usage:
    """What is recorded of a namespace that exists."""
    return Usage(*db.execute(f"SELECT {USAGE} FROM namespaces WHERE key = ?", (key,)).fetchone())


def count_all(db: sqlite3.Connection, place: Place) -> Usage:
    """What there is of a namespace."""
    row = db.execute(
        "SELECT coalesce(sum(nbytes), 0), count(*), coalesce(sum(slots), 0), "
        "coalesce(sum(nbytes * pinned), 0), coalesce(sum(cost), 0) FROM segments WHERE namespace = ?",
        (place.generation,),
    ).fetchone()
    return Usage(*row)


def first_to_go(
    db: sqlite3.Connection,
    place: Place,
    *,
    keep_bytes: int,
    limit: int,
    looks: int,
    spare_from_s: float | None,
) -> list[SegmentId]:
    """The segments that a cull evicts next, in the order of eviction, of the first `looks`."""
    spare_from = math.inf if spare_from_s is None else spare_from_s
    chosen: list[SegmentId] = []
    over = usage_of(db, place.key).nbytes - keep_bytes
    for segment, nbytes, _, used in in_order(db, place, looks):
        if over <= 0 or len(chosen) >= limit:
            break
        if used * MINUTE_S < spare_from:
            chosen.append(SegmentId(segment))
            over -= nbytes
    return chosen


def pins(
    db: sqlite3.Connection, place: Place, segments: Sequence[SegmentId], pinned: int
) -> list[tuple[int, int]]:
    """Of the visible ones that are pinned (1) or not (0): row and bytes, each once."""
    query = "SELECT key, nbytes FROM segments WHERE namespace = ? AND id = ? AND pinned = ?"
    rows = [
        db.execute(query, (place.generation, segment, pinned)).fetchone()
        for segment in dict.fromkeys(segments)
    ]
    return [row for row in rows if row]


def take(db: sqlite3.Connection, place: Place, segments: Sequence[SegmentId]) -> list[Taken]:
    """Make segments invisible and account for it; those that were visible."""
    taken: list[Taken] = []
    for segment in segments:
        row = db.execute(
            "SELECT key, nbytes, slots, ranks, pinned, cost, first, depth FROM segments "
            "WHERE namespace = ? AND id = ?",
            (place.generation, segment),
        ).fetchone()
        if row:
            db.execute("DELETE FROM segments WHERE key = ?", row[:1])
            db.execute("DELETE FROM hot WHERE segment = ?", row[:1])
            taken.append(Taken(segment, *row[1:]))
    if taken:
        change = Usage(
            -sum(one.nbytes for one in taken),
            -len(taken),
            -sum(one.slots for one in taken),
            -sum(one.nbytes for one in taken if one.pinned),
            -sum(one.cost for one in taken),
        )
        account(db, place.key, change)
    return taken


def drop(
    db: sqlite3.Connection,
    writing: Writing,
    place: Place,
    segments: Sequence[SegmentId],
    delete_after_s: float,
    rule: EvictionRule,
) -> list[SegmentId]:
    """Take segments out of sight and into the trash; returns those that were visible."""
    taken = take(db, place, segments)
    for one in taken:
        discard(db, place.key, one.segment, one.ranks, delete_after_s)
    if taken:
        writing.evicted(db, place.key, departed(taken), rule)
    return [one.segment for one in taken]


def departed(taken: Sequence[Taken]) -> list[Evicted]:
    """What the journal says of them."""
    return [Evicted(one.segment, one.first, one.depth, one.slots, one.nbytes) for one in taken]


def abandon(db: sqlite3.Connection, place: Place, segment: SegmentId, delete_after_s: float) -> None:
    """Put an incomplete commit's payloads into the trash, whatever generation it is of."""
    for number in (place.generation, *bygones(db, place)):
        row = db.execute(
            "SELECT max(ranks) FROM parts WHERE namespace = ? AND id = ?", (number, segment)
        ).fetchone()
        if row[0] is not None:
            discard(db, place.key, segment, row[0], delete_after_s)
            db.execute("DELETE FROM parts WHERE namespace = ? AND id = ?", (number, segment))


def forget(db: sqlite3.Connection, place: Place, segment: SegmentId) -> None:
    """Drop a segment that isn't visible from the trash, the bygone and the incomplete."""
    db.execute("DELETE FROM trash WHERE namespace = ? AND id = ?", (place.key, segment))
    old = bygones(db, place)
    for number in (place.generation, *old):
        db.execute("DELETE FROM parts WHERE namespace = ? AND id = ?", (number, segment))
    for number in old:
        gone = db.execute("DELETE FROM segments WHERE namespace = ? AND id = ?", (number, segment)).rowcount
        db.execute("UPDATE generations SET segments = segments - ? WHERE number = ?", (gone, number))


def sweep_page(db: sqlite3.Connection, namespace: NamespaceId, limit: int) -> tuple[int, int, bool]:
    """Entries looked at, entries dropped, and whether the last entry was among them."""
    row = db.execute("SELECT key, generation, swept FROM namespaces WHERE id = ?", (namespace,)).fetchone()
    if row is None:
        return 0, 0, True
    key, generation, after = row
    rows = db.execute(
        "SELECT e.digest, s.key FROM blocks AS e LEFT JOIN segments AS s "
        "ON s.namespace = ? AND s.id = e.segment "
        "WHERE e.namespace = ? AND e.digest > ? ORDER BY e.digest LIMIT ?",
        (generation, key, after, PAGE),
    ).fetchall()
    dead = [digest for digest, segment in rows if segment is None][:limit]
    db.executemany(
        "DELETE FROM blocks WHERE namespace = ? AND digest = ?", [(key, digest) for digest in dead]
    )
    ended = len(rows) < PAGE and len(dead) < limit
    if len(dead) == limit:
        after = dead[-1]
    elif rows:
        after = rows[-1][0]
    db.execute("UPDATE namespaces SET swept = ? WHERE key = ?", (b"" if ended else after, key))
    return len(rows), len(dead), ended


def drain_some(db: sqlite3.Connection, place: Place, limit: int, delete_after_s: float, now: float) -> int:
    """Move invalidated segments, the oldest generation's first, into the trash; how many."""
    for number in bygones(db, place):
        rows = db.execute(
            "SELECT key, id, ranks FROM segments WHERE namespace = ? ORDER BY id LIMIT ?", (number, limit)
        ).fetchall()
        for row, segment, ranks in rows:
            db.execute("DELETE FROM segments WHERE key = ?", (row,))
            discard(db, place.key, SegmentId(segment), ranks, delete_after_s)
        if rows:
            db.execute(
                "UPDATE generations SET segments = max(0, segments - ?) WHERE number = ?", (len(rows), number)
            )
            return len(rows)
        # It stays as long as a rank of it may come back that must be refused.
        db.execute("DELETE FROM parts WHERE namespace = ? AND expires <= ?", (number, now))
        db.execute("UPDATE generations SET segments = 0 WHERE number = ? AND segments <> 0", (number,))
        db.execute(
            "DELETE FROM generations WHERE number = ? AND NOT EXISTS "
            "(SELECT 1 FROM parts WHERE namespace = ?)",
            (number, number),
        )
    return 0


def in_use(db: sqlite3.Connection, place: Place, now: float) -> bool:
    """Whether a namespace has a segment in any state."""

    def found(query: str, *values: float) -> bool:
        return db.execute(query + " LIMIT 1", values).fetchone() is not None

    return found("SELECT 1 FROM trash WHERE namespace = ?", place.key) or any(
        found("SELECT 1 FROM segments WHERE namespace = ?", number)
        or found("SELECT 1 FROM parts WHERE namespace = ? AND expires > ?", number, now)
        for number in (place.generation, *bygones(db, place))
    )


def erase_some(db: sqlite3.Connection, place: Place, limit: int) -> int:
    """Drop up to `limit` of the rows that a namespace may have many of; how many."""
    left = limit
    for table, columns in (("blocks", "digest"), ("uses", "parity, line"), ("ghosts", "digest")):
        left -= db.execute(
            f"DELETE FROM {table} WHERE namespace = ? AND ({columns}) IN "
            f"(SELECT {columns} FROM {table} WHERE namespace = ? LIMIT ?)",
            (place.key, place.key, left),
        ).rowcount
    for table in ("events", "outcomes"):
        left -= db.execute(
            f"DELETE FROM {table} WHERE namespace = ? AND number IN "
            f"(SELECT number FROM {table} WHERE namespace = ? ORDER BY number LIMIT ?)",
            (place.key, place.key, left),
        ).rowcount
    return limit - left


def erase_rest(db: sqlite3.Connection, place: Place) -> None:
    """Drop all that is left of a namespace."""
    for number in (place.generation, *bygones(db, place)):
        db.execute("DELETE FROM parts WHERE namespace = ?", (number,))
    for table in ("generations", "claims", "hot", "totals", "credits"):
        db.execute(f"DELETE FROM {table} WHERE namespace = ?", (place.key,))
    db.execute("DELETE FROM namespaces WHERE key = ?", (place.key,))
