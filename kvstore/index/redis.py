"""RedisIndex: the index in Redis, shared by a whole fleet.

The schema (golden test: tests/index/test_redis.py). `{ns}` is the namespace id in braces, a hash tag:
a Cluster keeps a namespace on one node, so a script may use all of its keys.

    key                      type     what
    kvs:ns                   set      ids of the namespaces that were ever registered
    kvs:{ns}:meta            hash     json; bits: of a bucket's number; created: unix s; bytes, segments
                                      and blocks: usage; cursor: the bucket where the sweep goes on
    kvs:{ns}:b:<bucket>      hash     in listpack encoding: digest without its first bits / 8 whole bytes
                                      -> segment id (8 bytes), slot (2 bytes, big endian)
    kvs:{ns}:segs            hash     segment id -> "<bytes>:<slots>:", agreement (xxh3-64 of the digests,
                                      head of the packed record), packed parts in rank order
    kvs:{ns}:lru             zset     segment id -> unix minute of its last use - depth / 2**24
    kvs:{ns}:trash           zset     segment id -> unix s of its payloads' deletion + ranks / 256
    kvs:{ns}:part:<segment>  hash     incomplete commit: agreement; <rank> -> "<bytes>:", packed part;
                                      expires after an hour
    kvs:{ns}:claim:<digest>  string   segment id of who may write this block; expires
    kvs:{ns}:use:<window>    string   sketch of the blocks asked for in one window of time; expires. <window>
                                      is "<bytes>:<seconds>:<number since 1970>"; the bits: sketch.py
    kvs:ping                 string   written by ping

A bucket's number is the digest's first `bits` bits, in hex; bits is chosen at the first registration
so that buckets hold 32 to 64 entries when the namespace is full, well inside the 128 that Redis keeps
in its compact encoding. Records are fields of one hash and not keys of their own so that a match
fetches all of them in one call. Scores are exact in a double: a minute takes 25 bits and a depth 24,
a second 31 bits and the ranks 8.

One round trip per verb of a request's path; every change is one script, and what race it closes stands
at its head. The one verb of two steps is register: first the id goes into kvs:ns, where an id without
meta is ignored, then the script runs; a crash in between leaves an id that means nothing. No answer is
wrong because a key has not expired yet, or has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Self

from kvstore.errors import NamespaceUnknown
from kvstore.index.contract import (
    INCOMPLETE_TTL_S,
    agreement,
    check_commit,
    check_segments,
    count_digests,
    minute,
    whole_seconds,
)
from kvstore.index.redis_catalogue import NAMESPACES, RedisCatalogue, key, record_of
from kvstore.index.redis_client import RedisClient, Script
from kvstore.index.sketch import Marks, Window
from kvstore.keys import NamespaceId, SegmentId, canonical_json, namespace_id
from kvstore.ports import Claim, CommitState, Index, Run
from schemas.namespace import Namespace
from schemas.records import SegmentRecord, pack_part
from schemas.settings import RedisSettings

#: Entries of a full bucket, on average, are between half of this and this.
BUCKET_ENTRIES = 64
MAX_BITS = 24
#: Deeper than this in a chain, segments are alike to the eviction order.
_MAX_DEPTH = (1 << 24) - 1

_REGISTER = Script.load("register")
_MATCH = Script.load("match", "walk")
_FIND = Script.load("find")
_CLAIM = Script.load("claim", "walk")
_COMMIT = Script.load("commit")
_TOUCH = Script.load("touch")
_EVICT = Script.load("evict", "drop")
_NOTE = Script.load("note")

_STATES = (CommitState.WAITING, CommitState.VISIBLE, CommitState.REFUSED)


class RedisIndex(RedisCatalogue, Index):
    """Index and Catalogue over one Redis: a single server, what Sentinel points at, or a Cluster."""

    def __init__(self, client: RedisClient, *, clock: Callable[[], float] = time.time) -> None:
        super().__init__(client)
        self._clock = clock

    @classmethod
    def from_settings(
        cls, url: str, settings: RedisSettings, *, clock: Callable[[], float] = time.time
    ) -> Self:
        """For `redis://`, `rediss://` or `unix://`. No I/O. Raises ConfigError."""
        return cls(RedisClient.from_settings(url, settings), clock=clock)

    def __repr__(self) -> str:
        return f"RedisIndex({self._client.where})"

    def close(self) -> None:
        self._client.close()

    def register(self, namespace: Namespace, *, expected_blocks: int) -> NamespaceId:
        name = namespace_id(namespace)
        self._client.command("SADD", NAMESPACES, name)
        self._client.run(
            _REGISTER,
            key(name, "meta"),
            canonical_json(namespace),
            bucket_bits(expected_blocks),
            int(self._clock()),
        )
        return name

    def match(self, namespace: NamespaceId, digests: bytes) -> list[Run]:
        count_digests(digests)
        segments, places, values = self._client.run(_MATCH, key(namespace, "meta"), digests)
        runs: list[Run] = []
        start = 0
        for segment, place, value in zip(segments, places, values, strict=True):
            record, slot, count = record_of(value), place >> 16, place & 0xFFFF
            if record is None or slot + count > record.slots:
                break
            runs.append(Run(start, segment, slot, count, record))
            start += count
        return runs

    def find(self, namespace: NamespaceId, digests: bytes) -> list[Run | None]:
        count = count_digests(digests)
        entries, segments, values = self._client.run(_FIND, key(namespace, "meta"), digests)
        known = {s: record_of(v) for s, v in zip(segments, values, strict=True) if v}
        runs: list[Run | None] = [None] * count
        for start, entry in enumerate(entries):
            record = known.get(entry[:8]) if entry else None
            slot = int.from_bytes(entry[8:], "big") if entry else 0
            if record is not None and slot < record.slots:
                runs[start] = Run(start, SegmentId(entry[:8]), slot, 1, record)
        return runs

    def claim(self, namespace: NamespaceId, digests: bytes, segment: SegmentId, ttl_s: float) -> Claim:
        count_digests(digests)
        check_segments([segment])
        ttl_ms = max(1, round(ttl_s * 1000))
        reply = self._client.run(_CLAIM, key(namespace, "meta"), digests, segment, ttl_ms)
        if reply is None:
            raise self._unknown("claim", namespace)
        return Claim(present=reply[0], granted=bool(reply[1]))

    def commit(
        self,
        namespace: NamespaceId,
        segment: SegmentId,
        digests: bytes,
        record: SegmentRecord,
        *,
        rank: int,
        ranks: int,
    ) -> CommitState:
        check_commit(segment, digests, record, rank, ranks)
        state = self._client.run(
            _COMMIT,
            key(namespace, "meta"),
            segment,
            digests,
            agreement(digests, record, ranks),
            pack_part(record, record.parts[0]),
            record.nbytes,
            rank,
            ranks,
            INCOMPLETE_TTL_S,
            f"{minute(record.created_s) - min(record.depth, _MAX_DEPTH) / (_MAX_DEPTH + 1):.17g}",
        )
        if state is None:
            raise self._unknown("commit", namespace)
        return _STATES[state]

    def touch(self, namespace: NamespaceId, segments: Sequence[SegmentId], now_s: float) -> None:
        check_segments(segments)
        if segments:
            self._client.run(_TOUCH, key(namespace, "meta"), b"".join(segments), minute(now_s))

    def evict(self, namespace: NamespaceId, segments: Sequence[SegmentId], *, delete_after_s: float) -> int:
        check_segments(segments)
        if not segments:
            return 0
        after = whole_seconds(delete_after_s)
        return int(self._client.run(_EVICT, key(namespace, "meta"), b"".join(segments), after))

    def note(
        self, namespace: NamespaceId, digests: bytes, *, now_s: float, window_s: float, sketch_bytes: int
    ) -> int:
        window = Window.at(now_s, window_s, sketch_bytes)
        if not count_digests(digests):
            return 0
        marks = Marks.of(digests)
        noted = self._client.run(
            _NOTE,
            key(namespace, "meta"),
            marks.blocks,
            marks.masks,
            f"use:{window.now}",
            f"use:{window.before}",
            window.lines,
            window.keep_s,
        )
        if noted is None:
            raise self._unknown("note", namespace)
        return int(noted)

    def _unknown(self, verb: str, namespace: NamespaceId) -> NamespaceUnknown:
        return NamespaceUnknown(
            f"redis {self._client.where}: {verb}: namespace {namespace} is not registered"
        )


def bucket_bits(expected_blocks: int) -> int:
    """Bits of a bucket's number, so that `expected_blocks` make buckets of 32 to 64 entries."""
    buckets = max(1, -(-expected_blocks // BUCKET_ENTRIES))
    return min(MAX_BITS, (buckets - 1).bit_length())
