"""SqliteCatalogue: the index in SQLite as maintenance sees it. The schema stands in sqlite_file."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator, Sequence
from functools import lru_cache

from kvstore.index.contract import SWEEP_FACTOR, SWEEP_MIN, check_segments, whole_seconds
from kvstore.index.sqlite_file import SCHEMA_VERSION, SqliteDatabase
from kvstore.keys import NamespaceId, SegmentId
from kvstore.ports import Catalogue, Listing, Usage
from schemas.records import unpack_record

#: Rows of one page of a listing, or of one transaction of a sweep: a few milliseconds.
_PAGE = 1000
_SWEEP_PAGE = 2048

#: The same prefixes are matched again and again, and unpacking costs as much as a look-up.
record_of = lru_cache(maxsize=8192)(unpack_record)


class SqliteCatalogue(Catalogue):
    """The maintenance half of SqliteIndex."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database

    def namespaces(self) -> dict[NamespaceId, str]:
        with self._database.reading("namespaces") as db:
            rows = db.execute("SELECT id, json FROM namespaces ORDER BY id").fetchall()
        return {NamespaceId(name): text for name, text in rows}

    def usage(self, namespace: NamespaceId) -> Usage:
        with self._database.reading("usage") as db:
            row = db.execute(
                "SELECT nbytes, segments, blocks FROM namespaces WHERE id = ?", (namespace,)
            ).fetchone()
        return Usage(*row) if row else Usage(0, 0, 0)

    def segments(self, namespace: NamespaceId) -> Iterator[Listing]:
        after = 0
        while True:
            # A transaction per page: one over the whole listing would keep the WAL from shrinking.
            with self._database.reading("segments") as db:
                rows = db.execute(
                    "SELECT key, id, record, used FROM segments WHERE key > ? AND namespace = "
                    "(SELECT key FROM namespaces WHERE id = ?) ORDER BY key LIMIT ?",
                    (after, namespace, _PAGE),
                ).fetchall()
            yield from (listing for row in rows if (listing := _listing(*row[1:])))
            if len(rows) < _PAGE:
                return
            after = rows[-1][0]

    def get(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> list[Listing | None]:
        check_segments(segments)
        with self._database.reading("get") as db:
            key = namespace_key(db, namespace)
            query = "SELECT id, record, used FROM segments WHERE namespace = ? AND id = ?"
            rows = [db.execute(query, (key, segment)).fetchone() for segment in segments]
        return [_listing(*row) if row else None for row in rows]

    def cull(
        self, namespace: NamespaceId, *, keep_bytes: int, delete_after_s: float, limit: int
    ) -> list[SegmentId]:
        if self.usage(namespace).nbytes <= keep_bytes:
            return []
        with self._database.writing("cull") as db:
            key = namespace_key(db, namespace)
            row = db.execute("SELECT nbytes FROM namespaces WHERE key = ?", (key,)).fetchone()
            used = row[0] if row else 0
            oldest = db.execute(
                "SELECT id, nbytes FROM segments WHERE namespace = ? ORDER BY used, depth DESC, id LIMIT ?",
                (key, max(0, limit)),
            ).fetchall()
            gone = []
            for segment, nbytes in oldest:
                if used <= keep_bytes:
                    break
                gone.append(SegmentId(segment))
                used -= nbytes
            drop(db, key, gone, delete_after_s)
        return gone

    def due(self, namespace: NamespaceId, now_s: float, limit: int) -> list[tuple[SegmentId, int]]:
        with self._database.reading("due") as db:
            rows = db.execute(
                "SELECT id, ranks FROM trash WHERE namespace = ? AND due <= ? ORDER BY due LIMIT ?",
                (namespace_key(db, namespace), math.floor(now_s), max(0, limit)),
            ).fetchall()
        return [(SegmentId(segment), ranks) for segment, ranks in rows]

    def bury(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> None:
        check_segments(segments)
        with self._database.writing("bury") as db:
            key = namespace_key(db, namespace)
            db.executemany(
                "DELETE FROM trash WHERE namespace = ? AND id = ?", [(key, segment) for segment in segments]
            )

    def sweep(self, namespace: NamespaceId, limit: int) -> int:
        """Drop dangling entries, at most about `limit`, looking at 8 entries for each of them.

        A call that gets through all entries sooner stops there; it may begin anywhere.
        """
        dropped, looked, rounds = 0, 0, 0
        budget = max(SWEEP_MIN, SWEEP_FACTOR * limit)
        while dropped < limit and looked < budget and rounds < 2:
            with self._database.writing("sweep") as db:
                seen, gone, ended = _sweep_page(db, namespace, limit - dropped)
            looked += seen
            dropped += gone
            rounds += ended
        return dropped

    def ping(self) -> None:
        """Raises CapacityExceeded besides, if the disk is full."""
        with self._database.writing("ping") as db:
            # Changes nothing, but writes a page as a change would.
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def namespace_key(db: sqlite3.Connection, namespace: NamespaceId) -> int | None:
    """The number that stands for a namespace in the other tables; None (equal to nothing) if unknown."""
    row = db.execute("SELECT key FROM namespaces WHERE id = ?", (namespace,)).fetchone()
    return row[0] if row else None


def drop(
    db: sqlite3.Connection, key: int | None, segments: Sequence[SegmentId], delete_after_s: float
) -> list[SegmentId]:
    """Take segments out of sight and into the trash; returns those that were visible."""
    gone, nbytes, blocks = [], 0, 0
    for segment in segments:
        row = db.execute(
            "SELECT key, nbytes, slots, ranks FROM segments WHERE namespace = ? AND id = ?", (key, segment)
        ).fetchone()
        if row is None:
            continue
        db.execute("DELETE FROM segments WHERE key = ?", (row[0],))
        discard(db, key, segment, row[3], delete_after_s)
        gone.append(segment)
        nbytes += row[1]
        blocks += row[2]
    if gone:
        account(db, key, -nbytes, -len(gone), -blocks)
    return gone


def discard(
    db: sqlite3.Connection, key: int | None, segment: SegmentId, ranks: int, delete_after_s: float
) -> None:
    """Put a segment's payloads on record for deletion."""
    db.execute(
        "INSERT OR REPLACE INTO trash VALUES (?, ?, ?, ?)",
        (key, segment, ranks, whole_seconds(delete_after_s)),
    )


def account(db: sqlite3.Connection, key: int | None, nbytes: int, segments: int, blocks: int) -> None:
    """Change a namespace's usage."""
    db.execute(
        "UPDATE namespaces SET nbytes = nbytes + ?, segments = segments + ?, blocks = blocks + ? "
        "WHERE key = ?",
        (nbytes, segments, blocks, key),
    )


def _listing(segment: bytes, record: bytes, used: int) -> Listing | None:
    unpacked = record_of(record)
    return Listing(SegmentId(segment), unpacked, used * 60.0) if unpacked else None


def _sweep_page(db: sqlite3.Connection, namespace: NamespaceId, limit: int) -> tuple[int, int, bool]:
    """Entries looked at, entries dropped, and whether the last entry was among them."""
    row = db.execute("SELECT key, swept FROM namespaces WHERE id = ?", (namespace,)).fetchone()
    if row is None:
        return 0, 0, True
    key, after = row
    rows = db.execute(
        "SELECT e.digest, s.key FROM entries e LEFT JOIN segments s ON s.key = e.segment "
        "WHERE e.namespace = ? AND e.digest > ? ORDER BY e.digest LIMIT ?",
        (key, after, _SWEEP_PAGE),
    ).fetchall()
    dead = [digest for digest, segment in rows if segment is None][:limit]
    db.executemany(
        "DELETE FROM entries WHERE namespace = ? AND digest = ?", [(key, digest) for digest in dead]
    )
    ended = len(rows) < _SWEEP_PAGE and len(dead) < limit
    if len(dead) == limit:
        after = dead[-1]
    elif rows:
        after = rows[-1][0]
    db.execute("UPDATE namespaces SET swept = ? WHERE key = ?", (b"" if ended else after, key))
    return len(rows), len(dead), ended
