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

from kvstore.errors import CapacityExceeded, NamespaceUnknown, PermissionDenied, TransientError
from kvstore.index import sqlite_uses
from kvstore.index.contract import (
    INCOMPLETE_TTL_S,
    agreement,
    check_commit,
    check_segments,
    count_digests,
    minute,
)
from kvstore.index.sketch import Marks, Window
from kvstore.index.sqlite_catalogue import (
    SqliteCatalogue,
    account,
    discard,
    drop,
    namespace_key,
    record_of,
)
from kvstore.index.sqlite_file import SqliteDatabase, SqliteFile, SqliteMemory
from kvstore.index.walk import walk
from kvstore.keys import (
    DIGEST_BYTES,
    NamespaceId,
    SegmentId,
    canonical_json,
    namespace_id,
    split_digests,
)
from kvstore.ports import Claim, CommitState, Index, Run
from schemas.namespace import Namespace
from schemas.records import SegmentRecord, pack_head, pack_part

# A block's entry together with its segment: dangling entries don't join and so are not found.
_LOOKUP = (
    "SELECT s.id, e.slot, s.record FROM entries e JOIN segments s ON s.key = e.segment "
    "WHERE e.namespace = ? AND e.digest = ?"
)


class SqliteIndex(SqliteCatalogue, Index):
    """Index and Catalogue in one SQLite database."""

    def __init__(
        self,
        path: str | SqliteDatabase,
        *,
        busy_timeout_s: float = 2.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Opens the file, and makes it if there is none.

        Raises ConfigError if it is no index or a newer release's. Every other failure is left to the
        verbs: a disk that is full right now is no reason for an engine not to start.
        """
        super().__init__(SqliteFile(path, busy_timeout_s) if isinstance(path, str) else path)
        self._clock = clock
        with suppress(TransientError, PermissionDenied, CapacityExceeded), self._database.reading("open"):
            pass

    @classmethod
    def in_memory(cls, name: str, *, clock: Callable[[], float] = time.time) -> Self:
        """For tests: a database inside this process, shared by all indexes of that name."""
        return cls(SqliteMemory.named(name), clock=clock)

    def __repr__(self) -> str:
        return f"SqliteIndex({self._database.where})"

    def close(self) -> None:
        self._database.close()

    def register(self, namespace: Namespace, *, expected_blocks: int) -> NamespaceId:
        name = namespace_id(namespace)
        with self._database.writing("register") as db:
            db.execute(
                "INSERT OR IGNORE INTO namespaces (id, json) VALUES (?, ?)",
                (name, canonical_json(namespace)),
            )
        return name

    def match(self, namespace: NamespaceId, digests: bytes) -> list[Run]:
        count_digests(digests)
        with self._database.reading("match") as db:
            key = namespace_key(db, namespace)
            return [] if key is None else _servable(db, key, digests)

    def find(self, namespace: NamespaceId, digests: bytes) -> list[Run | None]:
        count_digests(digests)
        runs: list[Run | None] = []
        with self._database.reading("find") as db:
            key = namespace_key(db, namespace)
            for start, digest in enumerate(split_digests(digests)):
                row = db.execute(_LOOKUP, (key, digest)).fetchone()
                record = record_of(row[2]) if row else None
                runs.append(Run(start, SegmentId(row[0]), row[1], 1, record) if record else None)
        return runs

    def claim(self, namespace: NamespaceId, digests: bytes, segment: SegmentId, ttl_s: float) -> Claim:
        blocks = count_digests(digests)
        check_segments([segment])
        with self._database.reading("claim") as db:
            key = self._known(db, "claim", namespace)
            if sum(run.count for run in _servable(db, key, digests)) == blocks:
                return Claim(blocks, granted=False)  # the usual case, without waiting for a writer
        now = self._clock()
        with self._database.writing("claim") as db:
            key = self._known(db, "claim", namespace)
            present = sum(run.count for run in _servable(db, key, digests))
            if present == blocks:
                return Claim(present, granted=False)
            missing = digests[present * DIGEST_BYTES : (present + 1) * DIGEST_BYTES]
            db.execute("DELETE FROM claims WHERE expires <= ?", (now,))
            row = db.execute(
                "SELECT segment FROM claims WHERE namespace = ? AND digest = ?", (key, missing)
            ).fetchone()
            if row and row[0] != segment:
                return Claim(present, granted=False)
            db.execute(
                "INSERT OR REPLACE INTO claims VALUES (?, ?, ?, ?)", (key, missing, segment, now + ttl_s)
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
            key = self._known(db, "commit", namespace)
            state = _Commit(db, key, segment, digests, record, rank, ranks).run(self._clock())
            if state is not CommitState.WAITING:
                db.execute(
                    "DELETE FROM claims WHERE namespace = ? AND digest = ? AND segment = ?",
                    (key, digests[:DIGEST_BYTES], segment),
                )
        return state

    def touch(self, namespace: NamespaceId, segments: Sequence[SegmentId], now_s: float) -> None:
        check_segments(segments)
        used = minute(now_s)
        with self._database.reading("touch") as db:
            key = namespace_key(db, namespace)
            query = "SELECT 1 FROM segments WHERE namespace = ? AND id = ? AND used < ?"
            stale = [s for s in segments if db.execute(query, (key, s, used)).fetchone()]
        # Most touches fall into a minute that is noted already, and then nobody waits for a writer.
        if stale:
            with self._database.writing("touch") as db:
                db.executemany(
                    "UPDATE segments SET used = ? WHERE namespace = ? AND id = ? AND used < ?",
                    [(used, key, segment, used) for segment in stale],
                )

    def evict(self, namespace: NamespaceId, segments: Sequence[SegmentId], *, delete_after_s: float) -> int:
        check_segments(segments)
        with self._database.writing("evict") as db:
            key = namespace_key(db, namespace)
            gone = drop(db, key, segments, delete_after_s)
            for segment in segments:
                row = db.execute(
                    "SELECT max(ranks) FROM parts WHERE namespace = ? AND id = ?", (key, segment)
                ).fetchone()
                if row[0] is not None:
                    discard(db, key, segment, row[0], delete_after_s)
                    db.execute("DELETE FROM parts WHERE namespace = ? AND id = ?", (key, segment))
        return len(gone)

    def note(
        self, namespace: NamespaceId, digests: bytes, *, now_s: float, window_s: float, sketch_bytes: int
    ) -> int:
        window = Window.at(now_s, window_s, sketch_bytes)
        if not count_digests(digests):
            return 0
        marks = Marks.of(digests)
        with self._database.reading("note") as db:
            noted, lines = sqlite_uses.look(db, self._known(db, "note", namespace), marks, window)
        # A prompt that is asked for all day is noted once, and then nobody waits for a writer.
        if lines:
            with self._database.writing("note") as db:
                key = self._known(db, "note", namespace)
                noted, lines = sqlite_uses.look(db, key, marks, window)
                sqlite_uses.write(db, key, window, lines)
        return noted

    def _known(self, db: sqlite3.Connection, verb: str, namespace: NamespaceId) -> int:
        key = namespace_key(db, namespace)
        if key is None:
            raise NamespaceUnknown(
                f"sqlite {self._database.where}: {verb}: namespace {namespace} is not registered"
            )
        return key


def _servable(db: sqlite3.Connection, key: int, digests: bytes) -> list[Run]:
    """The walk over this database."""
    records: dict[SegmentId, SegmentRecord | None] = {}

    def lookup(position: int) -> tuple[SegmentId, int] | None:
        at = position * DIGEST_BYTES
        row = db.execute(_LOOKUP, (key, digests[at : at + DIGEST_BYTES])).fetchone()
        if row is None:
            return None
        records[row[0]] = record_of(row[2])
        return row[0], row[1]

    return walk(len(digests) // DIGEST_BYTES, lookup, records.get)


@dataclass(frozen=True, slots=True)
class _Commit:
    """One rank's commit inside its transaction. `key` is the namespace's number."""

    db: sqlite3.Connection
    key: int
    segment: SegmentId
    digests: bytes
    record: SegmentRecord
    rank: int
    ranks: int

    def run(self, now: float) -> CommitState:
        agreed = agreement(self.digests, self.record, self.ranks)
        part = pack_part(self.record, self.record.parts[0])
        row = self._one("SELECT key, checksum, record FROM segments")
        if row:
            # Committed before: an answer got lost, or the index is being rebuilt. The entries are
            # written once more, which repairs those that were lost, and nothing is counted twice.
            number, checksum, packed = row
            head = len(agreed) - len(checksum)
            size = (len(packed) - head) // self.ranks
            mine = packed[head + self.rank * size : head + (self.rank + 1) * size]
            if checksum + packed[:head] != agreed or mine != part:
                return CommitState.REFUSED
            self._enter(number)
            return CommitState.VISIBLE
        if self._one("SELECT 1 FROM trash"):
            return CommitState.REFUSED
        self.db.execute("DELETE FROM parts WHERE expires <= ?", (now,))
        row = self._one("SELECT agreement FROM parts")
        if row and row[0] != agreed:
            return CommitState.REFUSED
        parts = [(part, self.record.nbytes)]
        if self.ranks > 1:
            parts = self._collect(agreed, part, now)
            if len(parts) < self.ranks:
                return CommitState.WAITING
        self._show(agreed, [part for part, _ in parts], sum(nbytes for _, nbytes in parts))
        return CommitState.VISIBLE

    def _collect(self, agreed: bytes, part: bytes, now: float) -> list[tuple[bytes, int]]:
        """Keep this rank's part; all parts so far, with their bytes, in rank order."""
        db, where, this = self.db, "WHERE namespace = ? AND id = ?", (self.key, self.segment)
        db.execute(
            "INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?, ?, ?, 0)",
            (*this, self.rank, agreed, part, self.record.nbytes, self.ranks),
        )
        db.execute(f"UPDATE parts SET expires = ? {where}", (now + INCOMPLETE_TTL_S, *this))
        rows = db.execute(f"SELECT part, nbytes FROM parts {where} ORDER BY rank", this).fetchall()
        if len(rows) == self.ranks:
            db.execute(f"DELETE FROM parts {where}", this)
        return rows

    def _show(self, agreed: bytes, parts: list[bytes], nbytes: int) -> None:
        record, head = self.record, pack_head(self.record, self.ranks)
        number = self.db.execute(
            "INSERT INTO segments (namespace, id, checksum, record, nbytes, slots, ranks, used, depth) "
            "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                self.key,
                self.segment,
                agreed[: -len(head)],
                head + b"".join(parts),
                nbytes,
                record.slots,
                self.ranks,
                minute(record.created_s),
                record.depth,
            ),
        ).lastrowid
        self._enter(number)
        account(self.db, self.key, nbytes, 1, record.slots)

    def _enter(self, number: int | None) -> None:
        self.db.executemany(
            "INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)",
            [(self.key, digest, number, slot) for slot, digest in enumerate(split_digests(self.digests))],
        )

    def _one(self, select: str) -> tuple[Any, ...] | None:
        """The first row of a table that belongs to this segment."""
        query = f"{select} WHERE namespace = ? AND id = ? LIMIT 1"
        row: tuple[Any, ...] | None = self.db.execute(query, (self.key, self.segment)).fetchone()
        return row
