"""SqliteSalts: what different salts have stored in SQLite; the schema is in kvstore.index.sqlite.schema."""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Iterator

from kvstore.index.contract import check_salt, created_of, salt_of
from kvstore.index.maintenance import CLOCKS_DIFFER_S, Listing
from kvstore.index.sqlite.catalogue import listing
from kvstore.index.sqlite.evictions import evict_incomplete
from kvstore.index.sqlite.rows import NamespaceNumbers, invalidated_generations, place_of
from kvstore.index.sqlite.sessions import SqliteSessions, forget_sessions
from kvstore.keys import NamespaceId, SaltId, SegmentId

_PAGE = 500


class SqliteSalts(SqliteSessions):
    """The part of SqliteIndex that tells apart what different salts have stored."""

    def of_salt(self, namespace: NamespaceId, salt: SaltId) -> Iterator[Listing]:
        check_salt(salt)
        after = b""
        while True:
            with self._database.reading("of_salt") as db:
                rows = db.execute(
                    "SELECT id, record, used, pinned FROM segments WHERE salt = ? AND salt <> x'' AND id > ? "
                    "AND namespace = (SELECT generation FROM namespaces WHERE id = ?) ORDER BY id LIMIT ?",
                    (salt, after, namespace, _PAGE),
                ).fetchall()
            yield from (found for row in rows if (found := listing(*row)))
            if len(rows) < _PAGE:
                return
            after = rows[-1][0]

    def holdings(self, namespace: NamespaceId, over_bytes: int) -> dict[SaltId, int]:
        with self._database.reading("holdings") as db:
            rows = db.execute(
                "SELECT salt, sum(nbytes) AS held FROM segments WHERE salt <> x'' AND namespace = "
                "(SELECT generation FROM namespaces WHERE id = ?) GROUP BY salt HAVING held > ?",
                (namespace, over_bytes),
            ).fetchall()
        return {SaltId(salt): held for salt, held in rows}

    def forbid(self, namespace: NamespaceId, salt: SaltId) -> float:
        until = math.ceil(self._clock()) + CLOCKS_DIFFER_S
        if salt:
            check_salt(salt)
        with self._database.writing("forbid") as db:
            db.execute(
                "INSERT INTO forbidden VALUES (?, ?, ?) "
                "ON CONFLICT (namespace, salt) DO UPDATE SET until = max(until, excluded.until)",
                (namespace, salt, until),
            )
            place = place_of(db, namespace)
            if place is not None:
                for segment in _incomplete(db, place, salt, until):
                    evict_incomplete(db, place, segment, 0.0)
                forget_sessions(db, place, salt)
            (until,) = db.execute(
                "SELECT until FROM forbidden WHERE namespace = ? AND salt = ?", (namespace, salt)
            ).fetchone()
        return float(until)

    def forbidden(self, namespace: NamespaceId) -> dict[SaltId, float]:
        with self._database.reading("forbidden") as db:
            rows = db.execute(
                "SELECT salt, until FROM forbidden WHERE namespace = ?", (namespace,)
            ).fetchall()
        return {SaltId(salt): float(until) for salt, until in rows}


def _incomplete(
    db: sqlite3.Connection, place: NamespaceNumbers, salt: SaltId, until: float
) -> list[SegmentId]:
    """Returns incomplete commits of what a salt, or with an empty one all, had created until then."""
    found: set[SegmentId] = set()
    for number in (place.generation, *invalidated_generations(db, place)):
        rows = db.execute(
            "SELECT DISTINCT id, agreement FROM parts WHERE namespace = ?", (number,)
        ).fetchall()
        found |= {
            SegmentId(segment)
            for segment, agreed in rows
            if (not salt or salt_of(agreed) == salt) and created_of(agreed) <= until
        }
    return sorted(found)
