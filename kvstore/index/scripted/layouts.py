"""LayoutsPart: registers namespaces in Redis, and moves what shards hold into others. The schema stands in
kvstore.index.scripted.index."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

from kvstore.errors import NamespaceUnknown, PermissionDenied
from kvstore.index.contract import check_segments
from kvstore.index.maintenance import Entry
from kvstore.index.numbers import real, whole
from kvstore.index.scripted.catalogue import CataloguePart, layout_in, other_layout
from kvstore.index.scripted.maintenance import SLICE, MaintenancePart
from kvstore.index.scripted.scripts import Script
from kvstore.index.scripted.values import (
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
from kvstore.index.sharding.leaf import Layout, ShardLeaf, Taken
from kvstore.index.sharding.names import ONE, base_of
from kvstore.keys import NamespaceId, SegmentId, canonical_json, namespace_id
from kvstore.rules.units import batches
from schemas.namespace import Namespace

#: Segments on a page that is moved, and entries that one script enters: 1 to 2 ms of Redis's time.
_PAGE = 500
_ENTER_SLICE = 500
#: Entries that one script of `forget` drops, unless it has looked at its number of buckets before.
_FORGET_SLICE = 10_000

_REGISTER = Script.load("register")
_BEGIN_ERASING = Script.load("erasing")
_LAYOUT = Script.load("layout")
_TAKEN = Script.load("taken")
_ADOPT = Script.load("adopt", "changes", "score", "retention")
_ENTER = Script.load("enter")
_DISCARD = Script.load("discard")

#: The answer of register.lua for a namespace of a newer schema, which it must not touch.
_NEWER = 2


class LayoutsPart(MaintenancePart, CataloguePart, ShardLeaf):
    """The part of ScriptedIndex that says how namespaces lie."""

    #: Whether a namespace's entries lie in many small hashes, which Redis packs, or in one.
    in_buckets = True

    @understood
    def register(self, namespace: Namespace, *, expected_blocks: int) -> NamespaceId:
        name = namespace_id(namespace)
        self._register(name, namespace, expected_blocks, ONE)
        return name

    @understood
    def lay_out(self, namespace: Namespace, *, expected_blocks: int, layout: str) -> str:
        return self._register(namespace_id(namespace), namespace, expected_blocks, layout)

    @understood
    def register_shard(self, name: NamespaceId, namespace: Namespace, *, expected_blocks: int) -> None:
        self._register(name, namespace, expected_blocks, ONE)

    def _register(self, name: NamespaceId, namespace: Namespace, expected_blocks: int, layout: str) -> str:
        """Returns how the namespace lies; of a shard, ONE."""
        self._client.command("SADD", NAMESPACES, name)
        told = self._run(
            _REGISTER,
            name,
            canonical_json(namespace),
            namespace.kind,
            namespace.tenant,
            bucket_bits(expected_blocks) if self.in_buckets else 0,
            round(self._clock(), 3),
            layout,
        )
        begun = whole(told, most=_NEWER) if isinstance(told, int) else 1
        if begun == _NEWER:
            raise PermissionDenied(
                f"{self._client.name}: register: namespace {name} is of a newer release's schema; "
                "upgrade this one, which goes on without it until then"
            )
        if begun:
            # An `erase` that came between the two may have removed the id.
            self._client.command("SADD", NAMESPACES, name)
        return ONE if isinstance(told, int) else layout_in(told)

    @understood
    def layout(self, namespace: NamespaceId) -> Layout | None:
        schema, layout, kind, to, left, created = self._client.command(
            "HMGET", key(namespace, "meta"), "schema", "shards", "kind", "to", "from", "created"
        )
        if schema is None:
            return None
        name = layout_in(layout) if schema == b"%d" % SHARDED_SCHEMA else ONE
        created_s = 0
        with suppress(ValueError):  # of a damaged one it isn't known
            created_s = whole(created)
        return Layout(name, kind == b"ec", other_layout(to), other_layout(left), created_s)

    @understood
    def lay_over(self, namespace: NamespaceId, was: Layout, now: Layout) -> bool:
        words = (word for one in (was, now) for word in (one.name, one.to, one.left))
        return bool(self._run(_LAYOUT, namespace, *words))

    @understood
    def listed(self, namespace: NamespaceId) -> set[NamespaceId]:
        names = (NamespaceId(name.decode("ascii")) for name in self._members() if is_namespace(name))
        return {name for name in names if base_of(name) == namespace != name}

    @understood
    def begin_erasing(self, namespace: NamespaceId) -> None:
        self._run(_BEGIN_ERASING, namespace)

    @understood
    def forget(self, name: NamespaceId) -> None:
        what = "left" if base_of(name) == name else "shard"
        while self._erase(name, _FORGET_SLICE, aside=what) == 1:
            pass
        if base_of(name) != name:
            self._unregister(name)

    # From one shard into another

    def taken(self, name: NamespaceId) -> Iterator[list[Taken]]:
        cursor: Any = 0
        while True:
            cursor, segments = self._visible_page(name, cursor)
            yield self.take(name, segments)
            if cursor == 0:
                return

    @understood
    def _visible_page(self, name: NamespaceId, cursor: Any) -> tuple[Any, list[SegmentId]]:
        cursor, page = self._client.command("HSCAN", key(name, "segs"), cursor, "COUNT", _PAGE)
        return cursor, segment_ids(list(page))

    @understood
    def take(self, name: NamespaceId, segments: Sequence[SegmentId]) -> list[Taken]:
        found: list[Taken] = []
        for some in batches(segments, _PAGE):
            flat = self._run(_TAKEN, name, b"".join(some))
            for segment, *kept in zip(some, *(flat[at::5] for at in range(5)), strict=True):
                record = record_of(kept[0]) if kept[0] else None
                if record is not None:
                    first = kept[0].split(b":", 2)[2][: AGREED_BYTES - 8]
                    found.append(Taken(segment, record, bool(kept[2]), first, tuple(kept)))
        return found

    @understood
    def adopt(self, name: NamespaceId, segments: Sequence[Taken]) -> int:
        adopted = 0
        for some in batches(segments, SLICE):
            words = (word for one in some for word in (one.segment, *one.kept))
            adopted += whole(self._run(_ADOPT, name, *words, self._by), most=len(some))
        return adopted

    @understood
    def enter(self, name: NamespaceId, entries: Sequence[Entry]) -> int:
        packed = [one.digest + one.segment + one.slot.to_bytes(2, "big") for one in entries]
        return self._run_all(_ENTER, name, packed, _ENTER_SLICE)

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
    def discard(self, name: NamespaceId, segments: Sequence[tuple[SegmentId, float]]) -> None:
        check_segments([segment for segment, _ in segments])
        for some in batches(segments, _PAGE):
            words = (word for segment, score in some for word in (f"{score:.17g}", segment))
            self._run(_DISCARD, name, *words)

    def _unregistered(self, verb: str, namespace: NamespaceId) -> NamespaceUnknown:
        return NamespaceUnknown(f"{self._client.name}: {verb}: namespace {namespace} is not registered")
