"""SqliteSessions: records of sessions in SQLite. The schema is in kvstore.index.sqlite.schema, what they mean
in kvstore.index.sessions."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvstore.errors import NamespaceUnknown
from kvstore.index.contract import (
    UNUSED_S,
    check_segments,
    check_session,
    use_minute,
)
from kvstore.index.eviction import MINUTE_S
from kvstore.index.sessions import (
    ENDED_MINUTE,
    HIGH_S,
    LONGEST_AGO_MINUTES,
    LOW_S,
    MOST_SEGMENTS,
    MOST_SESSIONS,
    NOTHING_RETAINED,
    SESSION_SLICE,
    USE,
    WINDOW_S,
    Allowance,
    Hint,
    HintEffect,
    Priority,
    SessionListing,
    SessionState,
    retained_s,
)
from kvstore.index.sqlite.maintenance import SqliteMaintenance
from kvstore.index.sqlite.recency import (
    count_as_used,
    expire_retained,
    note_load,
    note_uses,
    restore_retained,
)
from kvstore.index.sqlite.rows import NamespaceNumbers, place_of, record_of
from kvstore.keys import NO_SESSION, NamespaceId, SaltId, SegmentId, SessionId, sessions_of_salt
from kvstore.rules.units import batches
from schemas.records import SegmentRecord

#: Sessions that one call forgets.
_AT_ONCE = 200
_PAGE = 200
_PRIORITIES: tuple[Priority, ...] = ("low", "normal", "high")


class SegmentRow(NamedTuple):
    """What a session's call needs to know of a visible segment."""

    key: int
    used: float
    pinned: int
    owner: bytes
    nbytes: int
    salt: bytes


@dataclass(slots=True)
class Record:
    """A session's row."""

    used: int = 0
    until: int = 0
    priority: Priority = "normal"
    ended: bool = False
    known: bool = False

    def retained_until(self, now: float) -> int:
        """Returns until when a use retains, unix second; 0 if it doesn't."""
        return max(self.until, int(now) + HIGH_S if self.priority == "high" else 0)

    @property
    def state(self) -> SessionState:
        """What people are told."""
        return "ended" if self.ended else "retained" if self.until else "live"


def recall(db: sqlite3.Connection, place: NamespaceNumbers, session: SessionId, now: float) -> Record:
    """Returns a session's record, a new one if there is none."""
    row = db.execute(
        "SELECT used, until, priority, ended FROM sessions WHERE namespace = ? AND id = ?",
        (place.key, session),
    ).fetchone()
    if row is None:
        return Record()
    used, until, priority, ended = row
    return Record(used, until if until > now else 0, _PRIORITIES[priority], bool(ended), known=True)


def remember(
    db: sqlite3.Connection,
    place: NamespaceNumbers,
    session: SessionId,
    record: Record,
    now: float,
) -> None:
    """Writes a session's row, or deletes it if there is nothing to remember; forgets those that are too
    many."""
    plain = not record.until and record.priority == "normal" and not record.ended
    if plain and not own_segments(db, place, session, 1):
        if record.known:
            db.execute("DELETE FROM sessions WHERE namespace = ? AND id = ?", (place.key, session))
            db.execute("UPDATE namespaces SET sessions = max(0, sessions - 1) WHERE key = ?", (place.key,))
        return
    if not record.known:
        (count,) = db.execute("SELECT sessions FROM namespaces WHERE key = ?", (place.key,)).fetchone()
        if count >= MOST_SESSIONS:
            _forget(db, place, "seen >= ? ORDER BY seen", 0, 1 + count - MOST_SESSIONS)
        db.execute("UPDATE namespaces SET sessions = sessions + 1 WHERE key = ?", (place.key,))
    db.execute(
        "INSERT OR REPLACE INTO sessions VALUES (?, ?, ?, ?, ?, ?, ?)",
        (
            place.key,
            session,
            int(now),
            record.used,
            record.until,
            _PRIORITIES.index(record.priority),
            record.ended,
        ),
    )


def forget_idle(db: sqlite3.Connection, place: NamespaceNumbers, now: float) -> None:
    """Forgets some of the sessions that are too old: before any is recalled, or it would be counted as known
    and then be gone."""
    _forget(db, place, "seen <= ? ORDER BY seen", int(now) - 2 * WINDOW_S, _AT_ONCE)


def _forget(db: sqlite3.Connection, place: NamespaceNumbers, which: str, seen: int, most: int) -> None:
    gone = db.execute(
        "DELETE FROM sessions WHERE namespace = ? AND id IN "
        f"(SELECT id FROM sessions WHERE namespace = ? AND {which} LIMIT ?)",
        (place.key, place.key, seen, most),
    ).rowcount
    if gone:
        db.execute("UPDATE namespaces SET sessions = max(0, sessions - ?) WHERE key = ?", (gone, place.key))


def own_segments(
    db: sqlite3.Connection, place: NamespaceNumbers, session: SessionId, most: int = MOST_SEGMENTS
) -> list[SegmentId]:
    """Returns the segments that are a session's own, in the order in which they were saved."""
    rows = db.execute(
        "SELECT id FROM segments WHERE namespace = ? AND owner = ? AND owner <> x'' ORDER BY key LIMIT ?",
        (place.generation, session, most),
    )
    return [SegmentId(segment) for (segment,) in rows]


def row_of(db: sqlite3.Connection, place: NamespaceNumbers, segment: SegmentId) -> SegmentRow | None:
    """Returns a visible segment."""
    row = db.execute(
        "SELECT key, used, pinned, owner, nbytes, salt FROM segments WHERE namespace = ? AND id = ?",
        (place.generation, segment),
    ).fetchone()
    return SegmentRow(*row) if row else None


def retain(
    db: sqlite3.Connection,
    place: NamespaceNumbers,
    rows: Sequence[SegmentRow],
    session: SessionId,
    until: int,
    allowance: Allowance,
) -> tuple[int, int]:
    """Retains segments that aren't pinned, as long as the bytes allow it; what comes after one that was
    refused is refused as well. What is retained already, while that is more than they allow, is so for no
    longer than it was. A session holds what is retained of its own, and what this call adds.

    Returns bytes retained and bytes refused.
    """
    held = 0
    of_salt: dict[bytes, int] = {}
    for salt, nbytes in db.execute(
        "SELECT salt, sum(nbytes) FROM retained WHERE namespace = ? GROUP BY salt", (place.key,)
    ):
        held += nbytes
        of_salt[salt] = nbytes
    (mine,) = db.execute(
        "SELECT coalesce(sum(retained.nbytes), 0) FROM retained "
        "JOIN segments ON segments.key = retained.segment "
        "WHERE segments.namespace = ? AND segments.owner = ? AND segments.owner <> x''",
        (place.generation, session),
    ).fetchone()
    done = refused = 0
    for row in rows:
        if row.pinned:
            continue
        old = db.execute("SELECT until, used FROM retained WHERE segment = ?", (row.key,)).fetchone()
        (used,) = db.execute("SELECT used FROM segments WHERE key = ?", (row.key,)).fetchone()
        upto, more = until, 0 if old else row.nbytes
        full = held + more > allowance.namespace_bytes or mine + more > allowance.session_bytes
        if row.salt:
            full = full or of_salt.get(row.salt, 0) + more > allowance.salt_bytes
        if (full and (not old or until > old[0])) or (refused and not old):
            refused += row.nbytes
            continue
        if old:
            if used <= old[0] // MINUTE_S:
                used = old[1]
            if old[0] > until and row.owner != session:
                upto = old[0]
        held += more
        mine += more
        of_salt[row.salt] = of_salt.get(row.salt, 0) + more
        done += row.nbytes
        db.execute(
            "INSERT OR REPLACE INTO retained VALUES (?, ?, ?, ?, ?, ?)",
            (row.key, place.key, upto, _bounded(used, upto), row.nbytes, row.salt),
        )
        count_as_used(db, row.key, max(upto // MINUTE_S, used))
    return done, refused


def _bounded(used: float, until: int) -> int:
    last = until // MINUTE_S
    return min(last, max(int(used), last - LONGEST_AGO_MINUTES))


def demote(db: sqlite3.Connection, rows: Sequence[SegmentRow]) -> int:
    """What nobody else uses goes first from now on. Returns how many didn't before."""
    moved = 0
    for row in rows:
        (used,) = db.execute("SELECT used FROM segments WHERE key = ?", (row.key,)).fetchone()
        if not row.pinned and used != ENDED_MINUTE:
            count_as_used(db, row.key, ENDED_MINUTE)
            moved += 1
    return moved


def adopt(
    db: sqlite3.Connection,
    place: NamespaceNumbers,
    session: SessionId,
    segment: SegmentId,
    now: float,
    allowance: Allowance,
) -> None:
    """A session's request has saved a segment, which is visible: it counts as the session's others do."""
    expire_retained(db, place, now)
    forget_idle(db, place, now)
    record = recall(db, place, session, now)
    db.execute(
        "UPDATE segments SET owner = ? WHERE namespace = ? AND id = ?", (session, place.generation, segment)
    )
    row = row_of(db, place, segment)
    assert row is not None
    record.used = max(record.used, int(row.used + UNUSED_S / MINUTE_S))
    if record.ended:
        demote(db, [row])
    elif record.priority == "low":
        count_as_used(db, row.key, max(0, row.used - LOW_S // MINUTE_S))
    elif until := record.retained_until(now):
        retain(db, place, [row], session, until, allowance)
    _disown_oldest(db, place, session)
    remember(db, place, session, record, now)


def _disown_oldest(db: sqlite3.Connection, place: NamespaceNumbers, session: SessionId) -> None:
    (count,) = db.execute(
        "SELECT count(*) FROM segments WHERE namespace = ? AND owner = ? AND owner <> x''",
        (place.generation, session),
    ).fetchone()
    for segment in own_segments(db, place, session, count - MOST_SEGMENTS) if count > MOST_SEGMENTS else ():
        db.execute(
            "UPDATE segments SET owner = x'' WHERE namespace = ? AND id = ?", (place.generation, segment)
        )


class SqliteSessions(SqliteMaintenance):
    """The part of SqliteIndex that remembers sessions."""

    def session(
        self,
        namespace: NamespaceId,
        session: SessionId,
        segments: Sequence[SegmentId],
        used_s: float | None = None,
        hint: Hint = USE,
        *,
        allowance: Allowance = NOTHING_RETAINED,
    ) -> HintEffect:
        check_segments(segments)
        check_session(session)
        demoted = retained = refused = 0
        used = use_minute(self._clock(), used_s)
        slices = list(batches(list(dict.fromkeys(segments)), SESSION_SLICE)) or [[]]
        for number, some in enumerate(slices):
            first, last = number == 0, number == len(slices) - 1
            retain_s = None if hint.end or not first else hint.retain_s
            part = Hint(last and hint.end, retain_s, hint.priority)
            with self._database.writing("session") as db:
                place = place_of(db, namespace)
                if place is None:
                    raise NamespaceUnknown(
                        f"sqlite {self._database.where}: session: namespace {namespace} is not registered"
                    )
                told = self._told(db, place, session, some, used, part, allowance, began=first)
            demoted += told.demoted
            retained += told.retained_bytes
            refused += told.refused_bytes
        return HintEffect(told.state, told.segments, demoted, retained, refused)

    def _told(
        self,
        db: sqlite3.Connection,
        place: NamespaceNumbers,
        session: SessionId,
        segments: Sequence[SegmentId],
        used: float,
        hint: Hint,
        allowance: Allowance,
        *,
        began: bool,
    ) -> HintEffect:
        now = self._clock()
        expire_retained(db, place, now)
        forget_idle(db, place, now)
        record = recall(db, place, session, now)
        retain_s = retained_s(hint)
        if retain_s is not None:
            record.until = int(now) + retain_s if retain_s else 0
        record.priority = hint.priority or record.priority
        record.ended = hint.end
        if hint.end:
            record.until = 0
        passed, chosen = set(segments), list(segments)
        if retain_s is not None:
            # What is told of all that it uses is told of its own as well.
            chosen += [one for one in own_segments(db, place, session) if one not in passed]
        rows = [row for one in chosen if (row := row_of(db, place, one))]
        head = row_of(db, place, segments[0]) if began and segments else None
        low = LOW_S // MINUTE_S if record.priority == "low" else 0
        note_uses(db, [(row.key, max(0, used - (low if row.owner == session else 0))) for row in rows], used)
        # Compared with what it counts as: else every use by a low session would be a minute's first.
        if head and head.used < max(0, int(used) - (low if head.owner == session else 0)):
            note_load(db, place, head.key)
        db.executemany(
            "UPDATE segments SET owner = x'' WHERE key = ? AND owner <> ?",
            [(row.key, session) for row in rows],
        )
        own = [row for one in own_segments(db, place, session) if (row := row_of(db, place, one))]
        demoted = retained = refused = 0
        if record.ended:
            restore_retained(db, [row.key for row in own])
            demoted = demote(db, own)
        elif until := record.retained_until(now):
            retained, refused = retain(db, place, rows, session, until, allowance)
        elif retain_s is not None:
            restore_retained(db, [row.key for row in own])
        record.used = max(record.used, int(used))
        remember(db, place, session, record, now)
        return HintEffect(record.state, len(own), demoted, retained, refused)

    def owned(self, namespace: NamespaceId, session: SessionId) -> dict[SegmentId, SegmentRecord]:
        check_session(session)
        with self._database.reading("owned") as db:
            place = place_of(db, namespace)
            if place is None or not recall(db, place, session, self._clock()).known:
                return {}
            rows = db.execute(
                "SELECT id, record FROM segments WHERE namespace = ? AND owner = ? AND owner <> x'' LIMIT ?",
                (place.generation, session, MOST_SEGMENTS),
            ).fetchall()
        known = ((SegmentId(segment), record_of(value)) for segment, value in rows)
        return {segment: record for segment, record in known if record is not None}

    def sessions(self, namespace: NamespaceId) -> Iterator[SessionListing]:
        after = b""
        while True:
            with self._database.reading("sessions") as db:
                place = place_of(db, namespace)
                if place is None:
                    return
                rows = db.execute(
                    "SELECT id FROM sessions WHERE namespace = ? AND id > ? ORDER BY id LIMIT ?",
                    (place.key, after, _PAGE),
                ).fetchall()
                found = [self._listed(db, place, SessionId(session)) for (session,) in rows]
            yield from (one for one in found if one)
            if len(rows) < _PAGE:
                return
            after = rows[-1][0]

    def find_sessions(
        self, namespace: NamespaceId, sessions: Sequence[SessionId]
    ) -> list[SessionListing | None]:
        for session in sessions:
            check_session(session)
        with self._database.reading("find_sessions") as db:
            place = place_of(db, namespace)
            return [self._listed(db, place, session) if place else None for session in sessions]

    def _listed(
        self, db: sqlite3.Connection, place: NamespaceNumbers, session: SessionId
    ) -> SessionListing | None:
        record = recall(db, place, session, self._clock())
        if not record.known:
            return None
        segments, nbytes = db.execute(
            "SELECT count(*), coalesce(sum(nbytes), 0) FROM segments "
            "WHERE namespace = ? AND owner = ? AND owner <> x''",
            (place.generation, session),
        ).fetchone()
        return SessionListing(
            session,
            record.state,
            float(record.until),
            record.priority,
            float(record.used * MINUTE_S),
            segments,
            nbytes,
        )

    def owners(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> list[SessionId]:
        check_segments(segments)
        with self._database.reading("owners") as db:
            place = place_of(db, namespace)
            rows = [row_of(db, place, segment) if place else None for segment in segments]
        return [SessionId(row.owner) if row else NO_SESSION for row in rows]

    def retained(self, namespace: NamespaceId) -> dict[SaltId, int]:
        with self._database.reading("retained") as db:
            place = place_of(db, namespace)
            rows = db.execute(
                "SELECT salt, sum(nbytes) FROM retained WHERE namespace = ? AND until > ? GROUP BY salt",
                (place.key if place else None, self._clock()),
            ).fetchall()
        sums = {SaltId(salt): nbytes for salt, nbytes in rows if salt}
        return {SaltId(b""): sum(nbytes for _, nbytes in rows), **sums} if rows else {}

    def expire(self, namespace: NamespaceId) -> int:
        gone = 0
        while True:
            with self._database.writing("expire") as db:
                place = place_of(db, namespace)
                some = expire_retained(db, place, self._clock()) if place else 0
            gone += some
            if not some:
                return gone


def forget_sessions(db: sqlite3.Connection, place: NamespaceNumbers, salt: SaltId) -> None:
    """Forgets a salt's sessions, and with an empty one all: nothing is their own any more."""
    begin = sessions_of_salt(salt) if salt else b""
    rows = db.execute(
        "SELECT id FROM sessions WHERE namespace = ? AND substr(id, 1, ?) = ?", (place.key, len(begin), begin)
    ).fetchall()
    for (session,) in rows:
        db.execute(
            "UPDATE segments SET owner = x'' WHERE namespace = ? AND owner = ? AND owner <> x''",
            (place.generation, session),
        )
        db.execute("DELETE FROM sessions WHERE namespace = ? AND id = ?", (place.key, session))
    db.execute("UPDATE namespaces SET sessions = max(0, sessions - ?) WHERE key = ?", (len(rows), place.key))
