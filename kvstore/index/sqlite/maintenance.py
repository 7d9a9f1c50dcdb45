"""SqliteMaintenance: changes the index in SQLite. The schema stands in kvstore.index.sqlite.schema.

Long work is cut into transactions of a few milliseconds, so that no engine's commit waits for it longer than
that. Each transaction reads anew what it changes, because others may have changed it in between.
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Callable, Collection, Sequence
from dataclasses import astuple

from kvstore.errors import CapacityExceeded
from kvstore.index.contract import (
    CULL_LOOKS,
    HOT_LEAST,
    SWEEP_FACTOR,
    SWEEP_MIN,
    check_segments,
)
from kvstore.index.maintenance import Entry, Erased, Reconciled, Usage
from kvstore.index.sqlite.catalogue import SqliteCatalogue
from kvstore.index.sqlite.evictions import (
    PAGE,
    aged_page,
    as_evicted,
    count_all,
    drain_some,
    erase_rest,
    erase_some,
    evict,
    first_to_go,
    forget,
    in_use,
    remove,
    rows_by_pin,
    sweep_page,
    usage_of,
)
from kvstore.index.sqlite.journal import Writing
from kvstore.index.sqlite.recency import expire_retained, release_gone, retained_and_gone
from kvstore.index.sqlite.rows import (
    LIVES,
    SLICE,
    NamespaceNumbers,
    account,
    new_generation,
    place_of,
)
from kvstore.keys import NamespaceId, SegmentId
from kvstore.rules.units import batches
from kvstore.sqlite import SqliteDatabase
from schemas.records import EvictionRule
from schemas.settings import JournalSettings

#: How often `reconcile` counts a namespace that changes meanwhile.
_COUNT_TRIES = 4


class SqliteMaintenance(SqliteCatalogue):
    """The part of SqliteIndex that makes the changes that no request waits for."""

    def __init__(
        self,
        database: SqliteDatabase,
        journal: JournalSettings,
        clock: Callable[[], float],
        grace_s: float = 0.0,
        by: str = "",
    ) -> None:
        """`grace_s`: see Index.evict."""
        super().__init__(database, journal, clock, by)
        self._writing = Writing(journal, clock, grace_s, by)

    # eviction

    def cull(
        self,
        namespace: NamespaceId,
        *,
        keep_bytes: int,
        delete_after_s: float,
        limit: int,
        rule: EvictionRule,
        spare_from_s: float | None = None,
        among: Collection[NamespaceId] = (),
    ) -> list[SegmentId]:
        gone: list[SegmentId] = []
        if limit <= 0 or self.usage(namespace).nbytes <= keep_bytes:
            return gone
        while True:
            most = min(SLICE, limit - len(gone))
            with self._database.writing("cull") as db:
                place = place_of(db, namespace)
                if place is None:
                    return gone
                expire_retained(db, place, self._clock())
                some = first_to_go(
                    db,
                    place,
                    keep_bytes=keep_bytes,
                    limit=most,
                    looks=CULL_LOOKS - len(gone),
                    spare_from_s=spare_from_s,
                )
                after_s = self._writing.deletion(delete_after_s)
                gone += evict(db, self._writing, place, some, after_s, rule)
            if len(some) < most or len(gone) == limit:
                return gone

    def age_out(
        self, namespace: NamespaceId, ttl_s: int | None, *, delete_after_s: float, after: str = ""
    ) -> tuple[int, str]:
        with self._database.reading("age_out") as db:
            place, scope = place_of(db, namespace), f"{LIVES}{namespace}"
            known = db.execute("SELECT nbytes FROM quotas WHERE scope = ?", (scope,)).fetchone()
            rows = [] if place is None or ttl_s is None else aged_page(db, place, bytes.fromhex(after))
        if place is not None and known != (None if ttl_s is None else (ttl_s,)):
            self.set_quota(scope, ttl_s)
        oldest = self._clock() - (ttl_s or 0)
        old = [SegmentId(segment) for segment, created_s in rows if created_s <= oldest]

        def change(db: sqlite3.Connection, place: NamespaceNumbers, some: Sequence[SegmentId]) -> int:
            return len(evict(db, self._writing, place, some, self._writing.deletion(delete_after_s), "ttl"))

        gone = self._changed("age_out", namespace, old, change)
        return gone, rows[-1][0].hex() if len(rows) == PAGE else ""

    def now(self, namespace: NamespaceId) -> float:
        return self._clock()

    def reapable(
        self, namespace: NamespaceId, now_s: float | None, limit: int
    ) -> list[tuple[SegmentId, int]]:
        now_s = self._clock() if now_s is None else now_s
        with self._database.reading("reapable") as db:
            rows = db.execute(
                "SELECT id, ranks FROM trash WHERE due <= ? AND namespace = "
                "(SELECT key FROM namespaces WHERE id = ?) ORDER BY due LIMIT ?",
                (math.floor(now_s), namespace, max(0, limit)),
            ).fetchall()
        return [(SegmentId(segment), ranks) for segment, ranks in rows]

    def reaped(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> None:
        def change(db: sqlite3.Connection, place: NamespaceNumbers, some: Sequence[SegmentId]) -> int:
            rows = [(place.key, segment) for segment in some]
            return db.executemany("DELETE FROM trash WHERE namespace = ? AND id = ?", rows).rowcount

        check_segments(segments)
        self._changed("reaped", namespace, segments, change, PAGE)

    def sweep(self, namespace: NamespaceId, limit: int) -> int:
        """Drops about `limit` dangling entries at most, and looks at 8 entries for each.

        A call that gets through all entries sooner stops there; it may begin anywhere.
        """
        dropped, looked, rounds = 0, 0, 0
        budget = max(SWEEP_MIN, SWEEP_FACTOR * limit)
        while dropped < limit and looked < budget and rounds < 2:
            with self._database.writing("sweep") as db:
                seen, gone, ended = sweep_page(db, namespace, limit - dropped)
            looked += seen
            dropped += gone
            rounds += ended
        return dropped

    # pins, quotas

    def pin(self, namespace: NamespaceId, segments: Sequence[SegmentId], *, most_bytes: int) -> int:
        check_segments(segments)
        with self._database.writing("pin") as db:
            place = place_of(db, namespace)
            if place is None:
                return 0
            fresh = rows_by_pin(db, place, segments, 0)
            nbytes = sum(size for _, size in fresh)
            whole = usage_of(db, place.key).pinned_bytes + nbytes
            if fresh and whole > most_bytes:
                raise CapacityExceeded(
                    f"sqlite {self._database.where}: pin: {whole} bytes of namespace {namespace} would be "
                    f"pinned; at most {most_bytes} may be"
                )
            db.executemany("UPDATE segments SET pinned = 1 WHERE key = ?", [(key,) for key, _ in fresh])
            account(db, place.key, Usage(0, 0, 0, nbytes))
        return len(fresh)

    def unpin(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> int:
        def change(db: sqlite3.Connection, place: NamespaceNumbers, some: Sequence[SegmentId]) -> int:
            pinned = rows_by_pin(db, place, some, 1)
            db.executemany("UPDATE segments SET pinned = 0 WHERE key = ?", [(key,) for key, _ in pinned])
            account(db, place.key, Usage(0, 0, 0, -sum(nbytes for _, nbytes in pinned)))
            return len(pinned)

        check_segments(segments)
        return self._changed("unpin", namespace, segments, change)

    def set_quota(self, scope: str, nbytes: int | None) -> None:
        with self._database.writing("set_quota") as db:
            if nbytes is None:
                db.execute("DELETE FROM quotas WHERE scope = ?", (scope,))
            else:
                db.execute("INSERT OR REPLACE INTO quotas VALUES (?, ?)", (scope, nbytes))

    # a whole namespace

    def invalidate(self, namespace: NamespaceId) -> int:
        with self._database.writing("invalidate") as db:
            place = place_of(db, namespace)
            if place is None:
                return 0
            usage = usage_of(db, place.key)
            db.execute(
                "UPDATE generations SET segments = ? WHERE number = ?", (usage.segments, place.generation)
            )
            new_generation(db, place.key)
            db.execute(
                "UPDATE namespaces SET nbytes = 0, segments = 0, blocks = 0, pinned = 0, cost = 0, "
                "sessions = 0 "
                "WHERE key = ?",
                (place.key,),
            )
            for table in ("hot", "ghosts", "retained", "sessions"):
                db.execute(f"DELETE FROM {table} WHERE namespace = ?", (place.key,))
            if usage.segments:
                self._writing.invalidated(db, place.key, usage)
        return usage.segments

    def drain(self, namespace: NamespaceId, *, delete_after_s: float, limit: int) -> int:
        moved = 0
        while moved < limit:
            with self._database.writing("drain") as db:
                place = place_of(db, namespace)
                some = min(SLICE, limit - moved)
                after_s = self._writing.deletion(delete_after_s)
                count = drain_some(db, place, some, after_s, self._clock()) if place else 0
            if not count:
                break
            moved += count
        return moved

    def erase(self, namespace: NamespaceId, limit: int) -> Erased:
        left = max(1, limit)
        while True:
            with self._database.writing("erase") as db:
                place = place_of(db, namespace)
                if place is None:
                    return "erased"
                if in_use(db, place, self._clock()):
                    return "in_use"
                count = erase_some(db, place, min(PAGE, left))
                if not count:
                    erase_rest(db, place)
                    return "erased"
            left -= count
            if left <= 0:
                return "more"

    # repair

    def unlist(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> int:
        def change(db: sqlite3.Connection, place: NamespaceNumbers, some: Sequence[SegmentId]) -> int:
            removed = remove(db, place, some)
            self._writing.evicted(db, place.key, as_evicted(removed), "repair")
            for segment in some:
                forget(db, place, segment)
            return len(removed)

        check_segments(segments)
        return self._changed("unlist", namespace, segments, change)

    def unlink(self, namespace: NamespaceId, entries: Sequence[Entry]) -> int:
        def change(db: sqlite3.Connection, place: NamespaceNumbers, some: Sequence[Entry]) -> int:
            query = "DELETE FROM blocks WHERE namespace = ? AND digest = ? AND segment = ? AND slot = ?"
            rows = [(place.key, one.digest, one.segment, one.slot) for one in some]
            return db.executemany(query, rows).rowcount

        check_segments([one.segment for one in entries])
        return self._changed("unlink", namespace, entries, change, PAGE)

    def reconcile(self, namespace: NamespaceId) -> Reconciled:
        """Counts in one snapshot, which no writer waits for. The order of eviction is an index on the
        segments' own rows, so nothing can be missing from it.

        An older release's process that had the file open before leaves rows of `retained` whose segments it
        has evicted.
        """
        with self._database.reading("reconcile") as db:
            place = place_of(db, namespace)
            gone = retained_and_gone(db, place) if place else []
        for some in batches(gone, PAGE):
            with self._database.writing("reconcile") as db:
                if (place := place_of(db, namespace)) is not None:
                    release_gone(db, place, some)
        for _ in range(_COUNT_TRIES):
            with self._database.reading("reconcile") as db:
                place = place_of(db, namespace)
                if place is None:
                    return Reconciled(Usage(0, 0, 0), Usage(0, 0, 0), 0)
                recorded, counted = usage_of(db, place.key), count_all(db, place)
            if counted == recorded or self._correct(namespace, place, recorded, counted):
                return Reconciled(recorded, counted, 0)
        return Reconciled(recorded, None, 0)

    def _correct(
        self, namespace: NamespaceId, place: NamespaceNumbers, recorded: Usage, counted: Usage
    ) -> bool:
        """Writes the counted usage if the recorded one is still what it was. Returns whether it did."""
        with self._database.writing("reconcile") as db:
            if place_of(db, namespace) != place or usage_of(db, place.key) != recorded:
                return False
            db.execute(
                "UPDATE namespaces SET nbytes = ?, segments = ?, blocks = ?, pinned = ?, cost = ? "
                "WHERE key = ?",
                (*astuple(counted), place.key),
            )
        return True

    def cool(self, namespace: NamespaceId) -> None:
        with self._database.writing("cool") as db:
            place = place_of(db, namespace)
            if place is not None:
                db.execute("UPDATE hot SET minutes = minutes / 2 WHERE namespace = ?", (place.key,))
                db.execute("DELETE FROM hot WHERE namespace = ? AND minutes < ?", (place.key, HOT_LEAST))
