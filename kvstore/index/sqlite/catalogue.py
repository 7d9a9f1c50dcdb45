"""SqliteCatalogue: lists and reads the index in SQLite. The schema stands in kvstore.index.sqlite.schema."""

from __future__ import annotations

import random
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import TypeVar

from kvstore.index.contract import check_segments
from kvstore.index.maintenance import Account, Candidate, Entry, Listing, SegmentState, Usage
from kvstore.index.numbers import MOST_S, real, whole
from kvstore.index.sqlite.rows import (
    LIVES,
    NamespaceNumbers,
    SqlitePart,
    invalidated_generations,
    number_in,
    place_of,
    record_of,
)
from kvstore.index.sqlite.schema import SCHEMA_VERSION
from kvstore.keys import SEGMENT_ID_BYTES, Digest, NamespaceId, SegmentId

_T = TypeVar("_T")

#: Rows on a page of a listing: a few milliseconds.
_PAGE = 1000
_MINUTE_S = 60.0
#: In a namespace of so many segments or fewer a sample is drawn from the list of all of them.
_SAMPLE_ALL = 4096
#: Neighbours of a random id, of which a sample takes one. Ids are random, so the gaps between them have
#: different widths; over so many gaps that evens out.
_NEIGHBOURS = 16

_MOST_QUOTA = (1 << 63) - 1

USAGE = "nbytes, segments, blocks, pinned, cost"


def _account(
    name: str,
    kind: object,
    tenant: object,
    seen: object,
    trashed: int,
    bygone: object,
    ttl: object,
    *usage: object,
) -> Account:
    """Returns the account in a row; what of it can't be read is "" or 0, and the problem says so."""
    problems: list[str] = []

    def read(field: str, value: object, decode: Callable[[object], _T], instead: _T) -> _T:
        try:
            return decode(value)
        except (ValueError, TypeError) as exc:
            problems.append(f"{field}: {exc!r}"[:100])
            return instead

    return Account(
        namespace=NamespaceId(name),
        kind=read("kind", kind, _text, ""),
        tenant=read("tenant", tenant, _text, ""),
        usage=read("usage", usage, lambda _: Usage(*map(whole, usage)), Usage(0, 0, 0)),
        trashed=trashed,
        bygone=read("bygone", bygone, whole, 0),
        seen_s=read("seen", seen, lambda value: real(value, least=0, most=MOST_S), 0.0),
        ttl_s=read("ttl", ttl, whole, 0),
        problem="; ".join(problems),
    )


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r:.40} is no text")
    return value


class SqliteCatalogue(SqlitePart):
    """The part of SqliteIndex that only reads. Reading waits for nobody."""

    def namespaces(self) -> dict[NamespaceId, str]:
        with self._database.reading("namespaces") as db:
            rows = db.execute("SELECT id, json FROM namespaces ORDER BY id").fetchall()
        return {NamespaceId(name): text for name, text in rows}

    def accounts(self) -> list[Account]:
        with self._database.reading("accounts") as db:
            rows = db.execute(
                f"SELECT id, kind, tenant, seen, "
                "(SELECT count(*) FROM trash WHERE namespace = n.key), "
                "(SELECT coalesce(sum(g.segments), 0) FROM generations AS g "
                "WHERE g.namespace = n.key AND g.number <> n.generation), "
                f"coalesce((SELECT nbytes FROM quotas WHERE scope = '{LIVES}' || n.id), 0), {USAGE} "
                "FROM namespaces AS n ORDER BY id"
            ).fetchall()
        return [_account(*row) for row in rows]

    def reachable(self) -> tuple[list[Account], None]:
        return self.accounts(), None

    def usage(self, namespace: NamespaceId) -> Usage:
        with self._database.reading("usage") as db:
            row = db.execute(f"SELECT {USAGE} FROM namespaces WHERE id = ?", (namespace,)).fetchone()
        return Usage(*map(number_in, row)) if row else Usage(0, 0, 0)

    def segments(self, namespace: NamespaceId) -> Iterator[Listing]:
        after = b""
        while True:
            # A transaction per page: one over the whole listing would keep the WAL from shrinking.
            with self._database.reading("segments") as db:
                rows = db.execute(
                    "SELECT id, record, used, pinned FROM segments WHERE id > ? AND namespace = "
                    "(SELECT generation FROM namespaces WHERE id = ?) ORDER BY id LIMIT ?",
                    (after, namespace, _PAGE),
                ).fetchall()
            yield from (found for row in rows if (found := listing(*row)))
            if len(rows) < _PAGE:
                return
            after = rows[-1][0]

    def get(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> list[Listing | None]:
        check_segments(segments)
        with self._database.reading("get") as db:
            place = place_of(db, namespace)
            return [_get(db, place, segment) if place else None for segment in segments]

    def states(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> list[SegmentState | None]:
        check_segments(segments)
        with self._database.reading("states") as db:
            place = place_of(db, namespace)
            if place is None:
                return [None] * len(segments)
            old = invalidated_generations(db, place)
            return [_state(db, place, old, segment, self._clock()) for segment in segments]

    def sample(self, namespace: NamespaceId, count: int) -> list[Listing]:
        with self._database.reading("sample") as db:
            place = place_of(db, namespace)
            if place is None or count <= 0:
                return []
            some = _draw(db, place, count)
            return [listing for segment in some if (listing := _get(db, place, segment))]

    def entries(self, namespace: NamespaceId) -> Iterator[Entry]:
        after = b""
        while True:
            with self._database.reading("entries") as db:
                rows = db.execute(
                    "SELECT digest, segment, slot FROM blocks WHERE digest > ? AND namespace = "
                    "(SELECT key FROM namespaces WHERE id = ?) ORDER BY digest LIMIT ?",
                    (after, namespace, _PAGE),
                ).fetchall()
            yield from (Entry(Digest(digest), SegmentId(segment), slot) for digest, segment, slot in rows)
            if len(rows) < _PAGE:
                return
            after = rows[-1][0]

    def order(self, namespace: NamespaceId, limit: int) -> list[Candidate]:
        with self._database.reading("order") as db:
            place = place_of(db, namespace)
            rows = in_order(db, place, limit).fetchall() if place else []
        return [
            Candidate(SegmentId(segment), nbytes, keep * _MINUTE_S, used * _MINUTE_S, depth)
            for segment, nbytes, keep, used, depth in rows
        ]

    def hottest(self, namespace: NamespaceId, limit: int) -> list[tuple[SegmentId, float]]:
        with self._database.reading("hottest") as db:
            place = place_of(db, namespace)
            rows = db.execute(
                "SELECT s.id, h.minutes FROM hot AS h JOIN segments AS s ON s.key = h.segment "
                "WHERE h.namespace = ? AND s.namespace = ? ORDER BY h.minutes DESC, s.id LIMIT ?",
                (*(place or (None, None))[:2], max(0, limit)),
            ).fetchall()
        return [(SegmentId(segment), minutes) for segment, minutes in rows]

    def quotas(self) -> dict[str, int]:
        with self._database.reading("quotas") as db:
            query = "SELECT scope, nbytes FROM quotas WHERE scope NOT GLOB ? ORDER BY scope"
            rows = db.execute(query, (f"{LIVES}*",)).fetchall()
        found = {}
        for scope, nbytes in rows:
            # A value that can't be is no quota: it must not fail every save that would make room.
            with suppress(ValueError, TypeError):
                found[_text(scope)] = whole(nbytes, most=_MOST_QUOTA)
        return found

    def ping(self) -> None:
        """Raises CapacityExceeded as well, if the disk is full."""
        with self._database.writing("ping") as db:
            # Changes nothing, but writes a page as a change would.
            db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")


def in_order(db: sqlite3.Connection, place: NamespaceNumbers, limit: int) -> sqlite3.Cursor:
    """Selects unpinned segments in the order of eviction: id, bytes, `keep` and `used` (unix minutes),
    depth."""
    return db.execute(
        "SELECT id, nbytes, keep, used, min(depth, 4194303) FROM segments WHERE namespace = ? AND pinned = 0 "
        "ORDER BY keep, min(depth, 4194303) DESC, used, id LIMIT ?",
        (place.generation, max(0, limit)),
    )


def _get(db: sqlite3.Connection, place: NamespaceNumbers, segment: SegmentId) -> Listing | None:
    row = db.execute(
        "SELECT id, record, used, pinned FROM segments WHERE namespace = ? AND id = ?",
        (place.generation, segment),
    ).fetchone()
    return listing(*row) if row else None


def listing(segment: bytes, record: bytes, used: int, pinned: int) -> Listing | None:
    """Returns a segment as its row has it; None if its record can't be read."""
    unpacked = record_of(record)
    return Listing(SegmentId(segment), unpacked, used * _MINUTE_S, bool(pinned)) if unpacked else None


def _state(
    db: sqlite3.Connection, place: NamespaceNumbers, old: list[int], segment: SegmentId, now: float
) -> SegmentState | None:
    def known(table: str, number: int, more: str = "") -> bool:
        query = f"SELECT 1 FROM {table} WHERE namespace = ? AND id = ? {more}"
        return db.execute(query, (number, segment)).fetchone() is not None

    if known("segments", place.generation):
        return "visible"
    if any(known("parts", number, f"AND expires > {now}") for number in (place.generation, *old)):
        return "incomplete"
    if any(known("segments", number) for number in old):
        return "bygone"
    return "trash" if known("trash", place.key) else None


def _draw(db: sqlite3.Connection, place: NamespaceNumbers, count: int) -> list[SegmentId]:
    """Draws different visible segments by chance."""
    (segments,) = db.execute("SELECT segments FROM namespaces WHERE key = ?", (place.key,)).fetchone()
    if segments <= max(_SAMPLE_ALL, 4 * count):
        rows = db.execute("SELECT id FROM segments WHERE namespace = ?", (place.generation,)).fetchall()
        return [SegmentId(segment) for (segment,) in random.sample(rows, min(count, len(rows)))]
    drawn: set[SegmentId] = set()
    query = "SELECT id FROM segments WHERE namespace = ? AND id >= ? ORDER BY id LIMIT ?"
    for _ in range(8 * count):
        near: list[tuple[bytes]] = []
        # After the last segment comes the first.
        for start in (random.randbytes(SEGMENT_ID_BYTES), b""):
            near += db.execute(query, (place.generation, start, _NEIGHBOURS - len(near))).fetchall()
        drawn |= {SegmentId(segment) for (segment,) in random.sample(near, min(1, len(near)))}
        if len(drawn) == count:
            break
    return list(drawn)
