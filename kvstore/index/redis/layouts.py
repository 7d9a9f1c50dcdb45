"""RedisLayouts: registers namespaces in Redis, and moves what shards hold into others. The schema stands in
kvstore.index.redis.index."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvstore.errors import NamespaceUnknown, PermissionDenied
from kvstore.index.contract import check_segments
from kvstore.index.maintenance import Entry
from kvstore.index.redis.catalogue import RedisCatalogue, other_of, shards_of
from kvstore.index.redis.client import Script
from kvstore.index.redis.maintenance import SLICE, RedisMaintenance
from kvstore.index.redis.values import (
    AGREED_BYTES,
    MOST_BITS,
    NAMESPACES,
    SHARDED_SCHEMA,
    is_namespace,
    key,
    record_of,
    segment_ids,
    understood,
)
from kvstore.index.sharding.leaf import Layout, MovableLeaf, Step, Taken
from kvstore.index.sharding.names import base_of
from kvstore.keys import NamespaceId, SegmentId, canonical_json, namespace_id
from kvstore.rules.units import batches
from schemas.namespace import Namespace

#: A full bucket has between half of this and this many entries on average.
BUCKET_ENTRIES = 64
#: Segments on a page that is moved, and entries that one script enters: 1 to 2 ms of Redis's time.
_PAGE = 500
_ENTER_SLICE = 500

_REGISTER = Script.load("register")
_BEGIN_ERASING = Script.load("erasing")
_RESHARD = Script.load("reshard")
_ADOPT = Script.load("adopt", "changes", "generations", "forbidden")
_ENTER = Script.load("enter")
_DISCARD = Script.load("discard", "changes", "generations", "score", "retention", "grace", "fate", "drop")
_SCORES = Script.load("scores")

#: The answer of register.lua for a namespace of a newer schema, which it must not touch.
_NEWER = 2


class RedisLayouts(RedisMaintenance, RedisCatalogue, MovableLeaf):
    """The part of RedisIndex that says how namespaces lie."""

    @understood
    def register(self, namespace: Namespace, *, expected_blocks: int) -> NamespaceId:
        name = namespace_id(namespace)
        self._register(name, namespace, expected_blocks, 1)
        return name

    @understood
    def lay_out(self, namespace: Namespace, *, expected_blocks: int, shards: int) -> int:
        return self._register(namespace_id(namespace), namespace, expected_blocks, shards)

    @understood
    def register_shard(self, name: NamespaceId, namespace: Namespace, *, expected_blocks: int) -> None:
        self._register(name, namespace, expected_blocks, 1)

    def _register(self, name: NamespaceId, namespace: Namespace, expected_blocks: int, shards: int) -> int:
        """Returns in how many shards it lies."""
        self._client.command("SADD", NAMESPACES, name)
        begun: int = self._run(
            _REGISTER,
            name,
            canonical_json(namespace),
            namespace.kind,
            namespace.tenant,
            bucket_bits(expected_blocks),
            round(self._clock(), 3),
            shards,
        )
        if begun == _NEWER:
            raise PermissionDenied(
                f"redis {self._client.where}: register: namespace {name} is of a newer release's schema; "
                "upgrade this one, which goes on without it until then"
            )
        if begun:
            # An `erase` that came between the two may have removed the id.
            self._client.command("SADD", NAMESPACES, name)
        return max(1, -begun)

    @understood
    def layout(self, namespace: NamespaceId) -> Layout | None:
        schema, shards, kind, to, left = self._client.command(
            "HMGET", key(namespace, "meta"), "schema", "shards", "kind", "to", "from"
        )
        if schema is None:
            return None
        if schema != b"%d" % SHARDED_SCHEMA:
            several = 1
        elif shards is None:
            raise ValueError(f"schema {SHARDED_SCHEMA} without shards")
        else:
            several = shards_of(shards)
        return Layout(several, items=kind == b"ec", to=other_of(to), left=other_of(left))

    @understood
    def listed(self, namespace: NamespaceId) -> set[NamespaceId]:
        names = (NamespaceId(name.decode("ascii")) for name in self._members() if is_namespace(name))
        return {name for name in names if base_of(name) == namespace != name}

    @understood
    def begin_erasing(self, namespace: NamespaceId) -> None:
        self._run(_BEGIN_ERASING, namespace)

    # Other numbers of shards

    @understood
    def reshard(
        self,
        name: NamespaceId,
        step: Step,
        before: int,
        after: int,
        *,
        expected_blocks: int = 0,
        ttl_s: int = 0,
    ) -> bool:
        told = ttl_s if step == "ttl" else bucket_bits(expected_blocks)
        return bool(self._run(_RESHARD, name, step, before, after, told))

    def taken(self, name: NamespaceId) -> Iterator[list[Taken]]:
        cursor: Any = 0
        while True:
            cursor, found = self._taken_page(name, cursor)
            yield found
            if cursor == 0:
                return

    @understood
    def _taken_page(self, name: NamespaceId, cursor: Any) -> tuple[Any, list[Taken]]:
        cursor, page = self._client.command("HSCAN", key(name, "segs"), cursor, "COUNT", _PAGE)
        found: list[Taken] = []
        for segments in batches(segment_ids(list(page)), _PAGE):
            listed, pinned = self._run(_SCORES, name, b"".join(segments))
            heats = self._client.command("ZMSCORE", key(name, "hot"), *segments)
            for segment, one, other, heat in zip(segments, listed, pinned, heats, strict=True):
                record = record_of(page[segment])
                score = one if other is None else other
                # Without a place in the order it was evicted between the two calls, or is damaged.
                if record is not None and score is not None:
                    first = page[segment].split(b":", 2)[2][: AGREED_BYTES - 8]
                    place = (_exact(score), b"1" if other is not None else b"", _exact(heat))
                    found.append(Taken(segment, record, first, (page[segment], *place)))
        return cursor, found

    @understood
    def adopt(self, name: NamespaceId, segments: Sequence[Taken], *, building: bool) -> int:
        adopted, how = 0, ("1", 0) if building else ("", self._journal.events)
        for some in batches(segments, SLICE):
            words = [word for one in some for word in (one.segment, *one.kept)]
            answer = self._run(_ADOPT, name, *how, *words, self._by)
            if answer is None:
                raise self._unregistered("adopt", name)
            adopted += answer
        return adopted

    @understood
    def enter(self, name: NamespaceId, entries: Sequence[Entry], *, visible: bool) -> int:
        entered = 0
        for some in batches(entries, _ENTER_SLICE):
            packed = b"".join(one.digest + one.segment + one.slot.to_bytes(2, "big") for one in some)
            answer = self._run(_ENTER, name, packed, "1" if visible else "")
            if answer is None:
                raise self._unregistered("enter", name)
            entered += answer
        return entered

    @understood
    def discarded(self, name: NamespaceId, limit: int) -> dict[SegmentId, float]:
        flat = self._client.command("ZRANGE", key(name, "trash"), 0, limit - 1, "WITHSCORES")
        scores = dict(zip(flat[::2], map(float, flat[1::2]), strict=True))
        return {segment: scores[segment] for segment in segment_ids(list(scores))}

    @understood
    def discard(self, name: NamespaceId, segments: Mapping[SegmentId, float]) -> int:
        check_segments(list(segments))
        gone = 0
        for some in batches(list(segments), SLICE):
            scores = ",".join(f"{segments[one]:.17g}" for one in some)
            how = (self.deletion(1), *self.recorded("repair"), scores, self._by)
            gone += self._run(_DISCARD, name, b"".join(some), *how)
        return gone

    @understood
    def drop_aside(self, name: NamespaceId, limit: int) -> bool:
        more = self._erase(name, limit, aside=True) == 1
        if not more:
            self._unregister(name)
        return more

    def _unregistered(self, verb: str, namespace: NamespaceId) -> NamespaceUnknown:
        return NamespaceUnknown(
            f"redis {self._client.where}: {verb}: namespace {namespace} is not registered"
        )


def bucket_bits(expected_blocks: int) -> int:
    """Returns the bits of a bucket's number: with `expected_blocks` buckets hold 32 to 64 entries."""
    buckets = max(1, -(-expected_blocks // BUCKET_ENTRIES))
    return min(MOST_BITS, (buckets - 1).bit_length())


def _exact(score: bytes | float | None) -> bytes:
    """Returns a score as a script takes it; b"" for none."""
    return b"" if score is None else b"%.17g" % float(score)
