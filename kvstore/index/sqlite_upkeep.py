"""SqliteUpkeep: what maintenance changes in the index in SQLite. The schema stands in sqlite_schema.

Long work is cut into transactions of a few milliseconds, so that no engine's commit waits for it longer than
that. Each slice looks again at what it changes: what others did in between counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import astuple

from kvstore.catalogue import Entry, Erased, Reconciled, Upkeep, Usage
from kvstore.errors import CapacityExceeded
from kvstore.index.contract import CULL_LOOKS, HOT_LEAST, SWEEP_FACTOR, SWEEP_MIN, check_segments
from kvstore.index.sqlite_catalogue import SqliteCatalogue
from kvstore.index.sqlite_file import SqliteDatabase
from kvstore.index.sqlite_journal import Writing
from kvstore.index.sqlite_moves import (
    PAGE,
    count_all,
    departed,
    drain_some,
    drop,
    erase_rest,
    erase_some,
    first_to_go,
    forget,
    in_use,
    pins,
    sweep_page,
    take,
    usage_of,
)
from kvstore.index.sqlite_rows import SLICE, Place, account, new_generation, place_of, slices
from kvstore.keys import NamespaceId, SegmentId
from schemas.records import EvictionRule
from schemas.settings import JournalSettings

#: Of two that contend for a lease, how much longer the other one may ask for it.
_LONGEST = 10
#: How often a count is begun anew that found the namespace changed.
_COUNTS = 4


class SqliteUpkeep(SqliteCatalogue, Upkeep):
    """The changes of SqliteIndex that no request waits for."""

    def __init__(
        self,
        database: SqliteDatabase,
        journal: JournalSettings,
        clock: Callable[[], float],
        grace_s: float = 0.0,
    ) -> None:
        """`grace_s`: see Index.evict."""
        super().__init__(database, journal, clock)
        self._writing = Writing(journal, clock, grace_s)

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
                some = first_to_go(
                    db,
                    place,
                    keep_bytes=keep_bytes,
                    limit=most,
                    looks=CULL_LOOKS - len(gone),
                    spare_from_s=spare_from_s,
                )
                after_s = self._writing.deletion(delete_after_s)
                gone += drop(db, self._writing, place, some, after_s, rule)
            if len(some) < most or len(gone) == limit:
                return gone

    def due(self, namespace: NamespaceId, now_s: float | None, limit: int) -> list[tuple[SegmentId, int]]:
        now_s = self._clock() if now_s is None else now_s
        with self._database.reading("due") as db:
            rows = db.execute(
                "SELECT id, ranks FROM trash WHERE due <= ? AND namespace = "
                "(SELECT key FROM namespaces WHERE id = ?) ORDER BY due LIMIT ?",
                (math.floor(now_s), namespace, max(0, limit)),
            ).fetchall()
        return [(SegmentId(segment), ranks) for segment, ranks in rows]

    def bury(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> None:
        check_segments(segments)
        for some in slices(segments, PAGE):
            with self._database.writing("bury") as db:
                place = place_of(db, namespace)
                if place is not None:
                    db.executemany(
                        "DELETE FROM trash WHERE namespace = ? AND id = ?",
                        [(place.key, segment) for segment in some],
                    )

    def sweep(self, namespace: NamespaceId, limit: int) -> int:
        """Drop dangling entries, at most about `limit`, looking at 8 entries for each of them.

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
            fresh = pins(db, place, segments, 0)
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
        check_segments(segments)
        count = 0
        for some in slices(segments):
            with self._database.writing("unpin") as db:
                place = place_of(db, namespace)
                if place is None:
                    break
                pinned = pins(db, place, some, 1)
                db.executemany("UPDATE segments SET pinned = 0 WHERE key = ?", [(key,) for key, _ in pinned])
                freed = [nbytes for _, nbytes in pinned]
                account(db, place.key, Usage(0, 0, 0, -sum(freed)))
                count += len(freed)
        return count

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
                "UPDATE namespaces SET nbytes = 0, segments = 0, blocks = 0, pinned = 0, cost = 0 "
                "WHERE key = ?",
                (place.key,),
            )
            for table in ("hot", "ghosts"):
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
        check_segments(segments)
        count = 0
        for some in slices(segments):
            with self._database.writing("unlist") as db:
                place = place_of(db, namespace)
                if place is None:
                    break
                taken = take(db, place, some)
                self._writing.evicted(db, place.key, departed(taken), "repair")
                for segment in some:
                    forget(db, place, segment)
                count += len(taken)
        return count

    def unlink(self, namespace: NamespaceId, entries: Sequence[Entry]) -> int:
        check_segments([one.segment for one in entries])
        count = 0
        for some in slices(entries, PAGE):
            with self._database.writing("unlink") as db:
                place = place_of(db, namespace)
                if place is None:
                    break
                count += db.executemany(
                    "DELETE FROM blocks WHERE namespace = ? AND digest = ? AND segment = ? AND slot = ?",
                    [(place.key, one.digest, one.segment, one.slot) for one in some],
                ).rowcount
        return count

    def reconcile(self, namespace: NamespaceId) -> Reconciled:
        """Counts in one snapshot, which no writer waits for. The order of eviction is an index on the
        segments' own rows, so nothing can be missing from it."""
        for _ in range(_COUNTS):
            with self._database.reading("reconcile") as db:
                place = place_of(db, namespace)
                if place is None:
                    return Reconciled(Usage(0, 0, 0), Usage(0, 0, 0), 0)
                recorded, counted = usage_of(db, place.key), count_all(db, place)
            if counted == recorded or self._correct(namespace, place, recorded, counted):
                return Reconciled(recorded, counted, 0)
        return Reconciled(recorded, None, 0)

    def _correct(self, namespace: NamespaceId, place: Place, recorded: Usage, counted: Usage) -> bool:
        """Write the right usage, if it still is what it was when it was counted."""
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

    # leases

    def lease(self, name: str, holder: str, ttl_s: float) -> bool:
        now = self._clock()
        with self._database.writing("lease") as db:
            row = db.execute("SELECT holder, expires FROM leases WHERE name = ?", (name,)).fetchone()
            # One that lasts much longer was taken before the clock was set back.
            if row and row[0] != holder and now < row[1] <= now + _LONGEST * ttl_s:
                return False
            db.execute("INSERT OR REPLACE INTO leases VALUES (?, ?, ?)", (name, holder, now + ttl_s))
        return True

    def release(self, name: str, holder: str) -> None:
        with self._database.writing("release") as db:
            db.execute("DELETE FROM leases WHERE name = ? AND holder = ?", (name, holder))

    def leaseholder(self, name: str) -> str | None:
        with self._database.reading("leaseholder") as db:
            row = db.execute(
                "SELECT holder FROM leases WHERE name = ? AND expires > ?", (name, self._clock())
            ).fetchone()
        return row[0] if row else None
