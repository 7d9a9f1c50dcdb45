"""RedisCatalogue: the index in Redis as maintenance sees it. The schema stands in kvstore.index.redis."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import lru_cache

from kvstore.errors import KVStoreError
from kvstore.index.contract import SWEEP_FACTOR, SWEEP_MIN, check_segments, whole_seconds
from kvstore.index.redis_client import RedisClient, Script
from kvstore.keys import NamespaceId, SegmentId
from kvstore.ports import Catalogue, Listing, Usage
from schemas.records import SegmentRecord, unpack_record

NAMESPACES = "kvs:ns"
#: HSCAN's page, a compromise between round trips and how long one call holds Redis.
_PAGE = 500
#: Entries and buckets that one sweep script looks at: 1 to 2 ms of Redis' time.
_SWEEP_SLICE = 2048

_CULL = Script.load("cull", "drop")
_SWEEP = Script.load("sweep")
_PING = Script.load("ping")


def key(namespace: NamespaceId, part: str) -> str:
    """A key of one namespace; the braces make a Cluster keep all of them on one node."""
    return f"kvs:{{{namespace}}}:{part}"


@lru_cache(maxsize=8192)
def record_of(value: bytes) -> SegmentRecord | None:
    """The record in a value of the `segs` hash: `<bytes>:<slots>:`, 8 bytes of checksum, the record.

    Cached because the same prefixes are matched again and again, and unpacking 128 records takes
    longer than Redis takes to find them.
    """
    fields = value.split(b":", 2)
    return unpack_record(fields[2][8:]) if len(fields) == 3 else None


class RedisCatalogue(Catalogue):
    """The maintenance half of RedisIndex."""

    def __init__(self, client: RedisClient) -> None:
        self._client = client

    def namespaces(self) -> dict[NamespaceId, str]:
        found = {}
        for name in sorted(self._client.command("SMEMBERS", NAMESPACES)):
            namespace = NamespaceId(name.decode("ascii"))
            text = self._client.command("HGET", key(namespace, "meta"), "json")
            if text is not None:
                found[namespace] = text.decode("ascii")
        return found

    def usage(self, namespace: NamespaceId) -> Usage:
        counters = self._client.command("HMGET", key(namespace, "meta"), "bytes", "segments", "blocks")
        return Usage(*(int(counter or 0) for counter in counters))

    def segments(self, namespace: NamespaceId) -> Iterator[Listing]:
        cursor = 0
        while True:
            cursor, page = self._client.command("HSCAN", key(namespace, "segs"), cursor, "COUNT", _PAGE)
            yield from self._listed(namespace, page)
            if cursor == 0:
                return

    def get(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> list[Listing | None]:
        check_segments(segments)
        if not segments:
            return []
        values = self._client.command("HMGET", key(namespace, "segs"), *segments)
        listed = self._listed(namespace, {s: v for s, v in zip(segments, values, strict=True) if v})
        found = {listing.segment: listing for listing in listed}
        return [found.get(segment) for segment in segments]

    def _listed(self, namespace: NamespaceId, values: dict[bytes, bytes]) -> Iterator[Listing]:
        if not values:
            return
        scores = self._client.command("ZMSCORE", key(namespace, "lru"), *values)
        for (segment, value), score in zip(values.items(), scores, strict=True):
            record = record_of(value)
            # Without a last use it was evicted between the two calls.
            if record is not None and score is not None:
                yield Listing(SegmentId(segment), record, math.ceil(float(score)) * 60.0)

    def cull(
        self, namespace: NamespaceId, *, keep_bytes: int, delete_after_s: float, limit: int
    ) -> list[SegmentId]:
        after = whole_seconds(delete_after_s)
        gone = self._client.run(_CULL, key(namespace, "meta"), keep_bytes, after, limit)
        return [SegmentId(segment) for segment in gone]

    def due(self, namespace: NamespaceId, now_s: float, limit: int) -> list[tuple[SegmentId, int]]:
        below = f"({math.floor(now_s) + 1}"
        flat = self._client.command(
            "ZRANGEBYSCORE", key(namespace, "trash"), "-inf", below, "WITHSCORES", "LIMIT", 0, limit
        )
        pairs = zip(flat[::2], flat[1::2], strict=True)
        return [(SegmentId(segment), round(float(score) % 1 * 256)) for segment, score in pairs]

    def bury(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> None:
        check_segments(segments)
        if segments:
            self._client.command("ZREM", key(namespace, "trash"), *segments)

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

    def ping(self) -> None:
        """Raises CapacityExceeded besides, if Redis is full: it can be read, but not written."""
        self._client.run(_PING, "kvs:ping")

    def warnings(self) -> list[str]:
        """What is wrong with this Redis' configuration, in sentences. Raises what ping raises."""
        found = []
        policy = self._config("maxmemory-policy")
        if policy not in (None, "noeviction"):
            victims = "claims and incomplete saves" if policy.startswith("volatile") else "parts of the index"
            found.append(
                f"maxmemory-policy is {policy}: when full, Redis drops {victims} behind kvstore's back; "
                "set it to noeviction, kvstore evicts by itself"
            )
        entries = self._config("hash-max-listpack-entries") or self._config("hash-max-ziplist-entries")
        if entries is not None and int(entries) < 128:
            found.append(
                f"hash-max-listpack-entries is {entries}: buckets of 64 entries on average need 128, or the "
                "index takes 2.5 times the memory"
            )
        size = self._config("hash-max-listpack-value") or self._config("hash-max-ziplist-value")
        if size is not None and int(size) < 16:
            found.append(f"hash-max-listpack-value is {size}: entries have 16 bytes; set it to 64")
        found += [text for namespace in self.namespaces() if (text := self._overfull(namespace))]
        return found

    def _config(self, name: str) -> str | None:
        try:
            reply = self._client.command("CONFIG", "GET", name)
        except KVStoreError:
            return None  # managed Redis hides CONFIG
        if isinstance(reply, dict):
            reply = [word for pair in reply.items() for word in pair]
        return reply[1].decode("ascii") if reply else None

    def _overfull(self, namespace: NamespaceId) -> str | None:
        """Whether the first buckets have outgrown the compact encoding."""
        for bucket in range(4):
            encoding = self._client.command("OBJECT", "ENCODING", key(namespace, f"b:{bucket:x}"))
            if encoding not in (None, b"listpack", b"ziplist"):
                return (
                    f"namespace {namespace} has outgrown its buckets: its blocks take 2.5 times the memory; "
                    "raise identity.epoch, so that it begins anew with buckets for today's capacity_bytes"
                )
        return None
