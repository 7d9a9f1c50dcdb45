"""SqliteVerdicts: verdicts about writers in SQLite; the schema is in kvstore.index.sqlite.schema."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence

from kvstore.index.contract import check_writers
from kvstore.index.sqlite.salts import SqliteSalts
from kvstore.index.verdicts import (
    NAME_CHARS,
    STATES,
    VERDICT_S,
    VERDICTS_KEPT,
    Opinion,
    Verdict,
    VerdictState,
    judged,
)
from kvstore.keys import NamespaceId, PlaceId, WriterId


class SqliteVerdicts(SqliteSalts):
    """The part of SqliteIndex that keeps verdicts."""

    def verdicts(
        self, namespace: NamespaceId, writers: Sequence[WriterId] | None = None
    ) -> Mapping[WriterId, Verdict]:
        check_writers(writers or ())
        with self._database.reading("verdicts") as db:
            return _of(db, namespace, writers, self._clock())

    def judge(
        self,
        namespace: NamespaceId,
        writer: WriterId,
        opinion: Opinion,
        *,
        by: PlaceId,
        stands: bool,
        name: str = "",
    ) -> VerdictState:
        check_writers([writer, WriterId(by)])
        now = self._clock()
        with self._database.writing("judge") as db:
            before = _of(db, namespace, [writer], now).get(writer)
            state = judged(before, opinion, by, stands=stands)
            if before is not None and state == before.state:
                return state
            db.execute("DELETE FROM writers WHERE at <= ?", (now - VERDICT_S,))
            db.execute(
                "INSERT OR REPLACE INTO writers VALUES (?, ?, ?, ?, ?, ?)",
                (namespace, writer, STATES.index(state), now, by, name[:NAME_CHARS]),
            )
            db.execute(
                "DELETE FROM writers WHERE namespace = ? AND id IN (SELECT id FROM writers "
                "WHERE namespace = ? AND id <> ? ORDER BY at DESC LIMIT -1 OFFSET ?)",
                (namespace, namespace, writer, VERDICTS_KEPT - 1),
            )
            return state


def _of(
    db: sqlite3.Connection, namespace: NamespaceId, writers: Sequence[WriterId] | None, now: float
) -> dict[WriterId, Verdict]:
    query = "SELECT id, state, at, by, name FROM writers WHERE namespace = ? AND at > ?"
    since = now - VERDICT_S
    if writers is None:
        rows = db.execute(query, (namespace, since)).fetchall()
    else:
        rows = [
            row
            for writer in dict.fromkeys(writers)
            if (row := db.execute(f"{query} AND id = ?", (namespace, since, writer)).fetchone())
        ]
    return {WriterId(row[0]): Verdict(STATES[row[1]], row[2], PlaceId(row[3]), row[4]) for row in rows}
