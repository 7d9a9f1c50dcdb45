"""SqliteJournal: the journal of the index in SQLite, and Writing, by which its transactions write into it.

Rings are rows with numbers that rise by one, so that one range delete keeps them short. A ring's first number
is a time in milliseconds: if the file is deleted and made anew, a reader's old position is before everything
in the new one, unless a thousand events a second had happened all along.
"""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore.index.contract import (
    MAX_SLOTS,
    OPERATIONS_KEPT,
    QUOTA_RULES,
    BadArgument,
    faults_kept,
    is_fault,
    missed,
    reason_kept,
    reason_read,
    remembered,
    totals,
)
from kvstore.index.eviction import ghost_bytes, ghost_step
from kvstore.index.maintenance import Event, Fate, Ghosts, Journal, Operation, Operations, Usage
from kvstore.index.port import Outcome
from kvstore.index.sqlite.rows import NamespaceNumbers, SqlitePart, place_of
from kvstore.keys import (
    DIGEST_BYTES,
    NO_SESSION,
    Digest,
    NamespaceId,
    SegmentId,
    SessionId,
    split_digests,
)
from kvstore.rules.reasons import FAULTS
from schemas.records import EvictionRule, OutcomeOp, SegmentRecord
from schemas.settings import JournalSettings

#: Reasons in SQL that mean that something doesn't work.
_FAULTS = f"({', '.join(repr(name) for name in sorted(FAULTS))})"
#: No row's number has more digits.
_MOST_DIGITS = 18


class SqliteJournal(SqlitePart, Journal, Operations):
    """The part of SqliteIndex that reads the journal, and operations."""

    def events(self, namespace: NamespaceId, *, after: str = "", limit: int = 1000) -> list[Event]:
        with self._database.reading("events") as db:
            rows = db.execute(
                "SELECT number, at, op, segment, first, last, depth, slots, nbytes, rule, by, "
                "fate, ifnull(session, x'') FROM events LEFT JOIN fates USING (namespace, number) "
                "WHERE number > ? AND namespace = (SELECT key FROM namespaces WHERE id = ?) "
                "ORDER BY number LIMIT ?",
                (_number(after), namespace, max(0, limit)),
            ).fetchall()
        return [Event(str(row[0]), *row[1:]) for row in rows]

    def last_position(self, namespace: NamespaceId) -> str:
        with self._database.reading("last_position") as db:
            place = place_of(db, namespace)
            newest = _newest(db, "events", place.key) if place else None
        return "" if newest is None else str(newest)

    def outcomes(self, namespace: NamespaceId, limit: int, *, faults: bool = False) -> list[Outcome]:
        with self._database.reading("outcomes") as db:
            rows = db.execute(
                "SELECT at, request, op, asked, served, reason, position, missing FROM outcomes "
                "WHERE namespace = (SELECT key FROM namespaces WHERE id = ?) "
                f"{f'AND reason IN {_FAULTS} ' if faults else ''}ORDER BY number DESC LIMIT ?",
                (namespace, max(0, limit)),
            ).fetchall()
        return [_outcome(*row) for row in rows]

    def seen(self, namespace: NamespaceId) -> Mapping[str, int]:
        with self._database.reading("seen") as db:
            place = place_of(db, namespace)
            if place is None:
                return {}
            query = "SELECT name, amount FROM totals WHERE namespace = ? AND amount <> 0"
            totals = dict(db.execute(query, (place.key,)).fetchall())
            evicted = _evicted(db, place.key)
        return {**totals, "evicted": evicted} if evicted else totals

    def record_operation(self, verb: str, what: str) -> None:
        with self._database.writing("record_operation") as db:
            entry = (self._clock(), self._by, verb, what)
            made = db.execute("INSERT INTO operations (at, by, verb, what) VALUES (?, ?, ?, ?)", entry)
            db.execute("DELETE FROM operations WHERE number <= ?", ((made.lastrowid or 0) - OPERATIONS_KEPT,))

    def operations(self, limit: int) -> list[Operation]:
        with self._database.reading("operations") as db:
            rows = db.execute(
                "SELECT at, by, verb, what FROM operations ORDER BY number DESC LIMIT ?", (max(0, limit),)
            ).fetchall()
        return [Operation(*row) for row in rows]

    def ghosts(self, namespace: NamespaceId) -> list[Ghosts]:
        with self._database.reading("ghosts") as db:
            rows = db.execute(
                "SELECT step, blocks FROM credits WHERE namespace = "
                "(SELECT key FROM namespaces WHERE id = ?) ORDER BY step",
                (namespace,),
            ).fetchall()
        return [Ghosts(ghost_bytes(step), blocks) for step, blocks in rows]


class Evicted(NamedTuple):
    """A segment that was evicted, as the journal records it."""

    segment: SegmentId
    first: bytes
    depth: int
    slots: int
    nbytes: int
    fate: Fate | None = None
    session: SessionId = NO_SESSION


@dataclass(frozen=True, slots=True)
class Writing:
    """Writes into the journal what the transactions of SqliteIndex do."""

    settings: JournalSettings
    clock: Callable[[], float]
    grace_s: float = 0.0
    by: str = ""

    def deletion(self, delete_after_s: float) -> float:
        """Returns when payloads that become invisible in this transaction may be deleted; see Index.evict."""
        if not delete_after_s or not self.grace_s:
            return delete_after_s
        return self.clock() + self.grace_s

    def committed(
        self, db: sqlite3.Connection, key: int, segment: SegmentId, digests: bytes, record: SegmentRecord
    ) -> None:
        """Records that a segment became visible; `record` has all of its parts."""
        first, last = digests[:DIGEST_BYTES], digests[-DIGEST_BYTES:]
        place = (record.depth, record.slots, record.nbytes)
        self._events(db, key, [("commit", segment, first, last, *place, None)])
        db.execute("DELETE FROM ghosts WHERE namespace = ? AND digest = ?", (key, first))

    def evicted(self, db: sqlite3.Connection, key: int, gone: Sequence[Evicted], rule: EvictionRule) -> None:
        """Records that visible segments were evicted, in this order."""
        number = self._events(
            db,
            key,
            [
                ("evict", one.segment, one.first or None, None, one.depth, one.slots, one.nbytes, rule)
                for one in gone
            ],
        )
        fates = [(key, number + i, one.fate, one.session) for i, one in enumerate(gone) if one.fate]
        if number and fates:
            db.executemany("INSERT OR REPLACE INTO fates VALUES (?, ?, ?, ?)", fates)
        if rule not in QUOTA_RULES:
            return
        stamp, ghosts = _evicted(db, key), []
        for one in gone:
            if one.first:
                ghosts.append((key, one.first, stamp, min(one.slots, MAX_SLOTS)))
            stamp += one.nbytes
        db.execute("UPDATE namespaces SET evicted = ? WHERE key = ?", (stamp, key))
        if self.settings.ghosts:
            db.executemany("INSERT OR REPLACE INTO ghosts VALUES (?, ?, ?, ?)", ghosts)
            self._forget_oldest_ghosts(db, key)

    def invalidated(self, db: sqlite3.Connection, key: int, usage: Usage) -> None:
        """Records that everything became invisible at once."""
        whole = (0, usage.blocks, usage.nbytes)
        self._events(db, key, [("invalidate", None, None, None, *whole, "invalidated")])

    def told(self, db: sqlite3.Connection, place: NamespaceNumbers, outcomes: Sequence[Outcome]) -> None:
        """Records what became of requests: in totals, in the ring of outcomes, and for ghosts as credits."""
        sums: Counter[str] = Counter()
        credits: Counter[int] = Counter()
        for outcome in outcomes:
            sums.update(totals(outcome))
            if missing := missed(outcome):
                credits.update(_credits(db, place.key, missing, outcome.asked - outcome.served))
        db.executemany(
            "INSERT INTO totals VALUES (?, ?, ?) "
            "ON CONFLICT (namespace, name) DO UPDATE SET amount = amount + excluded.amount",
            [(place.key, name, amount) for name, amount in sums.items() if amount],
        )
        db.executemany(
            "INSERT INTO credits VALUES (?, ?, ?) "
            "ON CONFLICT (namespace, step) DO UPDATE SET blocks = blocks + excluded.blocks",
            [(place.key, step, blocks) for step, blocks in credits.items()],
        )
        rows = [_row(outcome) for outcome in outcomes if outcome.reason]
        over = f"AND reason NOT IN {_FAULTS}"
        if any(map(is_fault, outcomes)):
            newest = (
                f"SELECT number FROM outcomes WHERE namespace = {place.key:d} AND reason IN {_FAULTS} "
                f"ORDER BY number DESC LIMIT {faults_kept(self.settings.outcomes):d}"
            )
            over = f"AND (reason NOT IN {_FAULTS} OR number < (SELECT min(number) FROM ({newest})))"
        self._append(db, "outcomes", place.key, rows, self.settings.outcomes, over)

    def _events(self, db: sqlite3.Connection, key: int, rows: Sequence[tuple[Any, ...]]) -> int:
        """Appends events; returns the first one's number, 0 if none are kept."""
        now, bound = self.clock(), self.settings.events
        first = self._append(db, "events", key, [(now, *row, self.by) for row in rows], bound)
        if first:
            db.execute(
                "DELETE FROM fates WHERE namespace = ? AND number < ?", (key, first + len(rows) - bound)
            )
        return first

    def _append(
        self,
        db: sqlite3.Connection,
        ring: str,
        key: int,
        rows: Sequence[tuple[Any, ...]],
        bound: int,
        forgets: str = "",
    ) -> int:
        """Appends rows to a ring, which then forgets the oldest ones over its bound, or those of them that
        `forgets` selects. Returns the first one's number, 0 if nothing was appended."""
        if not rows or not bound:
            return 0
        newest = _newest(db, ring, key)
        number = int(self.clock() * 1000) if newest is None else newest + 1
        marks = ", ".join("?" * (2 + len(rows[0])))
        db.executemany(
            f"INSERT INTO {ring} VALUES ({marks})",
            [(key, number + i, *row) for i, row in enumerate(rows)],
        )
        oldest = number + len(rows) - bound
        db.execute(f"DELETE FROM {ring} WHERE namespace = ? AND number < ? {forgets}", (key, oldest))
        return number

    def _forget_oldest_ghosts(self, db: sqlite3.Connection, key: int) -> None:
        """Forgets the segments that were evicted first, if there are too many ghosts."""
        (count,) = db.execute("SELECT count(*) FROM ghosts WHERE namespace = ?", (key,)).fetchone()
        if count > self.settings.ghosts:
            db.execute(
                "DELETE FROM ghosts WHERE namespace = ? AND digest IN "
                "(SELECT digest FROM ghosts WHERE namespace = ? ORDER BY stamp, digest LIMIT ?)",
                (key, key, count - self.settings.ghosts),
            )


def _number(position: str) -> int:
    """Returns the number in a position; that of "" is less than all. Raises ValueError."""
    if not position:
        return -1
    if not (position.isascii() and position.isdecimal() and len(position) <= _MOST_DIGITS):
        raise BadArgument(f"{position!r} is not the position of an event; they look like 1700000000000")
    return int(position)


def _newest(db: sqlite3.Connection, ring: str, key: int) -> int | None:
    row = db.execute(f"SELECT max(number) FROM {ring} WHERE namespace = ?", (key,)).fetchone()
    return None if row[0] is None else int(row[0])


def _evicted(db: sqlite3.Connection, key: int) -> int:
    return int(db.execute("SELECT evicted FROM namespaces WHERE key = ?", (key,)).fetchone()[0])


def _row(outcome: Outcome) -> tuple[Any, ...]:
    request, first = remembered(outcome)
    counts = (outcome.asked, outcome.served, reason_kept(outcome), outcome.position)
    return (outcome.at_s, request, outcome.op, *counts, first)


def _outcome(
    at_s: float,
    request: bytes,
    op: OutcomeOp,
    asked: int,
    served: int,
    kept: str,
    position: int,
    first: bytes,
) -> Outcome:
    reason, detail = reason_read(kept)
    name = request.decode("utf-8", "surrogatepass")
    return Outcome(at_s, name, op, asked, served, reason, position, first, detail)


def _credits(db: sqlite3.Connection, key: int, missing: bytes, wanted: int) -> Counter[int]:
    """Returns, by step, how many of the `wanted` missing blocks a larger capacity would have kept."""
    evicted = _evicted(db, key)
    query = "SELECT slots, stamp FROM ghosts WHERE namespace = ? AND digest = ?"
    found: list[tuple[int, int, int]] = []
    for i, digest in enumerate(split_digests(missing)):
        row = db.execute(query, (key, Digest(digest))).fetchone()
        if row:
            found.append((i, *row))
    credits: Counter[int] = Counter()
    ends = [at for at, _, _ in found[1:]] + [wanted]
    for (at, slots, stamp), end in zip(found, ends, strict=False):
        blocks = min(slots, wanted - at, end - at)
        if blocks > 0:
            credits[ghost_step(evicted - stamp)] += blocks
    return credits
