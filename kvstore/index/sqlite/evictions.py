"""How segments leave the index in SQLite: steps of maintenance, each called inside a write transaction."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from kvstore.index.contract import QUOTA_RULES
from kvstore.index.eviction import MINUTE_S
from kvstore.index.maintenance import Fate, Usage
from kvstore.index.sessions import ENDED_MINUTE
from kvstore.index.sqlite.catalogue import USAGE, in_order
from kvstore.index.sqlite.journal import Evicted, Writing
from kvstore.index.sqlite.rows import (
    LIVES,
    NamespaceNumbers,
    account,
    add_to_trash,
    invalidated_generations,
    number_in,
)
from kvstore.keys import NO_SESSION, NamespaceId, SegmentId, SessionId
from schemas.records import CREATED_AT, EvictionRule

#: Entries that one transaction looks at or drops, and rows that it erases.
PAGE = 2048


class Removed(NamedTuple):
    """A segment that was visible until a moment ago."""

    segment: SegmentId
    nbytes: int
    slots: int
    ranks: int
    pinned: int
    cost: int
    first: bytes
    depth: int


def usage_of(db: sqlite3.Connection, key: int) -> Usage:
    """Returns the recorded usage of a namespace that exists."""
    row = db.execute(f"SELECT {USAGE} FROM namespaces WHERE key = ?", (key,)).fetchone()
    return Usage(*map(number_in, row))


def count_all(db: sqlite3.Connection, place: NamespaceNumbers) -> Usage:
    """Counts the usage of a namespace from its segments."""
    row = db.execute(
        "SELECT coalesce(sum(nbytes), 0), count(*), coalesce(sum(slots), 0), "
        "coalesce(sum(nbytes * pinned), 0), coalesce(sum(cost), 0) FROM segments WHERE namespace = ?",
        (place.generation,),
    ).fetchone()
    return Usage(*row)


def first_to_go(
    db: sqlite3.Connection,
    place: NamespaceNumbers,
    *,
    keep_bytes: int,
    limit: int,
    looks: int,
    spare_from_s: float | None,
) -> list[SegmentId]:
    """Returns up to `limit` segments that a cull evicts next, in the order of eviction, whose first `looks`
    are looked at."""
    spare_from = math.inf if spare_from_s is None else spare_from_s
    chosen: list[SegmentId] = []
    over = usage_of(db, place.key).nbytes - keep_bytes
    for segment, nbytes, _, used, _ in in_order(db, place, looks):
        if over <= 0 or len(chosen) >= limit:
            break
        if used * MINUTE_S < spare_from:
            chosen.append(SegmentId(segment))
            over -= nbytes
    return chosen


def aged_page(db: sqlite3.Connection, place: NamespaceNumbers, after: bytes) -> list[tuple[bytes, int]]:
    """Returns up to PAGE visible segments behind `after`, by id, and when each was created, unix seconds."""
    rows = db.execute(
        f"SELECT id, substr(record, {CREATED_AT + 1}, 4) FROM segments "
        "WHERE namespace = ? AND id > ? ORDER BY id LIMIT ?",
        (place.generation, after, PAGE),
    )
    return [(segment, int.from_bytes(created, "little")) for segment, created in rows]


def rows_by_pin(
    db: sqlite3.Connection, place: NamespaceNumbers, segments: Sequence[SegmentId], pinned: int
) -> list[tuple[int, int]]:
    """Returns row and bytes of those visible segments that are pinned (1) or not (0), each once."""
    query = "SELECT key, nbytes FROM segments WHERE namespace = ? AND id = ? AND pinned = ?"
    rows = [
        db.execute(query, (place.generation, segment, pinned)).fetchone()
        for segment in dict.fromkeys(segments)
    ]
    return [row for row in rows if row]


def remove(db: sqlite3.Connection, place: NamespaceNumbers, segments: Sequence[SegmentId]) -> list[Removed]:
    """Makes segments invisible and accounts for it. Returns those that were visible."""
    removed: list[Removed] = []
    for segment in segments:
        row = db.execute(
            "SELECT key, nbytes, slots, ranks, pinned, cost, first, depth FROM segments "
            "WHERE namespace = ? AND id = ?",
            (place.generation, segment),
        ).fetchone()
        if row:
            db.execute("DELETE FROM segments WHERE key = ?", row[:1])
            for table in ("hot", "retained"):
                db.execute(f"DELETE FROM {table} WHERE segment = ?", row[:1])
            removed.append(Removed(segment, *row[1:]))
    if removed:
        change = Usage(
            -sum(one.nbytes for one in removed),
            -len(removed),
            -sum(one.slots for one in removed),
            -sum(one.nbytes for one in removed if one.pinned),
            -sum(one.cost for one in removed),
        )
        account(db, place.key, change)
    return removed


def evict(
    db: sqlite3.Connection,
    writing: Writing,
    place: NamespaceNumbers,
    segments: Sequence[SegmentId],
    delete_after_s: float,
    rule: EvictionRule,
) -> list[SegmentId]:
    """Moves visible segments into the trash. Returns those that were visible."""
    now = writing.clock()
    fates = {one: _fate_of(db, place, one, now) for one in segments if rule in QUOTA_RULES}
    removed = remove(db, place, segments)
    for one in removed:
        add_to_trash(db, place.key, one.segment, one.ranks, delete_after_s)
    if removed:
        writing.evicted(db, place.key, as_evicted(removed, fates), rule)
    return [one.segment for one in removed]


def as_evicted(
    removed: Sequence[Removed],
    fates: Mapping[SegmentId, tuple[Fate | None, SessionId]] = MappingProxyType({}),
) -> list[Evicted]:
    """Returns what the journal needs to know of removed segments."""
    return [
        Evicted(
            one.segment,
            one.first,
            one.depth,
            one.slots,
            one.nbytes,
            *fates.get(one.segment, (None, NO_SESSION)),
        )
        for one in removed
    ]


def _fate_of(
    db: sqlite3.Connection, place: NamespaceNumbers, segment: SegmentId, now: float
) -> tuple[Fate | None, SessionId]:
    """Returns what was told of a visible segment, and the session that alone has used it, for the journal."""
    row = db.execute(
        "SELECT s.used, s.owner, r.until, o.until FROM segments AS s "
        "LEFT JOIN retained AS r ON r.segment = s.key "
        "LEFT JOIN sessions AS o ON o.namespace = ? AND o.id = s.owner "
        "WHERE s.namespace = ? AND s.id = ?",
        (place.key, place.generation, segment),
    ).fetchone()
    if row is None:
        return None, NO_SESSION
    used, session, until, told = row
    if until is not None:
        return ("retained" if until > now else "expired"), session
    if session and used == ENDED_MINUTE:
        return "ended", session
    return ("expired", session) if session and told and told <= now else (None, NO_SESSION)


def evict_incomplete(
    db: sqlite3.Connection, place: NamespaceNumbers, segment: SegmentId, delete_after_s: float
) -> None:
    """Moves an incomplete commit into the trash, whatever generation it belongs to."""
    for number in (place.generation, *invalidated_generations(db, place)):
        row = db.execute(
            "SELECT max(ranks) FROM parts WHERE namespace = ? AND id = ?", (number, segment)
        ).fetchone()
        if row[0] is not None:
            add_to_trash(db, place.key, segment, row[0], delete_after_s)
            db.execute("DELETE FROM parts WHERE namespace = ? AND id = ?", (number, segment))


def forget(db: sqlite3.Connection, place: NamespaceNumbers, segment: SegmentId) -> None:
    """Forgets a segment that isn't visible: in the trash, invalidated, incomplete."""
    db.execute("DELETE FROM trash WHERE namespace = ? AND id = ?", (place.key, segment))
    old = invalidated_generations(db, place)
    for number in (place.generation, *old):
        db.execute("DELETE FROM parts WHERE namespace = ? AND id = ?", (number, segment))
    for number in old:
        gone = db.execute("DELETE FROM segments WHERE namespace = ? AND id = ?", (number, segment)).rowcount
        db.execute("UPDATE generations SET segments = segments - ? WHERE number = ?", (gone, number))


def sweep_page(db: sqlite3.Connection, namespace: NamespaceId, limit: int) -> tuple[int, int, bool]:
    """Drops up to `limit` dangling entries of the next page. Returns how many entries it looked at, how many
    it dropped, and whether the last one was among them."""
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


def drain_some(
    db: sqlite3.Connection, place: NamespaceNumbers, limit: int, delete_after_s: float, now: float
) -> int:
    """Moves invalidated segments into the trash, the oldest generation's first. Returns how many."""
    for number in invalidated_generations(db, place):
        rows = db.execute(
            "SELECT key, id, ranks FROM segments WHERE namespace = ? ORDER BY id LIMIT ?", (number, limit)
        ).fetchall()
        for row, segment, ranks in rows:
            db.execute("DELETE FROM segments WHERE key = ?", (row,))
            add_to_trash(db, place.key, SegmentId(segment), ranks, delete_after_s)
        if rows:
            db.execute(
                "UPDATE generations SET segments = max(0, segments - ?) WHERE number = ?", (len(rows), number)
            )
            return len(rows)
        # The generation stays as long as a rank of it may still commit and must be refused.
        db.execute("DELETE FROM parts WHERE namespace = ? AND expires <= ?", (number, now))
        db.execute("UPDATE generations SET segments = 0 WHERE number = ? AND segments <> 0", (number,))
        db.execute(
            "DELETE FROM generations WHERE number = ? AND NOT EXISTS "
            "(SELECT 1 FROM parts WHERE namespace = ?)",
            (number, number),
        )
    return 0


def in_use(db: sqlite3.Connection, place: NamespaceNumbers, now: float) -> bool:
    """Returns whether a namespace has a segment in any state."""

    def found(query: str, *values: float) -> bool:
        return db.execute(query + " LIMIT 1", values).fetchone() is not None

    return found("SELECT 1 FROM trash WHERE namespace = ?", place.key) or any(
        found("SELECT 1 FROM segments WHERE namespace = ?", number)
        or found("SELECT 1 FROM parts WHERE namespace = ? AND expires > ?", number, now)
        for number in (place.generation, *invalidated_generations(db, place))
    )


def erase_some(db: sqlite3.Connection, place: NamespaceNumbers, limit: int) -> int:
    """Deletes up to `limit` rows from the tables that may have many for a namespace. Returns how many."""
    left = limit
    for table, columns in (("blocks", "digest"), ("uses", "parity, line"), ("ghosts", "digest")):
        left -= db.execute(
            f"DELETE FROM {table} WHERE namespace = ? AND ({columns}) IN "
            f"(SELECT {columns} FROM {table} WHERE namespace = ? LIMIT ?)",
            (place.key, place.key, left),
        ).rowcount
    for table in ("events", "fates", "outcomes"):
        left -= db.execute(
            f"DELETE FROM {table} WHERE namespace = ? AND number IN "
            f"(SELECT number FROM {table} WHERE namespace = ? ORDER BY number LIMIT ?)",
            (place.key, place.key, left),
        ).rowcount
    return limit - left


def erase_rest(db: sqlite3.Connection, place: NamespaceNumbers) -> None:
    """Deletes the rows of a namespace that `erase_some` leaves."""
    for number in (place.generation, *invalidated_generations(db, place)):
        db.execute("DELETE FROM parts WHERE namespace = ?", (number,))
    for table in ("generations", "claims", "hot", "totals", "credits", "retained", "sessions"):
        db.execute(f"DELETE FROM {table} WHERE namespace = ?", (place.key,))
    of_id = "(SELECT id FROM namespaces WHERE key = ?)"
    db.execute(f"DELETE FROM quotas WHERE scope = '{LIVES}' || {of_id}", (place.key,))
    db.execute(f"DELETE FROM writers WHERE namespace = {of_id}", (place.key,))
    db.execute("DELETE FROM namespaces WHERE key = ?", (place.key,))
