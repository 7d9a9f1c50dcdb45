"""MaintenancePart: changes the index in Redis. The schema stands in kvstore.index.scripted.index.

A script does at most a slice of what a verb was asked for: Redis answers nobody else meanwhile.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from contextlib import suppress
from math import floor, isfinite
from typing import Any

from kvstore.errors import CapacityExceeded, TransientError
from kvstore.index.contract import (
    CULL_LOOKS,
    HOT_LEAST,
    SWEEP_FACTOR,
    SWEEP_MIN,
    check_segments,
)
from kvstore.index.maintenance import Entry, Erased, Reconciled, Usage
from kvstore.index.numbers import MOST_S, real, whole
from kvstore.index.scripted.catalogue import usage_of
from kvstore.index.scripted.scripts import Script
from kvstore.index.scripted.values import (
    NAMESPACES,
    NAMESPACES_PAGE,
    QUOTAS,
    ScriptedPart,
    key,
    number,
    segment_ids,
    understood,
)
from kvstore.index.sharding.names import base_of
from kvstore.keys import SEGMENT_ID_BYTES, NamespaceId, SegmentId, namespace_id
from kvstore.rules.units import batches
from schemas.namespace import Namespace
from schemas.records import SALT_ID_BYTES, EvictionRule

#: Segments that one script evicts: 1 to 2 ms of Redis's time, as are the next two.
SLICE = 100
#: Segments that one script moves or counts.
_MOVE_SLICE = 500
#: Entries that one script unlinks, and reaped segments that one command forgets.
_UNLINK_SLICE = 1000
#: Entries and buckets that one sweep or erase script looks at: about 1 ms of Redis's time.
_SWEEP_SLICE = 1024
#: Trashed segments that one command lists.
_REAPABLE_SLICE = 2000
#: How often `reconcile` counts a namespace that changes meanwhile.
_COUNT_TRIES = 4
#: Calls of `drain` that move no segment: pages and generations that are empty. The next call goes on there.
_DRAIN_ROUNDS = 10_000
#: Where a look at a hash goes on: a number of 64 bits.
_MOST_CURSOR = (1 << 64) - 1

_CULL = Script.load("cull", "changes", "score", "retention", "grace", "fate", "drop")
_AGE_OUT = Script.load("age_out", "changes", "score", "retention", "grace", "fate", "drop")
_SWEEP = Script.load("sweep", "buckets")
_PIN = Script.load("pin", "changes", "pinnable")
_UNPIN = Script.load("unpin", "changes", "pinnable")
_QUOTA = Script.load("quota")
_INVALIDATE = Script.load("invalidate", "changes", "generations")
_DRAIN = Script.load("drain", "generations", "grace")
_ERASE = Script.load("erase", "generations", "buckets")
_UNLIST = Script.load("unlist", "changes", "generations")
_UNLINK = Script.load("unlink")
_REPLACE = Script.load("replace", "generations")
_COUNT = Script.load("count", "score")
_CORRECT = Script.load("correct", "generations")
_COOL = Script.load("cool")
_TIME = Script.load("time")

#: What the numbers that erase.lua answers mean.
_ERASED: tuple[Erased, ...] = ("erased", "more", "in_use")


class MaintenancePart(ScriptedPart):
    """The part of ScriptedIndex that changes what is there."""

    @understood
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
        spare = "" if spare_from_s is None else f"{spare_from_s:.17g}"
        looked = spared = 0
        more = True
        while more and len(gone) < limit and looked < CULL_LOOKS:
            looks = min(CULL_LOOKS - looked, SLICE)
            part, passed, more = self._run(
                _CULL,
                namespace,
                keep_bytes,
                self.deletion(delete_after_s),
                *self.recorded(rule),
                limit - len(gone),
                looks,
                spared,
                spare,
                self._by,
            )
            if len(part) > limit - len(gone):
                raise ValueError(f"{len(part)} segments of {limit - len(gone)}")
            gone += segment_ids(part)
            spared += whole(passed, most=looks)
            looked += looks
        return gone

    @understood
    def age_out(
        self, namespace: NamespaceId, ttl_s: int | None, *, delete_after_s: float, after: str = ""
    ) -> tuple[int, str]:
        how = (self.deletion(delete_after_s), *self.recorded("ttl"), _MOVE_SLICE, SLICE, after or 0)
        gone, cursor = self._run(_AGE_OUT, namespace, "" if ttl_s is None else ttl_s, *how, self._by)
        return whole(gone), str(whole(cursor, most=_MOST_CURSOR)) if cursor else ""

    @understood
    def now(self, namespace: NamespaceId) -> float:
        return real(self._run(_TIME, namespace), least=0.0, most=MOST_S)

    @understood
    def reapable(
        self, namespace: NamespaceId, now_s: float | None, limit: int
    ) -> list[tuple[SegmentId, int]]:
        if now_s is None:
            now_s = self.now(namespace)
        after_s = floor(now_s) + 1
        found: dict[SegmentId, int] = {}
        for first in range(0, max(0, limit), _REAPABLE_SLICE):
            last = min(first + _REAPABLE_SLICE, limit) - 1
            flat = self._client.command("ZRANGE", key(namespace, "trash"), first, last, "WITHSCORES")
            scores = [real(score) for score in flat[1::2]]
            due = {one: score for one, score in zip(flat[::2], scores, strict=True) if score < after_s}
            segments = segment_ids(list(due))
            # A score that is no time tells no number of ranks either; what `fsck` finds are the others'.
            found |= {one: round(due[one] % 1 * 256) if isfinite(due[one]) else 1 for one in segments}
            if strangers := set(due) - set(segments):
                # They name no payload, and would count as evicted segments for good.
                self._client.command("ZREM", key(namespace, "trash"), *strangers)
            if len(scores) <= last - first or scores[-1] >= after_s:
                break
        return list(found.items())

    @understood
    def reaped(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> None:
        check_segments(segments)
        for some in batches(segments, _UNLINK_SLICE):
            self._client.command("ZREM", key(namespace, "trash"), *some)

    @understood
    def sweep(self, namespace: NamespaceId, limit: int) -> int:
        """Drops about `limit` dangling entries at most, and looks at 8 entries for each.

        A call that gets through all buckets sooner stops there; it may begin anywhere.
        """
        dropped, looked, rounds = 0, 0, 0
        budget = max(SWEEP_MIN, SWEEP_FACTOR * limit)
        while dropped < limit and looked < budget and rounds < 2:
            some, seen, ended = self._run(_SWEEP, namespace, limit - dropped, _SWEEP_SLICE)
            dropped += whole(some)
            # Each call is a step towards the end, whatever it says.
            looked += max(1, whole(seen))
            rounds += whole(ended, most=1)
        return dropped

    @understood
    def pin(self, namespace: NamespaceId, segments: Sequence[SegmentId], *, most_bytes: int) -> int:
        """Takes several steps for more than 500 segments: others may see some pinned by a call that fails."""
        check_segments(segments)
        done: list[SegmentId] = []
        pinned = 0
        for some in batches(segments, _MOVE_SLICE):
            count, nbytes, fresh = self._run(_PIN, namespace, b"".join(some), most_bytes)
            count = whole(count, least=-len(some), most=len(some))
            if count < 0:
                self.unpin(namespace, done)
                raise CapacityExceeded(
                    f"{self._client.name}: pin: {whole(nbytes)} bytes more would be pinned than the "
                    f"{most_bytes} that may be in namespace {namespace}"
                )
            pinned += count
            # Should the next ones be too many, only those that this call has pinned are unpinned.
            done += [
                SegmentId(fresh[at : at + SEGMENT_ID_BYTES]) for at in range(0, len(fresh), SEGMENT_ID_BYTES)
            ]
        return pinned

    @understood
    def unpin(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> int:
        check_segments(segments)
        return self._run_all(_UNPIN, namespace, segments, _MOVE_SLICE)

    def set_quota(self, scope: str, nbytes: int | None) -> None:
        self._client.run(_QUOTA, QUOTAS, scope, *(() if nbytes is None else (nbytes,)))

    @understood
    def invalidate(self, namespace: NamespaceId) -> int:
        return whole(self._run(_INVALIDATE, namespace, self._journal.events, self._by))

    @understood
    def drain(self, namespace: NamespaceId, *, delete_after_s: float, limit: int) -> int:
        after, moved, cursor = self.deletion(delete_after_s), 0, 0
        for _ in range(limit + _DRAIN_ROUNDS):
            if moved >= limit:
                break
            fields = self._client.command("HMGET", key(namespace, "meta"), "drained", "epoch")
            drained, epoch = (number(field) for field in fields)
            if drained >= epoch:
                break
            old = key(namespace, f"old:{drained}")
            cursor, page = self._client.command("HSCAN", old, cursor, "COUNT", SLICE)
            segments = segment_ids(list(page))
            if strangers := set(page) - set(segments):
                # They name no payload, and the generation would never be empty.
                self._client.command("HDEL", old, *strangers)
            if segments or not cursor:
                some = b"".join(segments[: min(limit - moved, _MOVE_SLICE)])
                moved += whole(self._run(_DRAIN, namespace, drained, some, after), most=_MOVE_SLICE)
        return moved

    @understood
    def erase(self, namespace: NamespaceId, limit: int) -> Erased:
        state = self._erase(namespace, limit)
        if _ERASED[state] == "erased":
            self._unregister(namespace)
            # The ids that somebody has left who was cut off just here, or just before a first registration.
            with suppress(TransientError):
                for name in self._unknown_ids():
                    self._unregister(name)
        return _ERASED[state]

    def _erase(self, namespace: NamespaceId, limit: int, *, aside: str = "") -> int:
        state, dropped, looked = 1, 0, 0
        how = (_SWEEP_SLICE, aside)
        budget = max(SWEEP_MIN, SWEEP_FACTOR * limit)
        while state == 1 and dropped < limit and looked < budget:
            told, some, seen = self._run(_ERASE, namespace, limit - dropped, *how)
            state = whole(told, most=len(_ERASED) - 1)
            dropped += whole(some)
            looked += max(1, whole(seen))
        return state

    @understood
    def is_in_use(self, name: NamespaceId) -> bool:
        """Asks `erase` for what it does first."""
        state, _, _ = self._run(_ERASE, name, 0, 0, "")
        return _ERASED[whole(state, most=len(_ERASED) - 1)] == "in_use"

    def _unregister(self, namespace: NamespaceId) -> None:
        self._client.command("SREM", NAMESPACES, namespace)
        # If it was registered meanwhile, its id belongs there. See register for the other half of this.
        if self._client.command("EXISTS", key(namespace, "meta")):
            self._client.command("SADD", NAMESPACES, namespace)

    def _unknown_ids(self) -> list[NamespaceId]:
        found: list[NamespaceId] = []
        for names in batches(self._registered(), NAMESPACES_PAGE):
            there = self._client.many([("EXISTS", key(name, "meta")) for name in names])
            found += [name for name, known in zip(names, there, strict=True) if not known]
        return found

    @understood
    def unlist(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> int:
        check_segments(segments)
        return self._run_all(_UNLIST, namespace, segments, SLICE, self._journal.events, self._by)

    @understood
    def unlink(self, namespace: NamespaceId, entries: Sequence[Entry]) -> int:
        check_segments([entry.segment for entry in entries])
        packed = [one.digest + one.segment + one.slot.to_bytes(2, "big") for one in entries]
        return self._run_all(_UNLINK, namespace, packed, _UNLINK_SLICE)

    @understood
    def reconcile(self, namespace: NamespaceId) -> Reconciled:
        replaced = self._replaced(namespace)
        self._disown_gone(namespace)
        mended = 0
        for _ in range(_COUNT_TRIES):
            changes, *fields = self._client.command(
                "HMGET", key(namespace, "meta"), "changes", "bytes", "segments", "blocks", "pinned", "cost"
            )
            recorded = usage_of(fields)
            sums, of_salts, retained = self._count(namespace)
            mended += sums.pop()
            packed = [
                b"".join(
                    salt.ljust(SALT_ID_BYTES, b"\0") + b"%015d" % nbytes for salt, nbytes in each.items()
                )
                for each in (of_salts, retained)
            ]
            if self._run(_CORRECT, namespace, changes or 0, *sums, *packed):
                return Reconciled(recorded, Usage(*sums), mended, replaced)
        return Reconciled(recorded, None, mended, replaced)

    def _disown_gone(self, namespace: NamespaceId) -> None:
        """Drops owners of segments that are gone: a release that knows no sessions leaves them."""
        cursor: Any = 0
        while True:
            cursor, page = self._client.command(
                "HSCAN", key(namespace, "owner"), cursor, "COUNT", _MOVE_SLICE
            )
            for some in batches(list(page), _MOVE_SLICE):
                there = self._client.command("HMGET", key(namespace, "segs"), *some)
                if gone := [segment for segment, value in zip(some, there, strict=True) if value is None]:
                    self._client.command("HDEL", key(namespace, "owner"), *gone)
            if cursor == 0:
                return

    def _replaced(self, namespace: NamespaceId) -> tuple[str, ...]:
        """Replaces what makes no sense; returns its names."""
        replaced = [ascii(name.decode("ascii", "replace")) for name in self._run(_REPLACE, namespace)]
        where = key(namespace, "meta")
        text, *known = self._client.command("HMGET", where, "json", "kind", "tenant")
        try:
            said = Namespace.model_validate_json(text or b"")
        except ValueError:
            said = None
        if said is not None and namespace_id(said) == base_of(namespace):
            right = {"kind": said.kind, "tenant": said.tenant}
            wrong = [name for name, value in zip(right, known, strict=True) if value != right[name].encode()]
            for name in wrong:
                self._client.command("HSET", where, name, right[name])
            replaced += wrong
        return tuple(replaced)

    def _count(self, namespace: NamespaceId) -> tuple[list[int], Counter[bytes], Counter[bytes]]:
        """Returns the five numbers of Usage, how many segments were put back into the order of eviction, the
        bytes of each salt, and the retained bytes of each salt and of all, which has an empty one."""
        seen: set[bytes] = set()
        sums, of_salts, retained, cursor = [0] * 6, Counter[bytes](), Counter[bytes](), 0
        while True:
            cursor, page = self._client.command("HSCAN", key(namespace, "segs"), cursor, "COUNT", _MOVE_SLICE)
            # HSCAN may return a segment twice.
            fresh = [segment for segment in segment_ids(list(page)) if segment not in seen]
            seen.update(fresh)
            for some in batches(fresh, _MOVE_SLICE):
                *counted, salted, kept = self._run(_COUNT, namespace, b"".join(some))
                sums = [a + whole(b) for a, b in zip(sums, counted, strict=True)]
                for salt, nbytes in zip(salted[::2], salted[1::2], strict=True):
                    of_salts[salt] += whole(nbytes)
                for salt, nbytes in zip(kept[::2], kept[1::2], strict=True):
                    retained[b""] += whole(nbytes)
                    if salt:
                        retained[salt] += whole(nbytes)
            if cursor == 0:
                return sums, of_salts, retained

    @understood
    def cool(self, namespace: NamespaceId) -> None:
        self._run(_COOL, namespace, HOT_LEAST)
