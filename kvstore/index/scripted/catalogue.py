"""CataloguePart: lists and reads the index in Redis. The schema stands in kvstore.index.scripted.index."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from math import isfinite
from typing import Any, TypeVar

from kvstore.errors import DamagedIndex, KVStoreError
from kvstore.index.contract import check_segments
from kvstore.index.maintenance import Account, Candidate, Entry, Listing, SegmentState, Usage
from kvstore.index.numbers import MOST_S, real, whole
from kvstore.index.scripted.scripts import Script
from kvstore.index.scripted.values import (
    MOST_BITS,
    NAMESPACES_PAGE,
    QUOTAS,
    SHARDED_SCHEMA,
    ScriptedPart,
    Use,
    key,
    number,
    record_of,
    segment_ids,
    size_of,
    understood,
)
from kvstore.index.sharding.names import ONE, base_of, shards_in
from kvstore.keys import DIGEST_BYTES, SEGMENT_ID_BYTES, Digest, NamespaceId, SegmentId
from kvstore.rules.units import batches

#: Segments on a page of a listing: a compromise between round trips and how long one call holds Redis.
_PAGE = 500
#: Entries and buckets that one script of `entries` looks at: about 1 ms of Redis's time.
_ENTRIES_PAGE = 1024
#: Entries up to which Redis is to keep a bucket in its compact encoding.
_COMPACT = 128
#: Numbers in `meta` that no account tells, and without which scripts can't go on.
_NUMBERS = ("changes", "evicted", "epoch", "drained")
#: Most bytes of a quota.
_MOST_QUOTA = (1 << 63) - 1
_USAGE = ("bytes", "segments", "blocks", "pinned", "cost")

_SCORES = Script.load("scores")
_STATES = Script.load("states", "generations")
_ORDER = Script.load("order")
_ENTRIES = Script.load("entries", "buckets")
_PING = Script.load("ping")

_T = TypeVar("_T")

#: What the numbers that states.lua answers mean.
_STATE_NAMES: tuple[SegmentState | None, ...] = (None, "visible", "incomplete", "bygone", "trash")


class CataloguePart(ScriptedPart):
    """The part of ScriptedIndex that only reads."""

    @understood
    def namespaces(self) -> dict[NamespaceId, str]:
        found = {}
        for names in batches(self._registered(), NAMESPACES_PAGE):
            asked = [("HMGET", key(name, "meta"), "schema", "json") for name in names]
            for name, answer in zip(names, self._client.many(asked), strict=True):
                schema, text = (b"", None) if isinstance(answer, DamagedIndex) else answer
                if schema is not None:
                    found[name] = (text or b"").decode("ascii", "replace")
        return found

    def accounts(self) -> list[Account]:
        found, failure = self.reachable()
        if failure is not None:
            raise failure
        return found

    @understood
    def reachable(self) -> tuple[list[Account], KVStoreError | None]:
        found: list[Account] = []
        failure: KVStoreError | None = None
        # One pipeline over several nodes fails as a whole if one of them does.
        for names in self._client.by_node({name: key(name, "meta") for name in self._registered()}):
            try:
                for some in batches(names, NAMESPACES_PAGE):
                    found += self._accounts(some)
            except KVStoreError as exc:
                failure = exc
        return sorted(found, key=lambda account: account.namespace), failure

    def _accounts(self, names: Sequence[NamespaceId]) -> Iterator[Account]:
        fields = (
            "schema",
            "bucket_bits",
            "shards",
            "to",
            "from",
            "kind",
            "tenant",
            "seen",
            *_NUMBERS,
            "bygone",
            "ttl",
            *_USAGE,
        )
        asked: list[tuple[str, ...]] = []
        for name in names:
            asked += [("HMGET", key(name, "meta"), *fields), ("ZCARD", key(name, "trash"))]
        answers = self._client.many(asked)
        for name, known, trashed in zip(names, answers[::2], answers[1::2], strict=True):
            account = _account(name, known, trashed)
            if account is not None:
                yield account

    @understood
    def usage(self, namespace: NamespaceId) -> Usage:
        return usage_of(self._client.command("HMGET", key(namespace, "meta"), *_USAGE))

    def segments(self, namespace: NamespaceId) -> Iterator[Listing]:
        cursor: Any = 0
        while True:
            cursor, listings = self._segments_page(namespace, cursor)
            yield from listings
            if cursor == 0:
                return

    @understood
    def _segments_page(self, namespace: NamespaceId, cursor: Any) -> tuple[Any, list[Listing]]:
        cursor, page = self._client.command("HSCAN", key(namespace, "segs"), cursor, "COUNT", _PAGE)
        listings: list[Listing] = []
        for some in batches(list(page.items()), _PAGE):
            listings += self._listed(namespace, dict(some))
        return cursor, listings

    @understood
    def get(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> list[Listing | None]:
        check_segments(segments)
        found: dict[SegmentId, Listing] = {}
        for some in batches(segments, _PAGE):
            values = self._client.command("HMGET", key(namespace, "segs"), *some)
            listed = self._listed(namespace, {s: v for s, v in zip(some, values, strict=True) if v})
            found |= {listing.segment: listing for listing in listed}
        return [found.get(segment) for segment in segments]

    def _listed(self, namespace: NamespaceId, values: dict[Any, bytes]) -> Iterator[Listing]:
        segments = segment_ids(list(values))
        if not segments:
            return
        listed, pinned = self._run(_SCORES, namespace, b"".join(segments))
        for segment, one, other in zip(segments, listed, pinned, strict=True):
            record = record_of(values[segment])
            score = one if other is None else other
            # Without a last use it was evicted between the two calls.
            if record is not None and score is not None:
                yield Listing(segment, record, Use.of(score).used_s, other is not None)

    @understood
    def states(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> list[SegmentState | None]:
        check_segments(segments)
        states: list[SegmentState | None] = []
        for some in batches(segments, _PAGE):
            numbers = self._run(_STATES, namespace, b"".join(some))
            states += [_STATE_NAMES[whole(number, most=len(_STATE_NAMES) - 1)] for number in numbers]
        return states

    @understood
    def sample(self, namespace: NamespaceId, count: int) -> list[Listing]:
        where = key(namespace, "segs")
        size = whole(self._client.command("HLEN", where))
        if 2 * count >= size:
            listed = list(self.segments(namespace))
            return random.sample(listed, min(count, len(listed)))
        # Where less than half of all is wanted, every draw brings something new.
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
            place, found = self._entries_page(namespace, place)
            yield from found

    @understood
    def _entries_page(self, namespace: NamespaceId, place: bytes) -> tuple[bytes | None, list[Entry]]:
        bits, after, buckets, pages = self._run(_ENTRIES, namespace, place, _ENTRIES_PAGE)
        found, bits = [], whole(bits, most=MOST_BITS)
        for bucket, flat in zip(buckets, pages, strict=True):
            first = (whole(bucket, most=(1 << bits) - 1) >> bits % 8).to_bytes(bits // 8, "big")
            for field, value in zip(flat[::2], flat[1::2], strict=True):
                # What has another length no verb takes for an entry, and is swept.
                if len(first + field) == DIGEST_BYTES and len(value) == SEGMENT_ID_BYTES + 2:
                    segment, slot = SegmentId(value[:8]), int.from_bytes(value[8:], "big")
                    found.append(Entry(Digest(first + field), segment, slot))
        return after, found

    @understood
    def order(self, namespace: NamespaceId, limit: int) -> list[Candidate]:
        # By id: an eviction or a touch between two pages moves the others, and one may come twice.
        found: dict[SegmentId, Candidate] = {}
        for first in range(0, max(0, limit), _PAGE):
            last = min(first + _PAGE, limit) - 1
            flat, values = self._run(_ORDER, namespace, first, last)
            for segment, score, value in zip(flat[::2], flat[1::2], values, strict=True):
                if value is not None and len(segment) == SEGMENT_ID_BYTES:
                    found[segment] = Candidate(SegmentId(segment), size_of(value), *Use.of(score))
            if len(values) <= last - first:
                break
        return list(found.values())

    @understood
    def hottest(self, namespace: NamespaceId, limit: int) -> list[tuple[SegmentId, float]]:
        if limit <= 0:
            return []
        flat = self._client.command("ZREVRANGE", key(namespace, "hot"), 0, limit - 1, "WITHSCORES")
        scores = {segment: real(score) for segment, score in zip(flat[::2], flat[1::2], strict=True)}
        return [(one, scores[one]) for one in segment_ids(list(scores)) if isfinite(scores[one])]

    @understood
    def quotas(self) -> dict[str, int]:
        try:
            told = self._client.command("HGETALL", QUOTAS)
        except DamagedIndex:
            return {}  # as one that is no number: the quotas of the settings hold
        found = {}
        for scope, nbytes in told.items():
            # A value that can't be is no quota: it must not fail every save that would make room.
            with suppress(ValueError):
                found[scope.decode(errors="replace")] = whole(nbytes, most=_MOST_QUOTA)
        return found

    def ping(self) -> None:
        """Raises CapacityExceeded as well, if Redis is full: it can be read, but not written."""
        self._client.run(_PING, "kvs:ping")

    @understood
    def warnings(self) -> list[str]:
        """Returns a sentence on each namespace that is damaged. Raises what ping raises."""
        return [
            f"namespace {base_of(account.namespace)} is damaged: {account.problem}; "
            f"`cache-admin fsck {base_of(account.namespace)} --apply` mends it"
            for account in self.reachable()[0]
            if account.problem
        ]


def usage_of(fields: Sequence[bytes | None]) -> Usage:
    """Returns the usage from the values of the `meta` fields in _USAGE. Raises ValueError."""
    return Usage(*map(number, fields))


def _account(name: NamespaceId, known: Any, trashed: Any) -> Account | None:
    """Returns the account in these answers; what of it can't be read is "" or 0, and the problem says so.

    None if the namespace is unknown, or a newer release's: that is left to the processes that know its
    schema.
    """
    problems: list[str] = []

    def read(field: str, value: Any, decode: Callable[[Any], _T], instead: _T) -> _T:
        try:
            return decode(value)
        except (ValueError, TypeError, AttributeError, ArithmeticError) as exc:
            problems.append(f"{field}: {exc!r}"[:100])
            return instead

    if isinstance(known, DamagedIndex):
        return Account(name, "", "", Usage(0, 0, 0), 0, 0, 0.0, "meta: another type of key")
    schema, bits, layout, to, left, kind, tenant, seen, *numbers, bygone, ttl = known[: -len(_USAGE)]
    usage = known[-len(_USAGE) :]
    version = 0 if schema is None else read("schema", schema, whole, 0)
    if schema is None or version > SHARDED_SCHEMA:
        return None
    if version == SHARDED_SCHEMA:
        lies = read("shards", layout, layout_in, ONE)
        if bits is not None:
            # What lies under the id itself is not the namespace's any more.
            usage, trashed, bygone = [None] * len(_USAGE), 0, None
    else:
        lies = ONE
        read("bucket_bits", bits, _bits, 0)
    for field, value in zip(_NUMBERS, numbers, strict=True):
        read(field, value, number, 0)
    return Account(
        namespace=name,
        kind=read("kind", kind, lambda value: value.decode("ascii"), ""),
        tenant=read("tenant", tenant, lambda value: value.decode(), ""),
        usage=read("usage", usage, usage_of, Usage(0, 0, 0)),
        trashed=read("trash", trashed, whole, 0),
        bygone=read("bygone", bygone, number, 0),
        seen_s=read("seen", seen, _time, 0.0),
        ttl_s=read("ttl", ttl, number, 0),
        problem="; ".join(problems),
        layout=lies,
        to=read("to", to, other_layout, ""),
        left=read("from", left, other_layout, ""),
    )


def layout_in(value: bytes | None) -> str:
    """Returns the layout of a namespace that does not lie under its id. Raises ValueError for one that can't
    be."""
    layout = other_layout(value)
    if layout in ("", ONE):
        raise ValueError(f"{value!r} is no layout in shards")
    return layout


def other_layout(value: bytes | None) -> str:
    """Returns the layout that a reshard fills or has left; "" for none. Raises ValueError."""
    layout = (value or b"").decode("ascii")
    if layout:
        shards_in(layout)
    return layout


def _bits(value: bytes) -> int:
    return whole(value, most=MOST_BITS)


def _time(value: bytes) -> float:
    return real(value, least=0.0, most=MOST_S)
