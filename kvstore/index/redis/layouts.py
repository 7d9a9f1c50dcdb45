"""RedisLayouts: registers namespaces in Redis, and moves what shards hold into others. The schema stands in
kvstore.index.redis.index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from kvstore.errors import NamespaceUnknown, PermissionDenied, TransientError
from kvstore.index.contract import check_segments
from kvstore.index.maintenance import Entry
from kvstore.index.numbers import real, whole
from kvstore.index.redis.catalogue import RedisCatalogue, other_of, shards_of
from kvstore.index.redis.client import Script
from kvstore.index.redis.maintenance import SLICE, RedisMaintenance
from kvstore.index.redis.values import (
    AGREED_BYTES,
    NAMESPACES,
    SHARDED_SCHEMA,
    bucket_bits,
    is_namespace,
    key,
    record_of,
    segment_ids,
    understood,
)
from kvstore.index.sharding.leaf import Layout, MovableLeaf, Step, Taken
from kvstore.index.sharding.names import MOST_SHARDS, base_of
from kvstore.keys import NamespaceId, SegmentId, canonical_json, namespace_id
from kvstore.rules.units import batches
from schemas.namespace import Namespace

#: Segments on a page that is moved, and entries that one script enters: 1 to 2 ms of Redis's time.
_PAGE = 500
_ENTER_SLICE = 500

_REGISTER = Script.load("register")
_BEGIN_ERASING = Script.load("erasing")
_RESHARD = Script.load("reshard")
_TAKEN = Script.load("taken", "score", "retention")
_ADOPT = Script.load("adopt", "changes", "filling")
_WITHDRAW = Script.load("withdraw", "changes", "filling")
_ENTER = Script.load("enter", "filling")
_DISCARD = Script.load("discard", "filling")

#: The answer of register.lua for a namespace of a newer schema, which it must not touch.
_NEWER = 2
#: And for a shard that takes no changes.
_SEALED = 3


class RedisLayouts(RedisMaintenance, RedisCatalogue, MovableLeaf):
    """The part of RedisIndex that says how namespaces lie."""

    @understood
    def register(self, namespace: Namespace, *, expected_blocks: int) -> NamespaceId:
        name = namespace_id(namespace)
        self._register(name, namespace, expected_blocks, 1)
        return name

    @understood
    def lay_out(self, namespace: Namespace, *, expected_blocks: int, shards: int) -> int:
        return max(1, -self._register(namespace_id(namespace), namespace, expected_blocks, shards))

    @understood
    def register_shard(self, name: NamespaceId, namespace: Namespace, *, expected_blocks: int) -> bool:
        return self._register(name, namespace, expected_blocks, 1) != _SEALED

    def _register(self, name: NamespaceId, namespace: Namespace, expected_blocks: int, shards: int) -> int:
        """Returns what register.lua answers: less than 0 is a number of shards."""
        self._client.command("SADD", NAMESPACES, name)
        told = self._run(
            _REGISTER,
            name,
            canonical_json(namespace),
            namespace.kind,
            namespace.tenant,
            bucket_bits(expected_blocks),
            round(self._clock(), 3),
            shards,
        )
        begun = whole(told, least=-MOST_SHARDS, most=_SEALED)
        if begun == _NEWER:
            raise PermissionDenied(
                f"redis {self._client.where}: register: namespace {name} is of a newer release's schema; "
                "upgrade this one, which goes on without it until then"
            )
        if begun:
            # An `erase` that came between the two may have removed the id.
            self._client.command("SADD", NAMESPACES, name)
        return begun

    @understood
    def layout(self, namespace: NamespaceId) -> Layout | None:
        schema, shards, kind, to, left, *words = self._client.command(
            "HMGET", key(namespace, "meta"), "schema", "shards", "kind", "to", "from", "run", "sealed", "role"
        )
        if schema is None:
            return None
        if schema != b"%d" % SHARDED_SCHEMA:
            several = 1
        elif shards is None:
            raise ValueError(f"schema {SHARDED_SCHEMA} without shards")
        else:
            several = shards_of(shards)
        run, sealed, role = ((word or b"").decode("ascii", "replace") for word in words)
        return Layout(several, kind == b"ec", other_of(to), other_of(left), run, sealed, role)

    @understood
    def listed(self, namespace: NamespaceId) -> set[NamespaceId]:
        names = (NamespaceId(name.decode("ascii")) for name in self._members() if is_namespace(name))
        return {name for name in names if base_of(name) == namespace != name}

    @understood
    def begin_erasing(self, namespace: NamespaceId) -> None:
        self._run(_BEGIN_ERASING, namespace)

    # Other numbers of shards

    @understood
    def unseal(self, name: NamespaceId, run: str) -> None:
        if self.reshard(base_of(name), "disarm", run=run):
            self.reshard(name, "unseal", run=run)

    @understood
    def forget(self, name: NamespaceId, role: str) -> None:
        if self.reshard(name, "aside", told=role):
            while self.drop_aside(name, SLICE):
                pass

    @understood
    def reshard(
        self,
        name: NamespaceId,
        step: Step,
        *,
        run: str = "",
        before: int = 0,
        after: int = 0,
        told: str | int = "",
    ) -> bool:
        if step == "begin":
            told = bucket_bits(whole(told))
        return bool(self._run(_RESHARD, name, step, run, before, after, told))

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
            places = self._run(_TAKEN, name, b"".join(segments))
            for segment, *place in zip(segments, places[::3], places[1::3], places[2::3], strict=True):
                record = record_of(page[segment])
                # Without a place in the order it was evicted between the two calls, or is damaged.
                if record is not None and place[0]:
                    first = page[segment].split(b":", 2)[2][: AGREED_BYTES - 8]
                    found.append(Taken(segment, record, first, (page[segment], *place)))
        return cursor, found

    @understood
    def adopt(self, name: NamespaceId, segments: Sequence[Taken], run: str) -> int:
        adopted = 0
        for some in batches(segments, SLICE):
            adopted += self._filled(
                _ADOPT, name, run, *(word for one in some for word in (one.segment, *one.kept))
            )
        return adopted

    @understood
    def withdraw(self, name: NamespaceId, segments: Sequence[SegmentId], run: str) -> int:
        check_segments(segments)
        return sum(self._filled(_WITHDRAW, name, run, b"".join(some)) for some in batches(segments, SLICE))

    @understood
    def enter(self, name: NamespaceId, entries: Sequence[Entry], run: str) -> int:
        entered = 0
        for some in batches(entries, _ENTER_SLICE):
            packed = b"".join(one.digest + one.segment + one.slot.to_bytes(2, "big") for one in some)
            entered += self._filled(_ENTER, name, run, packed)
        return entered

    def trashed(self, name: NamespaceId) -> Iterator[list[tuple[SegmentId, float]]]:
        cursor: Any = 0
        while True:
            cursor, found = self._trashed_page(name, cursor)
            yield found
            if cursor == 0:
                return

    @understood
    def _trashed_page(self, name: NamespaceId, cursor: Any) -> tuple[Any, list[tuple[SegmentId, float]]]:
        cursor, page = self._client.command("ZSCAN", key(name, "trash"), cursor, "COUNT", _PAGE)
        known = set(segment_ids([segment for segment, _ in page]))
        return cursor, [(segment, real(score)) for segment, score in page if segment in known]

    @understood
    def discard(self, name: NamespaceId, segments: Sequence[tuple[SegmentId, float]], run: str) -> int:
        gone = 0
        for some in batches(segments, _PAGE):
            words = (word for segment, score in some for word in (f"{score:.17g}", segment))
            gone += self._filled(_DISCARD, name, run, *words)
        return gone

    def _filled(self, script: Script, name: NamespaceId, run: str, *args: bytes | str | int) -> int:
        answer = self._run(script, name, *args, run, self._by)
        if answer is None:
            raise TransientError(
                f"redis {self._client.where}: {script.name}: another process fills {name} by now, or has "
                "dropped it; run it again"
            )
        return whole(answer)

    @understood
    def drop_aside(self, name: NamespaceId, limit: int) -> bool:
        more = self._erase(name, limit, aside=True) == 1
        if not more and base_of(name) != name:
            self._unregister(name)
        return more

    def _unregistered(self, verb: str, namespace: NamespaceId) -> NamespaceUnknown:
        return NamespaceUnknown(
            f"redis {self._client.where}: {verb}: namespace {namespace} is not registered, or is being "
            "brought into another number of shards"
        )
