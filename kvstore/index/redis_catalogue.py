"""RedisCatalogue: looking at the index in Redis. The schema stands in kvstore.index.redis."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from kvstore.catalogue import Account, Candidate, Catalogue, Entry, Listing, SegmentState, Usage
from kvstore.errors import KVStoreError
from kvstore.index.contract import check_segments
from kvstore.index.redis_client import Script
from kvstore.index.redis_values import NAMESPACES, QUOTAS, SCHEMA, RedisPart, Use, key, pieces, record_of
from kvstore.keys import Digest, NamespaceId, SegmentId

#: Of listings, a compromise between round trips and how long one call holds Redis.
_PAGE = 500
#: Entries and buckets that one script of `entries` looks at: about 1 ms of Redis' time.
_ENTRIES_PAGE = 1024
#: Namespaces that are asked for in one round trip.
_NAMESPACES_PAGE = 256
_USAGE = ("bytes", "segments", "blocks", "pinned", "cost")

_SCORES = Script.load("scores")
_STATES = Script.load("states", "generations")
_ORDER = Script.load("order")
_ENTRIES = Script.load("entries", "buckets")
_PING = Script.load("ping")

#: By the number that states.lua answers.
_STATE_NAMES: tuple[SegmentState | None, ...] = (None, "visible", "incomplete", "bygone", "trash")


class RedisCatalogue(RedisPart, Catalogue):
    """The part of RedisIndex that looks."""

    def namespaces(self) -> dict[NamespaceId, str]:
        found = {}
        for names in pieces(self._registered(), _NAMESPACES_PAGE):
            asked = [("HMGET", key(name, "meta"), "schema", "json") for name in names]
            for name, (schema, text) in zip(names, self._client.many(asked), strict=True):
                if schema is not None:
                    found[name] = text.decode("ascii")
        return found

    def accounts(self) -> list[Account]:
        found, failure = self.reachable()
        if failure is not None:
            raise failure
        return found

    def reachable(self) -> tuple[list[Account], KVStoreError | None]:
        found: list[Account] = []
        failure: KVStoreError | None = None
        # One pipeline over several nodes fails as a whole if one of them does.
        for names in self._client.by_node({name: key(name, "meta") for name in self._registered()}):
            try:
                for some in pieces(names, _NAMESPACES_PAGE):
                    found += self._accounts(some)
            except KVStoreError as exc:
                failure = exc
        return sorted(found, key=lambda account: account.namespace), failure

    def _accounts(self, names: Sequence[NamespaceId]) -> Iterator[Account]:
        fields = ("schema", "kind", "tenant", "seen", "bygone", *_USAGE)
        asked: list[tuple[str, ...]] = []
        for name in names:
            asked += [("HMGET", key(name, "meta"), *fields), ("ZCARD", key(name, "trash"))]
        answers = self._client.many(asked)
        for name, known, trashed in zip(names, answers[::2], answers[1::2], strict=True):
            schema, kind, tenant, seen, bygone, *usage = known
            # A newer release's are evicted and deleted by what knows them.
            if schema is not None and int(schema) <= SCHEMA:
                yield Account(
                    namespace=name,
                    kind=kind.decode("ascii"),
                    tenant=tenant.decode(),
                    usage=usage_of(usage),
                    trashed=int(trashed),
                    bygone=int(bygone or 0),
                    seen_s=float(seen),
                )

    def _registered(self) -> list[NamespaceId]:
        return [
            NamespaceId(name.decode("ascii")) for name in sorted(self._client.command("SMEMBERS", NAMESPACES))
        ]

    def usage(self, namespace: NamespaceId) -> Usage:
        return usage_of(self._client.command("HMGET", key(namespace, "meta"), *_USAGE))

    def segments(self, namespace: NamespaceId) -> Iterator[Listing]:
        cursor = 0
        while True:
            cursor, page = self._client.command("HSCAN", key(namespace, "segs"), cursor, "COUNT", _PAGE)
            for some in pieces(list(page.items()), _PAGE):
                yield from self._listed(namespace, dict(some))
            if cursor == 0:
                return

    def get(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> list[Listing | None]:
        check_segments(segments)
        found: dict[SegmentId, Listing] = {}
        for some in pieces(segments, _PAGE):
            values = self._client.command("HMGET", key(namespace, "segs"), *some)
            listed = self._listed(namespace, {s: v for s, v in zip(some, values, strict=True) if v})
            found |= {listing.segment: listing for listing in listed}
        return [found.get(segment) for segment in segments]

    def _listed(self, namespace: NamespaceId, values: dict[Any, bytes]) -> Iterator[Listing]:
        if not values:
            return
        listed, pinned = self._client.run(_SCORES, key(namespace, "meta"), b"".join(values))
        for (segment, value), one, other in zip(values.items(), listed, pinned, strict=True):
            record = record_of(value)
            score = one if other is None else other
            # Without a last use it was evicted between the two calls.
            if record is not None and score is not None:
                yield Listing(SegmentId(segment), record, Use.of(score).used_s, other is not None)

    def states(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> list[SegmentState | None]:
        check_segments(segments)
        states: list[SegmentState | None] = []
        for some in pieces(segments, _PAGE):
            numbers = self._client.run(_STATES, key(namespace, "meta"), b"".join(some))
            states += [_STATE_NAMES[number] for number in numbers]
        return states

    def sample(self, namespace: NamespaceId, count: int) -> list[Listing]:
        where = key(namespace, "segs")
        size = int(self._client.command("HLEN", where))
        if 2 * count >= size:
            listed = list(self.segments(namespace))
            return random.sample(listed, min(count, len(listed)))
        # Of less than half of all, every draw brings something new.
        found: dict[SegmentId, Listing] = {}
        for _ in range(2 + 4 * count // _PAGE):
            if len(found) >= count:
                break
            flat = self._client.command("HRANDFIELD", where, min(_PAGE, count), "WITHVALUES")
            drawn = dict(zip(flat[::2], flat[1::2], strict=True))
            found |= {one.segment: one for one in self._listed(namespace, drawn)}
        return random.sample(list(found.values()), min(count, len(found)))

    def entries(self, namespace: NamespaceId) -> Iterator[Entry]:
        place: bytes | None = b"0"
        while place is not None:
            bits, place, buckets, pages = self._client.run(
                _ENTRIES, key(namespace, "meta"), place, _ENTRIES_PAGE
            )
            for bucket, flat in zip(buckets, pages, strict=True):
                first = (bucket >> int(bits) % 8).to_bytes(int(bits) // 8, "big")
                for field, value in zip(flat[::2], flat[1::2], strict=True):
                    yield Entry(Digest(first + field), SegmentId(value[:8]), int.from_bytes(value[8:], "big"))

    def order(self, namespace: NamespaceId, limit: int) -> list[Candidate]:
        # By id: what is evicted or touched between two pages moves the others.
        found: dict[SegmentId, Candidate] = {}
        for first in range(0, max(0, limit), _PAGE):
            last = min(first + _PAGE, limit) - 1
            flat, values = self._client.run(_ORDER, key(namespace, "meta"), first, last)
            for segment, score, value in zip(flat[::2], flat[1::2], values, strict=True):
                if value is not None:
                    use, nbytes = Use.of(score), value.split(b":", 1)[0]
                    # Of a damaged value as little as the scripts say: it must not end all evictions.
                    size = int(nbytes) if nbytes.isdigit() else 0
                    found[segment] = Candidate(SegmentId(segment), size, use.keep_s, use.used_s)
            if len(values) <= last - first:
                break
        return list(found.values())

    def hottest(self, namespace: NamespaceId, limit: int) -> list[tuple[SegmentId, float]]:
        if limit <= 0:
            return []
        flat = self._client.command("ZREVRANGE", key(namespace, "hot"), 0, limit - 1, "WITHSCORES")
        return [(SegmentId(s), float(score)) for s, score in zip(flat[::2], flat[1::2], strict=True)]

    def quotas(self) -> dict[str, int]:
        told = self._client.command("HGETALL", QUOTAS)
        # What is no number is no quota: it must not end every save that would make room.
        return {scope.decode(errors="replace"): int(n) for scope, n in told.items() if n.isdigit()}

    def ping(self) -> None:
        """Raises CapacityExceeded besides, if Redis is full: it can be read, but not written."""
        self._client.run(_PING, "kvs:ping")

    def memory(self) -> tuple[int, int] | None:
        """Bytes that Redis uses and may use (0: as many as it likes), of a Cluster its fullest node's.

        None if it doesn't tell: managed servers, and users without the right, are refused INFO.
        """
        try:
            told = self._client.everywhere("INFO", "memory")
        except KVStoreError:
            return None  # nothing depends on it, least of all whether the index answers
        nodes = [(one["used_memory"], one.get("maxmemory", 0)) for one in told if "used_memory" in one]
        return max(nodes, key=lambda node: (node[0] / (node[1] or float("inf")), node[0]), default=None)

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


def usage_of(fields: Sequence[bytes | None]) -> Usage:
    """From the fields of `meta` that are named in _USAGE."""
    return Usage(*(int(field or 0) for field in fields))
