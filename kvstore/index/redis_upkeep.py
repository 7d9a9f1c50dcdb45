"""RedisUpkeep: changing the index in Redis. The schema stands in kvstore.index.redis.

No script does more than a slice of what a verb was asked for: Redis answers nobody else meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kvstore.catalogue import Entry, Erased, Reconciled, Upkeep, Usage
from kvstore.errors import CapacityExceeded
from kvstore.index.contract import (
    CULL_LOOKS,
    HOT_LEAST,
    SWEEP_FACTOR,
    SWEEP_MIN,
    check_segments,
)
from kvstore.index.redis_catalogue import usage_of
from kvstore.index.redis_client import Script
from kvstore.index.redis_values import NAMESPACES, QUOTAS, RedisPart, key, pieces
from kvstore.keys import SEGMENT_ID_BYTES, NamespaceId, SegmentId
from schemas.records import EvictionRule

#: Segments that one script evicts, moves or forgets, and entries that it unlinks: 1 to 2 ms of Redis' time.
SLICE = 100
_MOVED_SLICE = 500
_UNLINKED_SLICE = 1000
#: Entries and buckets that one sweep or erase script looks at: about 1 ms of Redis' time.
_SWEEP_SLICE = 1024
_DUE_SLICE = 2000
_COUNT_TRIES = 4

_CULL = Script.load("cull", "changes", "score", "grace", "drop")
_SWEEP = Script.load("sweep", "buckets")
_PIN = Script.load("pin", "changes", "pinnable")
_UNPIN = Script.load("unpin", "changes", "pinnable")
_QUOTA = Script.load("quota")
_INVALIDATE = Script.load("invalidate", "changes", "generations")
_DRAIN = Script.load("drain", "generations", "grace")
_ERASE = Script.load("erase", "generations")
_UNLIST = Script.load("unlist", "changes", "generations")
_UNLINK = Script.load("unlink")
_COUNT = Script.load("count", "score")
_CORRECT = Script.load("correct", "generations")
_COOL = Script.load("cool")
_LEASE = Script.load("lease")
_RELEASE = Script.load("release")
_TIME = Script.load("time")

#: By the number that erase.lua answers.
_ERASED: tuple[Erased, ...] = ("erased", "more", "in_use")


class RedisUpkeep(RedisPart, Upkeep):
    """The part of RedisIndex that changes what is there."""

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
        spare = "" if spare_from_s is None else f"{spare_from_s:.17g}"
        looked = spared = 0
        more = True
        while more and len(gone) < limit and looked < CULL_LOOKS:
            looks = min(CULL_LOOKS - looked, SLICE)
            part, passed, more = self._client.run(
                _CULL,
                key(namespace, "meta"),
                keep_bytes,
                self.deletion(delete_after_s),
                *self.recorded(rule),
                limit - len(gone),
                looks,
                spared,
                spare,
            )
            gone += map(SegmentId, part)
            spared += passed
            looked += looks
        return gone

    def due(self, namespace: NamespaceId, now_s: float | None, limit: int) -> list[tuple[SegmentId, int]]:
        if now_s is None:
            now_s = float(self._client.run(_TIME, key(namespace, "meta")))
        after_s = math.floor(now_s) + 1
        found: dict[SegmentId, int] = {}
        for first in range(0, max(0, limit), _DUE_SLICE):
            last = min(first + _DUE_SLICE, limit) - 1
            flat = self._client.command("ZRANGE", key(namespace, "trash"), first, last, "WITHSCORES")
            scores = [float(score) for score in flat[1::2]]
            for segment, score in zip(flat[::2], scores, strict=True):
                if score < after_s:
                    found[SegmentId(segment)] = round(score % 1 * 256)
            if len(scores) <= last - first or scores[-1] >= after_s:
                break
        return list(found.items())

    def bury(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> None:
        check_segments(segments)
        for some in pieces(segments, _UNLINKED_SLICE):
            self._client.command("ZREM", key(namespace, "trash"), *some)

    def sweep(self, namespace: NamespaceId, limit: int) -> int:
        """Drop dangling entries, at most about `limit`, looking at 8 entries for each of them.

        A call that gets through all buckets sooner stops there; it may begin anywhere.
        """
        dropped, looked, rounds = 0, 0, 0
        budget = max(SWEEP_MIN, SWEEP_FACTOR * limit)
        while dropped < limit and looked < budget and rounds < 2:
            slice_ = self._client.run(_SWEEP, key(namespace, "meta"), limit - dropped, _SWEEP_SLICE)
            dropped += slice_[0]
            looked += slice_[1]
            rounds += slice_[2]
        return dropped

    def pin(self, namespace: NamespaceId, segments: Sequence[SegmentId], *, most_bytes: int) -> int:
        """Of more than 500 segments not in one step: while it fails, others may see some of them pinned."""
        check_segments(segments)
        done: list[SegmentId] = []
        pinned = 0
        for some in pieces(segments, _MOVED_SLICE):
            count, nbytes, fresh = self._client.run(_PIN, key(namespace, "meta"), b"".join(some), most_bytes)
            if count < 0:
                self.unpin(namespace, done)
                raise CapacityExceeded(
                    f"redis {self._client.where}: pin: {nbytes} bytes more would be pinned than the "
                    f"{most_bytes} that may be in namespace {namespace}"
                )
            pinned += count
            # What was pinned before stays so, should the next ones be too many.
            done += [
                SegmentId(fresh[at : at + SEGMENT_ID_BYTES]) for at in range(0, len(fresh), SEGMENT_ID_BYTES)
            ]
        return pinned

    def unpin(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> int:
        check_segments(segments)
        runs = pieces(segments, _MOVED_SLICE)
        return sum(self._client.run(_UNPIN, key(namespace, "meta"), b"".join(some)) for some in runs)

    def set_quota(self, scope: str, nbytes: int | None) -> None:
        self._client.run(_QUOTA, QUOTAS, scope, *(() if nbytes is None else (nbytes,)))

    def invalidate(self, namespace: NamespaceId) -> int:
        return int(self._client.run(_INVALIDATE, key(namespace, "meta"), self._journal.events))

    def drain(self, namespace: NamespaceId, *, delete_after_s: float, limit: int) -> int:
        after, moved, cursor = self.deletion(delete_after_s), 0, 0
        while moved < limit:
            fields = self._client.command("HMGET", key(namespace, "meta"), "drained", "epoch")
            drained, epoch = (int(field or 0) for field in fields)
            if drained >= epoch:
                break
            old = key(namespace, f"old:{drained}")
            cursor, page = self._client.command("HSCAN", old, cursor, "COUNT", SLICE)
            if page or not cursor:
                some = b"".join(list(page)[: min(limit - moved, _MOVED_SLICE)])
                moved += self._client.run(_DRAIN, key(namespace, "meta"), drained, some, after)
        return moved

    def erase(self, namespace: NamespaceId, limit: int) -> Erased:
        state, dropped, looked = 1, 0, 0
        budget = max(SWEEP_MIN, SWEEP_FACTOR * limit)
        while state == 1 and dropped < limit and looked < budget:
            state, some, seen = self._client.run(
                _ERASE, key(namespace, "meta"), limit - dropped, _SWEEP_SLICE
            )
            dropped += some
            looked += seen
        if _ERASED[state] == "erased":
            self._client.command("SREM", NAMESPACES, namespace)
            # Registered meanwhile: then its id belongs there. See register for the other half of this.
            if self._client.command("EXISTS", key(namespace, "meta")):
                self._client.command("SADD", NAMESPACES, namespace)
        return _ERASED[state]

    def unlist(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> int:
        check_segments(segments)
        return sum(
            self._client.run(_UNLIST, key(namespace, "meta"), b"".join(some), self._journal.events)
            for some in pieces(segments, SLICE)
        )

    def unlink(self, namespace: NamespaceId, entries: Sequence[Entry]) -> int:
        check_segments([entry.segment for entry in entries])
        packed = [one.digest + one.segment + one.slot.to_bytes(2, "big") for one in entries]
        runs = pieces(packed, _UNLINKED_SLICE)
        return sum(self._client.run(_UNLINK, key(namespace, "meta"), b"".join(some)) for some in runs)

    def reconcile(self, namespace: NamespaceId) -> Reconciled:
        mended = 0
        for _ in range(_COUNT_TRIES):
            changes, *fields = self._client.command(
                "HMGET", key(namespace, "meta"), "changes", "bytes", "segments", "blocks", "pinned", "cost"
            )
            recorded = usage_of(fields)
            sums = self._count(namespace)
            mended += sums.pop()
            if self._client.run(_CORRECT, key(namespace, "meta"), changes or 0, *sums):
                return Reconciled(recorded, Usage(*sums), mended)
        return Reconciled(recorded, None, mended)

    def _count(self, namespace: NamespaceId) -> list[int]:
        """The five numbers of Usage, and how many segments were mended."""
        seen: set[bytes] = set()
        sums, cursor = [0] * 6, 0
        while True:
            cursor, page = self._client.command(
                "HSCAN", key(namespace, "segs"), cursor, "COUNT", _MOVED_SLICE
            )
            # HSCAN may answer with one twice.
            fresh = [segment for segment in page if segment not in seen]
            seen.update(fresh)
            for some in pieces(fresh, _MOVED_SLICE):
                counted = self._client.run(_COUNT, key(namespace, "meta"), b"".join(some))
                sums = [a + int(b) for a, b in zip(sums, counted, strict=True)]
            if cursor == 0:
                return sums

    def cool(self, namespace: NamespaceId) -> None:
        self._client.run(_COOL, key(namespace, "meta"), HOT_LEAST)

    def lease(self, name: str, holder: str, ttl_s: float) -> bool:
        return bool(self._client.run(_LEASE, _lease_key(name), holder, max(1, round(ttl_s * 1000))))

    def release(self, name: str, holder: str) -> None:
        self._client.run(_RELEASE, _lease_key(name), holder)

    def leaseholder(self, name: str) -> str | None:
        holder = self._client.command("GET", _lease_key(name))
        return None if holder is None else holder.decode()


def _lease_key(name: str) -> str:
    return f"kvs:lease:{name}"
