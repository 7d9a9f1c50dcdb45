"""An index in SQLite."""

from __future__ import annotations

import sqlite3
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.format.second.basics import need
from tests.format.second.records import (
    Record,
    Run,
    agreement,
    is_forbidden,
    pack_parts,
    record_of,
    saved_minute,
    simple_match,
    unpack_record,
    worth,
)
from tests.format.second.segments import Header


class SqliteStore:
    """An index in a file."""

    def __init__(self, path: Path) -> None:
        self.db = sqlite3.connect(path, isolation_level=None, timeout=2)
        need(
            self._pragma("application_id") == 0x6B767369 and self._pragma("user_version") == 10,
            "not an index",
        )

    def _pragma(self, name: str) -> int:
        return int(self.db.execute(f"PRAGMA {name}").fetchone()[0])

    def _place(self, namespace: str) -> tuple[int, int]:
        """The namespace's key and the number of its visible generation."""
        row = self.db.execute("SELECT key, generation FROM namespaces WHERE id = ?", (namespace,)).fetchone()
        need(row, "unknown namespace")
        return int(row[0]), int(row[1])

    def namespaces(self) -> dict[str, str]:
        return dict(self.db.execute("SELECT id, json FROM namespaces").fetchall())

    def account(self, namespace: str) -> dict[str, int]:
        row = self.db.execute(
            "SELECT nbytes, segments, blocks, pinned, cost FROM namespaces WHERE id = ?", (namespace,)
        ).fetchone()
        return dict(zip(("bytes", "segments", "blocks", "pinned", "cost"), row, strict=True))

    def records(self, namespace: str) -> dict[bytes, Record]:
        number = self._place(namespace)[1]
        rows = self.db.execute("SELECT id, record FROM segments WHERE namespace = ?", (number,))
        return {segment: unpack_record(record) for segment, record in rows}

    def trash(self, namespace: str) -> dict[bytes, tuple[int, int]]:
        key = self._place(namespace)[0]
        rows = self.db.execute("SELECT id, due, ranks FROM trash WHERE namespace = ?", (key,))
        return {segment: (due, ranks) for segment, due, ranks in rows}

    def pinned(self, namespace: str) -> set[bytes]:
        number = self._place(namespace)[1]
        rows = self.db.execute("SELECT id FROM segments WHERE namespace = ? AND pinned = 1", (number,))
        return {segment for (segment,) in rows}

    def of_salt(self, namespace: str, salt: bytes) -> dict[bytes, int]:
        """Visible segments of a salt, and their bytes."""
        number = self._place(namespace)[1]
        sql = "SELECT id, nbytes FROM segments WHERE namespace = ? AND salt = ?"
        return dict(self.db.execute(sql, (number, salt)).fetchall())

    def sessions(self, namespace: str) -> dict[bytes, tuple[int, bool, int, int, list[bytes]]]:
        """Session -> minute of its last use, whether it has ended, priority, second until which it retains,
        its own segments."""
        key, number = self._place(namespace)
        rows = self.db.execute(
            "SELECT id, used, ended, priority, until FROM sessions WHERE namespace = ?", (key,)
        ).fetchall()
        sql = "SELECT id FROM segments WHERE namespace = ? AND owner = ? ORDER BY key"
        own = {one: [segment for (segment,) in self.db.execute(sql, (number, one))] for one, *_ in rows}
        return {
            one: (used, bool(ended), priority, until, own[one]) for one, used, ended, priority, until in rows
        }

    def kept(self, namespace: str) -> dict[bytes, tuple[int, int]]:
        """Retained segment -> second of the end, minute of its last use."""
        sql = "SELECT s.id, r.until, r.used FROM retained AS r JOIN segments AS s ON s.key = r.segment"
        rows = self.db.execute(f"{sql} WHERE s.namespace = ?", (self._place(namespace)[1],))
        return {segment: (until, used) for segment, until, used in rows}

    def forbidden_until(self, namespace: str, salt: bytes) -> int:
        """The second until which what was created must not be committed; -1: nothing is forbidden."""
        sql = "SELECT max(until) FROM forbidden WHERE namespace = ? AND salt IN (x'', ?)"
        until = self.db.execute(sql, (namespace, salt)).fetchone()[0]
        return -1 if until is None else int(until)

    def entries(self, namespace: str) -> dict[bytes, tuple[bytes, int]]:
        key = self._place(namespace)[0]
        rows = self.db.execute("SELECT digest, segment, slot FROM blocks WHERE namespace = ?", (key,))
        return {one: (segment, slot) for one, segment, slot in rows}

    def match(self, namespace: str, digests: bytes) -> list[Run]:
        self.db.execute("BEGIN")
        try:
            lives = self.db.execute("SELECT nbytes FROM quotas WHERE scope = ?", (f"lives/{namespace}",))
            oldest = time.time() - ttl[0] if (ttl := lives.fetchone()) else -1.0
            entries, records = self.entries(namespace), self.records(namespace)
            records = {one: record for one, record in records.items() if record.created_s > oldest}
            return simple_match(digests, entries.get, records.get)
        finally:
            self.db.execute("ROLLBACK")

    def commit(self, namespace: str, header: Header) -> bool:
        """A segment of one rank."""
        meta, record, digests = header.meta, record_of([header]), header.digests
        segment, first = bytes.fromhex(meta["segment"]), digests[:16]
        need(meta["ranks"] == 1, "one rank only")
        self.db.execute("BEGIN IMMEDIATE")
        try:
            key, number = self._place(namespace)
            if self._is_taken(key, segment):
                self.db.execute("ROLLBACK")
                return False
            now = int(time.time())
            if is_forbidden(meta["created_s"], [self.forbidden_until(namespace, record.salt)], now):
                self.db.execute("ROLLBACK")
                return False
            record = replace(record, created_s=min(record.created_s, now))
            agreed = agreement(digests, record, 1)
            used, extra = saved_minute(record.created_s), worth(meta["kind"], record)
            row = {
                "namespace": number, "id": segment, "checksum": agreed[:8],
                "record": agreed[8:] + pack_parts(record), "nbytes": record.nbytes, "slots": record.slots,
                "ranks": 1, "used": used, "depth": record.depth, "cost": record.cost_us, "worth": extra,
                "keep": used + 10 * extra, "first": first, "salt": record.salt,
            }  # fmt: skip
            self._insert("segments", row)
            for slot in range(record.slots):
                one = digests[16 * slot : 16 * slot + 16]
                self.db.execute(
                    "INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?)", (key, one, segment, slot)
                )
            self.db.execute(
                "UPDATE namespaces SET nbytes = nbytes + ?, segments = segments + 1, blocks = blocks + ?, "
                "cost = cost + ? WHERE key = ?",
                (record.nbytes, record.slots, record.cost_us, key),
            )
            self._event(key, segment, digests, record)
            self.db.execute("DELETE FROM ghosts WHERE namespace = ? AND digest = ?", (key, first))
            self.db.execute(
                "DELETE FROM claims WHERE namespace = ? AND digest = ? AND segment = ?", (key, first, segment)
            )
            self.db.execute("COMMIT")
        except BaseException:
            if self.db.in_transaction:
                self.db.execute("ROLLBACK")
            raise
        return True

    def _is_taken(self, key: int, segment: bytes) -> bool:
        """Whether the segment is in the trash, visible, invalidated or incomplete."""
        own = "namespace IN (SELECT number FROM generations WHERE namespace = ?)"
        return any(
            self.db.execute(f"SELECT 1 FROM {table} WHERE {where} AND id = ?", (key, segment)).fetchone()
            for table, where in (("trash", "namespace = ?"), ("segments", own), ("parts", own))
        )

    def _event(self, key: int, segment: bytes, digests: bytes, record: Record) -> None:
        now = time.time()
        newest = self.db.execute("SELECT max(number) FROM events WHERE namespace = ?", (key,)).fetchone()[0]
        row = {
            "namespace": key, "number": int(now * 1000) if newest is None else newest + 1, "at": now,
            "op": "commit", "segment": segment, "first": digests[:16], "last": digests[-16:],
            "depth": record.depth, "slots": record.slots, "nbytes": record.nbytes, "rule": None, "by": "",
        }  # fmt: skip
        self._insert("events", row)

    def _insert(self, table: str, row: dict[str, Any]) -> None:
        marks = ", ".join("?" * len(row))
        self.db.execute(f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks})", tuple(row.values()))
