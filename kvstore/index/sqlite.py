"""SqliteIndex: the index in one SQLite file, shared by the processes and threads of one machine.

The default where there is no Redis. Same contract, same walk (kvstore.index.walk). Reading never
waits for a writer (WAL); writers take turns, each for well under a millisecond (a note of a long
prompt that is new: up to some twenty, which only admission.second_use asks for).

A crash at any instruction loses at most the transaction that it was in: each verb below is one.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

from kvstore.catalogue import Maintenance, Usage
from kvstore.errors import CapacityExceeded, NamespaceUnknown, PermissionDenied, TransientError
from kvstore.eviction import WORTH_MINUTES, worth
from kvstore.index import sqlite_uses
from kvstore.index.contract import (
    HOT_KEPT,
    HOT_MOST,
    INCOMPLETE_TTL_S,
    agreement,
    check_commit,
    check_segments,
    count_digests,
    minute,
)
from kvstore.index.sketch import Marks, Window
from kvstore.index.sqlite_file import SqliteDatabase, SqliteFile, SqliteMemory
from kvstore.index.sqlite_journal import SqliteJournal, Writing
from kvstore.index.sqlite_moves import abandon, drop
from kvstore.index.sqlite_rows import Place, account, bygones, new_generation, place_of, record_of, slices
from kvstore.index.sqlite_upkeep import SqliteUpkeep
from kvstore.index.walk import walk
from kvstore.keys import (
    DIGEST_BYTES,
    NamespaceId,
    SegmentId,
    canonical_json,
    namespace_id,
    split_digests,
)
from kvstore.ports import Claim, CommitState, Index, Outcome, Run
from schemas.namespace import Namespace
from schemas.records import EvictionRule, SegmentRecord, pack_head, pack_part, unpack_record
from schemas.settings import JournalSettings

_JOURNAL = JournalSettings()

# A block's entry together with its segment: dangling entries don't join and so are not found.
_LOOKUP = (
    "SELECT s.id, e.slot, s.record FROM blocks AS e JOIN segments AS s "
    "ON s.namespace = ? AND s.id = e.segment WHERE e.namespace = ? AND e.digest = ?"
)


class SqliteIndex(SqliteUpkeep, SqliteJournal, Maintenance, Index):
    """Index and Maintenance in one SQLite database."""

    def __init__(
        self,
        path: str | SqliteDatabase,
        *,
        journal: JournalSettings = _JOURNAL,
        cost_aware: bool = True,
        grace_s: float = 0.0,
        busy_timeout_s: float = 2.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens the file, and makes it if there is none.

        Raises ConfigError if it is no index or a newer release's. Every other failure is left to the
        verbs: a disk that is full right now is no reason for an engine not to start.
        """
        database = SqliteFile(path, busy_timeout_s) if isinstance(path, str) else path
        super().__init__(database, journal, clock, grace_s)
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
        clock: Callable[[], float] = time.time,
    ) -> Self:
        """For tests: a database inside this process, shared by all indexes of that name."""
        database = SqliteMemory.named(name)
        return cls(database, journal=journal, cost_aware=cost_aware, grace_s=grace_s, clock=clock)

    def __repr__(self) -> str:
        return f"SqliteIndex({self._database.where})"

    def close(self) -> None:
        self._database.close()

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

    def match(self, namespace: NamespaceId, digests: bytes) -> list[Run]:
        count_digests(digests)
        with self._database.reading("match") as db:
            place = place_of(db, namespace)
            return _servable(db, place, digests) if place else []

    def find(self, namespace: NamespaceId, digests: bytes) -> list[Run | None]:
        count_digests(digests)
        runs: list[Run | None] = []
        with self._database.reading("find") as db:
            place = place_of(db, namespace)
            if place is None:
                return [None] * (len(digests) // DIGEST_BYTES)
            for start, digest in enumerate(split_digests(digests)):
                row = db.execute(_LOOKUP, (place.generation, place.key, digest)).fetchone()
                record = record_of(row[2]) if row else None
                runs.append(Run(start, SegmentId(row[0]), row[1], 1, record) if record else None)
        return runs

    def claim(self, namespace: NamespaceId, digests: bytes, segment: SegmentId, ttl_s: float) -> Claim:
        blocks = count_digests(digests)
        check_segments([segment])
        with self._database.reading("claim") as db:
            place = self._known(db, "claim", namespace)
            if sum(run.count for run in _servable(db, place, digests)) == blocks:
                return Claim(blocks, granted=False)  # the usual case, without waiting for a writer
        now = self._clock()
        with self._database.writing("claim") as db:
            place = self._known(db, "claim", namespace)
            present = sum(run.count for run in _servable(db, place, digests))
            if present == blocks:
                return Claim(present, granted=False)
            missing = digests[present * DIGEST_BYTES : (present + 1) * DIGEST_BYTES]
            db.execute("DELETE FROM claims WHERE expires <= ?", (now,))
            row = db.execute(
                "SELECT segment FROM claims WHERE namespace = ? AND digest = ?", (place.key, missing)
            ).fetchone()
            if row and row[0] != segment:
                return Claim(present, granted=False)
            db.execute(
                "INSERT OR REPLACE INTO claims VALUES (?, ?, ?, ?)",
                (place.key, missing, segment, now + ttl_s),
            )
            return Claim(present, granted=True)

    def commit(
        self,
        namespace: NamespaceId,
        segment: SegmentId,
        digests: bytes,
        record: SegmentRecord,
        *,
        rank: int,
        ranks: int,
    ) -> CommitState:
        check_commit(segment, digests, record, rank, ranks)
        with self._database.writing("commit") as db:
            place = self._known(db, "commit", namespace)
            worthy = self._cost_aware and place.kind == "ec"
            commit = _Commit(db, place, segment, digests, record, rank, ranks, worthy, self._writing)
            state = commit.run(self._clock())
            if state is not CommitState.WAITING:
                db.execute(
                    "DELETE FROM claims WHERE namespace = ? AND digest = ? AND segment = ?",
                    (place.key, digests[:DIGEST_BYTES], segment),
                )
        return state

    def touch(self, namespace: NamespaceId, segments: Sequence[SegmentId], now_s: float) -> None:
        check_segments(segments)
        used = minute(now_s)
        with self._database.reading("touch") as db:
            place = place_of(db, namespace)
            if place is None:
                return
            query = "SELECT 1 FROM segments WHERE namespace = ? AND id = ? AND used < ?"
            stale = [s for s in segments if db.execute(query, (place.generation, s, used)).fetchone()]
        # Most touches fall into a minute that is noted already, and then nobody waits for a writer.
        if stale:
            with self._database.writing("touch") as db:
                _touch(db, namespace, stale, used, stale[0] == segments[0])

    def evict(
        self,
        namespace: NamespaceId,
        segments: Sequence[SegmentId],
        *,
        delete_after_s: float,
        rule: EvictionRule,
    ) -> int:
        check_segments(segments)
        gone = 0
        for some in slices(segments):
            with self._database.writing("evict") as db:
                place = place_of(db, namespace)
                if place is None:
                    break
                after_s = self._writing.deletion(delete_after_s)
                gone += len(drop(db, self._writing, place, some, after_s, rule))
                for segment in some:
                    abandon(db, place, segment, after_s)
        return gone

    def note(
        self, namespace: NamespaceId, digests: bytes, *, now_s: float, window_s: float, sketch_bytes: int
    ) -> int:
        window = Window.at(now_s, window_s, sketch_bytes)
        if not count_digests(digests):
            return 0
        marks = Marks.of(digests)
        with self._database.reading("note") as db:
            noted, lines = sqlite_uses.look(db, self._known(db, "note", namespace).key, marks, window)
        # A prompt that is asked for all day is noted once, and then nobody waits for a writer.
        if lines:
            with self._database.writing("note") as db:
                key = self._known(db, "note", namespace).key
                noted, lines = sqlite_uses.look(db, key, marks, window)
                sqlite_uses.write(db, key, window, lines)
        return noted

    def sketch_bits(self, namespace: NamespaceId, *, now_s: float, window_s: float, sketch_bytes: int) -> int:
        """How many bits of the sketch that `note` looks at are set, in its fuller window. For people."""
        window = Window.at(now_s, window_s, sketch_bytes)
        with self._database.reading("sketch_bits") as db:
            place = place_of(db, namespace)
            return 0 if place is None else sqlite_uses.bits(db, place.key, window)

    def tell(self, namespace: NamespaceId, outcomes: Sequence[Outcome]) -> None:
        for outcome in outcomes:
            count_digests(outcome.missing)
        if not outcomes:
            return
        with self._database.writing("tell") as db:
            place = place_of(db, namespace)
            if place is not None:
                self._writing.told(db, place, outcomes)

    def _known(self, db: sqlite3.Connection, verb: str, namespace: NamespaceId) -> Place:
        place = place_of(db, namespace)
        if place is None:
            raise NamespaceUnknown(
                f"sqlite {self._database.where}: {verb}: namespace {namespace} is not registered"
            )
        return place


def _servable(db: sqlite3.Connection, place: Place, digests: bytes) -> list[Run]:
    """The walk over this database."""
    records: dict[SegmentId, SegmentRecord | None] = {}

    def lookup(position: int) -> tuple[SegmentId, int] | None:
        at = position * DIGEST_BYTES
        values = (place.generation, place.key, digests[at : at + DIGEST_BYTES])
        row = db.execute(_LOOKUP, values).fetchone()
        if row is None:
            return None
        records[row[0]] = record_of(row[2])
        return row[0], row[1]

    return walk(len(digests) // DIGEST_BYTES, lookup, records.get)


def _touch(
    db: sqlite3.Connection, namespace: NamespaceId, segments: Sequence[SegmentId], used: int, began: bool
) -> None:
    """Note a use in a minute that is later than those noted; `began`: the first of them began a load."""
    place = place_of(db, namespace)
    if place is None:
        return
    db.executemany(
        "UPDATE segments SET used = ?, keep = ? + worth * ? WHERE namespace = ? AND id = ? AND used < ?",
        [(used, used, WORTH_MINUTES, place.generation, segment, used) for segment in segments],
    )
    if not began:
        return
    db.execute(
        "INSERT INTO hot SELECT key, ?, 1 FROM segments WHERE namespace = ? AND id = ? "
        "ON CONFLICT (segment) DO UPDATE SET minutes = minutes + 1",
        (place.key, place.generation, segments[0]),
    )
    (watched,) = db.execute("SELECT count(*) FROM hot WHERE namespace = ?", (place.key,)).fetchone()
    if watched > HOT_MOST:
        db.execute(
            "DELETE FROM hot WHERE segment IN "
            "(SELECT segment FROM hot WHERE namespace = ? ORDER BY minutes, segment LIMIT ?)",
            (place.key, watched - HOT_KEPT),
        )


@dataclass(frozen=True, slots=True)
class _Commit:
    """One rank's commit inside its transaction."""

    db: sqlite3.Connection
    place: Place
    segment: SegmentId
    digests: bytes
    record: SegmentRecord
    rank: int
    ranks: int
    #: Whether its cost keeps it longer.
    worthy: bool
    writing: Writing

    def run(self, now: float) -> CommitState:
        agreed = agreement(self.digests, self.record, self.ranks)
        part = pack_part(self.record, self.record.parts[0])
        row = self._one("SELECT key, checksum, record FROM segments", self.place.generation)
        if row:
            return self._again(row, agreed, part)
        if self._is_gone():
            return CommitState.REFUSED
        self.db.execute("DELETE FROM parts WHERE expires <= ?", (now,))
        row = self._one("SELECT agreement FROM parts", self.place.generation)
        if row and row[0] != agreed:
            return CommitState.REFUSED
        parts = [part]
        if self.ranks > 1:
            parts = self._collect(agreed, part, now)
            if len(parts) < self.ranks:
                return CommitState.WAITING
        self._show(agreed, parts)
        return CommitState.VISIBLE

    def _again(self, row: tuple[Any, ...], agreed: bytes, part: bytes) -> CommitState:
        """Committed before: an answer got lost, or the index is being rebuilt. The entries are written
        once more, which repairs those that were lost, and nothing is counted twice."""
        key, checksum, packed = row
        head = len(agreed) - len(checksum)
        size = (len(packed) - head) // self.ranks
        mine = packed[head + self.rank * size : head + (self.rank + 1) * size]
        if checksum + packed[:head] != agreed or mine != part:
            return CommitState.REFUSED
        self.db.execute(
            "UPDATE segments SET first = ? WHERE key = ? AND first = x''", (self.digests[:DIGEST_BYTES], key)
        )
        self._enter()
        return CommitState.VISIBLE

    def _is_gone(self) -> bool:
        """Whether it was evicted or invalidated meanwhile."""
        return self._one("SELECT 1 FROM trash", self.place.key) is not None or any(
            self._one(f"SELECT 1 FROM {table}", number) is not None
            for number in bygones(self.db, self.place)
            for table in ("segments", "parts")
        )

    def _collect(self, agreed: bytes, part: bytes, now: float) -> list[bytes]:
        """Keep this rank's part; all parts so far, in rank order."""
        db, where = self.db, "WHERE namespace = ? AND id = ?"
        this = (self.place.generation, self.segment)
        db.execute(
            "INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?, ?, ?, 0)",
            (*this, self.rank, agreed, part, self.record.nbytes, self.ranks),
        )
        db.execute(f"UPDATE parts SET expires = ? {where}", (now + INCOMPLETE_TTL_S, *this))
        rows = db.execute(f"SELECT part FROM parts {where} ORDER BY rank", this).fetchall()
        if len(rows) == self.ranks:
            db.execute(f"DELETE FROM parts {where}", this)
        return [row[0] for row in rows]

    def _show(self, agreed: bytes, parts: list[bytes]) -> None:
        head = pack_head(self.record, self.ranks)
        packed = head + b"".join(parts)
        whole = unpack_record(packed)
        assert whole is not None
        key, used = self.place.key, minute(whole.created_s)
        extra = worth(whole.cost_us, whole.nbytes) if self.worthy else 0
        self.db.execute(
            "INSERT INTO segments (namespace, id, checksum, record, nbytes, slots, ranks, used, depth, "
            "cost, worth, keep, first) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                self.place.generation,
                self.segment,
                agreed[: -len(head)],
                packed,
                whole.nbytes,
                whole.slots,
                self.ranks,
                used,
                whole.depth,
                whole.cost_us,
                extra,
                used + WORTH_MINUTES * extra,
                self.digests[:DIGEST_BYTES],
            ),
        )
        self._enter()
        account(self.db, key, Usage(whole.nbytes, 1, whole.slots, 0, whole.cost_us))
        self.writing.committed(self.db, key, self.segment, self.digests, whole)

    def _enter(self) -> None:
        self.db.executemany(
            "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?)",
            [
                (self.place.key, digest, self.segment, slot)
                for slot, digest in enumerate(split_digests(self.digests))
            ],
        )

    def _one(self, select: str, number: int) -> tuple[Any, ...] | None:
        """The first row of a table that belongs to this segment."""
        query = f"{select} WHERE namespace = ? AND id = ? LIMIT 1"
        row: tuple[Any, ...] | None = self.db.execute(query, (number, self.segment)).fetchone()
        return row
