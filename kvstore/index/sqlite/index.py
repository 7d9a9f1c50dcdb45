"""SqliteIndex: the index in one SQLite file, shared by the processes and threads of one machine.

It is the default where there is no Redis, with the same contract and the same walk (kvstore.index.walk).
Reading never waits for a writer (WAL); writers take turns, each for well under a millisecond (the note of a
long new prompt takes up to some twenty, but only admission.second_use asks for it).

A crash at any instruction loses at most the transaction that it was in: each verb below is one, or one for
each slice of its segments.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Self

from kvstore.errors import CapacityExceeded, NamespaceUnknown, PermissionDenied, TransientError
from kvstore.files import OWNER, Access
from kvstore.index.contract import (
    LONGEST_HELD,
    check_commit,
    check_replaced,
    check_segments,
    check_session,
    count_digests,
    use_minute,
)
from kvstore.index.maintenance import FullIndex
from kvstore.index.port import Claim, CommitState, Outcome, Replaced, Run
from kvstore.index.sessions import NOTHING_RETAINED, Allowance
from kvstore.index.sketch import LINE_BYTES, Marks, Window, note
from kvstore.index.sqlite.commits import RankCommit
from kvstore.index.sqlite.evictions import evict, evict_incomplete
from kvstore.index.sqlite.file import IndexFile, IndexMemory
from kvstore.index.sqlite.journal import SqliteJournal
from kvstore.index.sqlite.recency import note_load, note_uses
from kvstore.index.sqlite.rows import (
    LIVES,
    NamespaceNumbers,
    new_generation,
    number_in,
    place_of,
    record_of,
)
from kvstore.index.sqlite.sessions import adopt
from kvstore.index.sqlite.verdicts import SqliteVerdicts
from kvstore.index.walk import walk
from kvstore.keys import (
    DIGEST_BYTES,
    NO_SESSION,
    NamespaceId,
    SegmentId,
    SessionId,
    canonical_json,
    namespace_id,
    split_digests,
)
from kvstore.sqlite import SqliteDatabase
from schemas.namespace import Namespace
from schemas.records import EvictionRule, SegmentRecord
from schemas.settings import JournalSettings

_JOURNAL = JournalSettings()
# The sketch of uses has one row per line. The algorithm stands in kvstore.index.sketch.
_USES_LINE = "SELECT bits FROM uses WHERE namespace = ? AND parity = ? AND line = ? AND sketch = ?"
_USES_LINES = "SELECT bits FROM uses WHERE namespace = ? AND parity = ? AND sketch = ?"

# Selects a block's entry together with its segment: dangling entries don't join and so are not found.
_LOOKUP = (
    "SELECT s.id, e.slot, s.record FROM blocks AS e JOIN segments AS s "
    "ON s.namespace = ? AND s.id = e.segment WHERE e.namespace = ? AND e.digest = ?"
)


class SqliteIndex(SqliteVerdicts, SqliteJournal, FullIndex):
    """The index in one SQLite database."""

    def __init__(
        self,
        path: str | SqliteDatabase,
        *,
        journal: JournalSettings = _JOURNAL,
        cost_aware: bool = True,
        grace_s: float = 0.0,
        busy_timeout_s: float = 2.0,
        by: str = "",
        access: Access = OWNER,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens the file, and makes it if there is none.

        Raises ConfigError if it is no index, or a newer release's. Every other failure is left to the
        verbs: a disk that is full right now is no reason for an engine not to start.
        """
        database = IndexFile(path, busy_timeout_s, access) if isinstance(path, str) else path
        super().__init__(database, journal, clock, grace_s, by)
        self._cost_aware = cost_aware
        with suppress(TransientError, PermissionDenied, CapacityExceeded), self._database.reading("open"):
            pass

    @classmethod
    def in_memory(
        cls,
        name: str,
        *,
        journal: JournalSettings = _JOURNAL,
        cost_aware: bool = True,
        grace_s: float = 0.0,
        by: str = "",
        clock: Callable[[], float] = time.time,
    ) -> Self:
        """Opens, for tests, a database inside this process that all indexes of that name share."""
        database = IndexMemory.named(name)
        return cls(database, journal=journal, cost_aware=cost_aware, grace_s=grace_s, by=by, clock=clock)

    def __repr__(self) -> str:
        return f"SqliteIndex({self._database.where})"

    def close(self) -> None:
        self._database.close()

    def memory(self) -> None:
        """Returns None: the index is a file."""
        return

    def warnings(self) -> list[str]:
        return []

    def register(self, namespace: Namespace, *, expected_blocks: int) -> NamespaceId:
        name = namespace_id(namespace)
        with self._database.writing("register") as db:
            made = db.execute(
                "INSERT OR IGNORE INTO namespaces (id, json, kind, tenant) VALUES (?, ?, ?, ?)",
                (name, canonical_json(namespace), namespace.kind, namespace.tenant),
            )
            if made.rowcount:
                new_generation(db, made.lastrowid or 0)
            db.execute("UPDATE namespaces SET seen = ? WHERE id = ?", (self._clock(), name))
        return name

    def match(self, namespace: NamespaceId, digests: bytes, *, fresh: bool = False) -> list[Run]:
        count_digests(digests)
        with self._database.reading("match") as db:
            place = place_of(db, namespace)
            return _servable(db, place, digests, self._oldest(db, namespace)) if place else []

    def find(
        self, namespace: NamespaceId, digests: bytes, chain: bytes = b"", *, fresh: bool = False
    ) -> list[Run | None]:
        count_digests(digests)
        runs: list[Run | None] = []
        with self._database.reading("find") as db:
            place = place_of(db, namespace)
            if place is None:
                return [None] * (len(digests) // DIGEST_BYTES)
            oldest = self._oldest(db, namespace)
            for start, digest in enumerate(split_digests(digests)):
                row = db.execute(_LOOKUP, (place.generation, place.key, digest)).fetchone()
                record = _young(row[2], oldest) if row else None
                runs.append(Run(start, SegmentId(row[0]), row[1], 1, record) if record else None)
        return runs

    def claim(self, namespace: NamespaceId, digests: bytes, segment: SegmentId, ttl_s: float) -> Claim:
        blocks = count_digests(digests)
        check_segments([segment])
        now = self._clock()
        with self._database.reading("claim") as db:
            place = self._known(db, "claim", namespace)
            if sum(run.count for run in _servable(db, place, digests, self._oldest(db, namespace))) == blocks:
                return Claim(blocks, False, now)  # the usual case, without waiting for a writer
        with self._database.writing("claim") as db:
            place = self._known(db, "claim", namespace)
            runs = _servable(db, place, digests, self._oldest(db, namespace))
            present = sum(run.count for run in runs)
            if present == blocks:
                return Claim(present, False, now)
            missing = digests[present * DIGEST_BYTES : (present + 1) * DIGEST_BYTES]
            db.execute("DELETE FROM claims WHERE expires <= ?", (now,))
            row = db.execute(
                "SELECT segment, expires FROM claims WHERE namespace = ? AND digest = ?", (place.key, missing)
            ).fetchone()
            # One that lasts much longer is from before the clock was set back, perhaps by somebody dead.
            if row and row[0] != segment and row[1] <= now + LONGEST_HELD * ttl_s:
                return Claim(present, False, now)
            db.execute(
                "INSERT OR REPLACE INTO claims VALUES (?, ?, ?, ?)",
                (place.key, missing, segment, now + ttl_s),
            )
            return Claim(present, True, now)

    def commit(
        self,
        namespace: NamespaceId,
        segment: SegmentId,
        digests: bytes,
        record: SegmentRecord,
        *,
        rank: int,
        ranks: int,
        session: SessionId = NO_SESSION,
        allowance: Allowance = NOTHING_RETAINED,
        replaces: Sequence[Replaced] = (),
    ) -> CommitState:
        check_commit(segment, digests, record, rank, ranks)
        check_replaced(replaces)
        check_session(session, none=True)
        with self._database.writing("commit") as db:
            place = self._known(db, "commit", namespace)
            cost_counts = self._cost_aware and place.kind == "ec"
            how = (cost_counts, self._writing, session, replaces)
            commit = RankCommit(db, place, segment, digests, record, rank, ranks, *how)
            new = db.execute(
                "SELECT 1 FROM segments WHERE namespace = ? AND id = ?", (place.generation, segment)
            ).fetchone()
            state = commit.run(self._clock())
            if session and state is CommitState.VISIBLE and not new and not commit.shared:
                adopt(db, place, session, segment, self._clock(), allowance)
            if state is not CommitState.WAITING:
                # On the first block, or, of what replaces others, on the first that was not stored.
                claimed = split_digests(digests if replaces else digests[:DIGEST_BYTES])
                db.executemany(
                    "DELETE FROM claims WHERE namespace = ? AND digest = ? AND segment = ?",
                    [(place.key, one, segment) for one in claimed],
                )
        return state

    def touch(
        self, namespace: NamespaceId, segments: Sequence[SegmentId], used_s: float | None = None
    ) -> None:
        check_segments(segments)
        used = use_minute(self._clock(), used_s)
        with self._database.reading("touch") as db:
            place = place_of(db, namespace)
            if place is None:
                return
            rows = [_recency(db, place, segment) for segment in segments]
        new = [row[0] for row in rows if row and (row[1] < used or row[2] or (row[3] or used) < int(used))]
        # Most touches fall into a minute that is noted already, and these don't wait for a writer.
        if new:
            with self._database.writing("touch") as db:
                place = place_of(db, namespace)
                note_uses(db, [(key, used) for key in new], used)
                db.executemany("UPDATE segments SET owner = x'' WHERE key = ?", [(key,) for key in new])
                if place and (first := rows[0]) and first[1] < int(used):
                    note_load(db, place, first[0])

    def evict(
        self,
        namespace: NamespaceId,
        segments: Sequence[SegmentId],
        *,
        delete_after_s: float,
        rule: EvictionRule,
    ) -> int:
        def change(db: sqlite3.Connection, place: NamespaceNumbers, some: Sequence[SegmentId]) -> int:
            after_s = self._writing.deletion(delete_after_s)
            gone = evict(db, self._writing, place, some, after_s, rule)
            for segment in some:
                evict_incomplete(db, place, segment, after_s)
            return len(gone)

        check_segments(segments)
        return self._changed("evict", namespace, segments, change)

    def note(
        self, namespace: NamespaceId, digests: bytes, *, now_s: float, window_s: float, sketch_bytes: int
    ) -> int:
        window = Window.at(now_s, window_s, sketch_bytes)
        if not count_digests(digests):
            return 0
        marks = Marks.of(digests)
        with self._database.reading("note") as db:
            noted, lines = _look_at_uses(db, self._known(db, "note", namespace).key, marks, window)
        # A prompt that is asked for all day is written once a window; its other notes wait for no writer.
        if lines:
            with self._database.writing("note") as db:
                key = self._known(db, "note", namespace).key
                noted, lines = _look_at_uses(db, key, marks, window)
                _write_uses(db, key, window, lines)
        return noted

    def sketch_bits(self, namespace: NamespaceId, *, now_s: float, window_s: float, sketch_bytes: int) -> int:
        window = Window.at(now_s, window_s, sketch_bytes)
        with self._database.reading("sketch_bits") as db:
            place = place_of(db, namespace)
            return 0 if place is None else _bits_of_uses(db, place.key, window)

    def tell(self, namespace: NamespaceId, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            count_digests(outcome.missing)
        if not outcomes:
            return
        with self._database.writing("tell") as db:
            place = place_of(db, namespace)
            if place is not None:
                self._writing.told(db, place, outcomes)

    def _oldest(self, db: sqlite3.Connection, namespace: NamespaceId) -> float:
        """Returns the unix second up to which what was created is too old to serve anybody."""
        row = db.execute("SELECT nbytes FROM quotas WHERE scope = ?", (f"{LIVES}{namespace}",)).fetchone()
        ttl_s = number_in(row[0], least=0) if row else 0
        return self._clock() - ttl_s if ttl_s else float("-inf")

    def _known(self, db: sqlite3.Connection, verb: str, namespace: NamespaceId) -> NamespaceNumbers:
        place = place_of(db, namespace)
        if place is None:
            raise NamespaceUnknown(
                f"sqlite {self._database.where}: {verb}: namespace {namespace} is not registered"
            )
        return place


def _young(record: bytes, oldest: float) -> SegmentRecord | None:
    """Returns a record of what was created after `oldest`, unix seconds."""
    known = record_of(record)
    return known if known is not None and known.created_s > oldest else None


def _servable(db: sqlite3.Connection, place: NamespaceNumbers, digests: bytes, oldest: float) -> list[Run]:
    """Walks a chain in this database, of what was created after `oldest`."""
    records: dict[SegmentId, SegmentRecord | None] = {}

    def lookup(position: int) -> tuple[SegmentId, int] | None:
        at = position * DIGEST_BYTES
        values = (place.generation, place.key, digests[at : at + DIGEST_BYTES])
        row = db.execute(_LOOKUP, values).fetchone()
        if row is None:
            return None
        records[row[0]] = _young(row[2], oldest)
        return row[0], row[1]

    return walk(len(digests) // DIGEST_BYTES, lookup, records.get)


def _recency(
    db: sqlite3.Connection, place: NamespaceNumbers, segment: SegmentId
) -> tuple[int, float, bytes, int | None] | None:
    """Returns of a visible segment its key, the minute that counts as its last use, whose own it is and, if
    it is retained, the minute of its true last use."""
    row: tuple[int, float, bytes, int | None] | None = db.execute(
        "SELECT s.key, s.used, s.owner, r.used FROM segments AS s "
        "LEFT JOIN retained AS r ON r.segment = s.key WHERE s.namespace = ? AND s.id = ?",
        (place.generation, segment),
    ).fetchone()
    return row


def _look_at_uses(
    db: sqlite3.Connection, key: int, marks: Marks, window: Window
) -> tuple[int, dict[int, int]]:
    """Returns how many leading blocks were noted before, and the lines to write so that all blocks are."""
    before = 1 - window.parity
    return note(
        marks,
        window.lines,
        lambda line: _uses_line(db, (key, window.parity, line, window.now)),
        lambda line: _uses_line(db, (key, before, line, window.before)),
    )


def _write_uses(db: sqlite3.Connection, key: int, window: Window, lines: dict[int, int]) -> None:
    """Writes lines into this window's sketch, over the lines that an older window has left there."""
    db.executemany(
        "INSERT OR REPLACE INTO uses VALUES (?, ?, ?, ?, ?)",
        [
            (key, window.parity, line, window.now, bits.to_bytes(LINE_BYTES))
            for line, bits in sorted(lines.items())
        ],
    )


def _bits_of_uses(db: sqlite3.Connection, key: int, window: Window) -> int:
    """Returns how many bits are set in the fuller one of the two windows."""
    found = []
    for parity, sketch in ((window.parity, window.now), (1 - window.parity, window.before)):
        rows = db.execute(_USES_LINES, (key, parity, sketch))
        found.append(sum(int.from_bytes(row[0]).bit_count() for row in rows))
    return max(found)


def _uses_line(db: sqlite3.Connection, where: tuple[int, int, int, str]) -> int:
    row = db.execute(_USES_LINE, where).fetchone()
    return int.from_bytes(row[0]) if row else 0
