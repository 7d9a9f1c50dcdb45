"""How segments enter the index in SQLite: a rank's commit, called inside a write transaction."""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from kvstore.index.contract import (
    CLOCKS_DIFFER_S,
    INCOMPLETE_TTL_S,
    agreement,
    created_of,
    saved_minute,
    undated,
)
from kvstore.index.eviction import WORTH_MINUTES, worth
from kvstore.index.maintenance import Usage
from kvstore.index.port import CommitState, Replaced
from kvstore.index.sqlite.evictions import evict, evict_incomplete
from kvstore.index.sqlite.journal import Writing
from kvstore.index.sqlite.recency import count_as_used
from kvstore.index.sqlite.rows import NamespaceNumbers, account, invalidated_generations
from kvstore.index.verdicts import STATES
from kvstore.keys import DIGEST_BYTES, NO_SESSION, SegmentId, SessionId, split_digests
from schemas.records import SegmentRecord, pack_head, pack_part, unpack_record


class _Old(NamedTuple):
    """A visible segment that may be replaced, its last use, in how many minutes a load began with it, and
    whether a session owns it."""

    replaced: Replaced
    used: float
    heat: float
    owned: bool


@dataclass(slots=True)
class RankCommit:
    """The commit of one rank's part of a segment."""

    db: sqlite3.Connection
    place: NamespaceNumbers
    segment: SegmentId
    digests: bytes
    record: SegmentRecord
    rank: int
    ranks: int
    #: Whether its cost counts in the order of eviction.
    cost_counts: bool
    writing: Writing
    #: The session whose request saves it.
    session: SessionId = NO_SESSION
    #: Segments that go when it becomes visible; see Index.commit.
    replaces: Sequence[Replaced] = ()
    #: Whether it has replaced what nobody owned: it serves others too then, and is nobody's own.
    shared: bool = field(default=False, init=False)

    def run(self, now: float) -> CommitState:
        """Writes what the part changes, and returns what the segment is afterwards. Raises sqlite3.Error."""
        said, created = self.record.created_s, min(self.record.created_s, int(now))
        agreed = agreement(self.digests, replace(self.record, created_s=created), self.ranks)
        part = pack_part(self.record, self.record.parts[0])
        row = self._one("SELECT key, checksum, record FROM segments", self.place.generation)
        until = self._forbidden_until()
        forbidden = created <= until or (until >= 0 and said > now + CLOCKS_DIFFER_S)
        if forbidden or self._has_failed():
            evict_incomplete(self.db, self.place, self.segment, 0.0)
            return CommitState.REFUSED
        if row:
            return self._again(row, agreed, part)
        if self._is_gone():
            return CommitState.REFUSED
        self.db.execute("DELETE FROM parts WHERE expires <= ?", (now,))
        row = self._one("SELECT agreement FROM parts", self.place.generation)
        if row and undated(row[0]) != undated(agreed):
            return CommitState.REFUSED
        parts = [part]
        if self.ranks > 1:
            parts, created = self._collect(agreed, part, now)
            if len(parts) < self.ranks:
                return CommitState.WAITING
        self._show(replace(self.record, created_s=created), parts, now)
        return CommitState.VISIBLE

    def _again(self, row: tuple[Any, ...], agreed: bytes, part: bytes) -> CommitState:
        """Answers for a segment that was committed before: an answer got lost, or the index is being rebuilt.
        Writes once more the entries that lead to no other visible segment, which repairs those that were
        lost, and counts nothing twice."""
        key, checksum, packed = row
        head = len(agreed) - len(checksum)
        size = (len(packed) - head) // self.ranks
        mine = packed[head + self.rank * size : head + (self.rank + 1) * size]
        if undated(checksum + packed[:head]) != undated(agreed) or mine != part:
            return CommitState.REFUSED
        self.db.execute(
            "UPDATE segments SET first = ? WHERE key = ? AND first = x''", (self.digests[:DIGEST_BYTES], key)
        )
        # Which of them it was to replace, and which stayed, can't be told any more.
        others = (self._served_by(one, self.segment) for one in split_digests(self.digests))
        self._enter({one for one in others if one is not None})
        return CommitState.VISIBLE

    def _forbidden_until(self) -> int:
        """Returns until when what was computed must not become visible any more, unix seconds; -1: nothing
        is forbidden."""
        (until,) = self.db.execute(
            "SELECT coalesce(max(f.until), -1) FROM forbidden AS f "
            "JOIN namespaces AS n ON n.id = f.namespace WHERE n.key = ? AND f.salt IN (x'', ?)",
            (self.place.key, self.record.salt),
        ).fetchone()
        return int(until)

    def _has_failed(self) -> bool:
        """Returns whether its writer has failed (kvstore.index.verdicts). A verdict that is too old to hold
        may refuse it all the same: it is a start of long ago."""
        query = (
            "SELECT 1 FROM writers AS w JOIN namespaces AS n ON n.id = w.namespace "
            "WHERE n.key = ? AND w.id = ? AND w.state = ?"
        )
        failed = STATES.index("failed")
        return self.db.execute(query, (self.place.key, self.record.writer, failed)).fetchone() is not None

    def _is_gone(self) -> bool:
        """Returns whether the segment was evicted or invalidated meanwhile."""
        return self._one("SELECT 1 FROM trash", self.place.key) is not None or any(
            self._one(f"SELECT 1 FROM {table}", number) is not None
            for number in invalidated_generations(self.db, self.place)
            for table in ("segments", "parts")
        )

    def _collect(self, agreed: bytes, part: bytes, now: float) -> tuple[list[bytes], int]:
        """Keeps this rank's part. Returns all so far, in rank order, and when the latest was created."""
        db, where = self.db, "WHERE namespace = ? AND id = ?"
        this = (self.place.generation, self.segment)
        db.execute(
            "INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?, ?, ?, 0)",
            (*this, self.rank, agreed, part, self.record.nbytes, self.ranks),
        )
        db.execute(f"UPDATE parts SET expires = ? {where}", (now + INCOMPLETE_TTL_S, *this))
        rows = db.execute(f"SELECT part, agreement FROM parts {where} ORDER BY rank", this).fetchall()
        if len(rows) == self.ranks:
            db.execute(f"DELETE FROM parts {where}", this)
        return [row[0] for row in rows], max(created_of(row[1]) for row in rows)

    def _show(self, record: SegmentRecord, parts: list[bytes], now: float) -> None:
        goes, stays = self._replaceable()
        # What replaces others may be as old as they are, and has just been used.
        key, used = self.place.key, saved_minute(now if self.replaces else record.created_s)
        agreed, head = agreement(self.digests, record, self.ranks), pack_head(record, self.ranks)
        packed = head + b"".join(parts)
        whole = unpack_record(packed)
        assert whole is not None
        extra = worth(whole.cost_us, whole.nbytes) if self.cost_counts else 0
        self.db.execute(
            "INSERT INTO segments (namespace, id, checksum, record, nbytes, slots, ranks, used, depth, "
            "cost, worth, keep, first, salt) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
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
                whole.salt,
            ),
        )
        self._enter(stays)
        account(self.db, key, Usage(whole.nbytes, 1, whole.slots, 0, whole.cost_us))
        self.writing.committed(self.db, key, self.segment, self.digests, whole)
        if goes:
            self._replace(goes, used)

    def _replaceable(self) -> tuple[list[_Old], set[SegmentId]]:
        """Returns of the visible segments that it is to replace those that may go, and those that stay."""
        goes: list[_Old] = []
        stays: set[SegmentId] = set()
        for old in self.replaces:
            row = self.db.execute(
                "SELECT s.pinned, s.owner, s.salt, s.used, r.used, h.minutes FROM segments AS s "
                "LEFT JOIN retained AS r ON r.segment = s.key LEFT JOIN hot AS h ON h.segment = s.key "
                "WHERE s.namespace = ? AND s.id = ?",
                (self.place.generation, old.segment),
            ).fetchone()
            if row is None:
                continue
            pinned, owner, salt, counted, retained, minutes = row
            others = owner != self.session if owner else retained is not None
            if pinned or others or salt != self.record.salt:
                stays.add(old.segment)
            else:
                goes.append(_Old(old, counted if retained is None else retained, minutes or 0.0, bool(owner)))
        return goes, stays

    def _replace(self, olds: Sequence[_Old], used: float) -> None:
        """Evicts those of `olds` all of whose blocks other visible segments have by now; what was known of
        their use is this segment's, which counts as used in the minute `used`."""
        gone = [old for old in olds if self._is_served_elsewhere(old.replaced)]
        if not gone:
            return
        self.shared = not all(old.owned for old in gone)
        (key,) = self._one("SELECT key FROM segments", self.place.generation) or (0,)
        count_as_used(self.db, key, max(used, *(old.used for old in gone)))
        if heat := sum(old.heat for old in gone):
            self.db.execute("INSERT INTO hot VALUES (?, ?, ?)", (key, self.place.key, heat))
        # At once, unless the index was told a grace time.
        after_s = self.writing.deletion(1.0)
        segments = [old.replaced.segment for old in gone]
        evict(self.db, self.writing, self.place, segments, after_s, "joined")

    def _is_served_elsewhere(self, old: Replaced) -> bool:
        return all(self._served_by(one, old.segment) for one in split_digests(old.digests))

    def _served_by(self, digest: bytes, but: SegmentId) -> SegmentId | None:
        """Returns the visible segment that a block's entry leads to, unless it is `but`."""
        query = (
            "SELECT e.segment FROM blocks AS e JOIN segments AS s ON s.namespace = ? AND s.id = e.segment "
            "WHERE e.namespace = ? AND e.digest = ? AND e.segment <> ?"
        )
        row = self.db.execute(query, (self.place.generation, self.place.key, digest, but)).fetchone()
        return SegmentId(row[0]) if row else None

    def _enter(self, stays: Collection[SegmentId] = ()) -> None:
        """Enters its blocks, but for those that are in one of the segments that stay."""
        entries = [
            (self.place.key, digest, self.segment, slot)
            for slot, digest in enumerate(split_digests(self.digests))
        ]
        if stays:
            query = "SELECT segment FROM blocks WHERE namespace = ? AND digest = ?"
            entries = [
                one
                for one in entries
                if (self.db.execute(query, one[:2]).fetchone() or (b"",))[0] not in stays
            ]
        self.db.executemany("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?, ?)", entries)

    def _one(self, select: str, number: int) -> tuple[Any, ...] | None:
        """Returns a row of a table that belongs to this segment."""
        query = f"{select} WHERE namespace = ? AND id = ? LIMIT 1"
        row: tuple[Any, ...] | None = self.db.execute(query, (number, self.segment)).fetchone()
        return row
