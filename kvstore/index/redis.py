"""RedisIndex: the index in Redis, shared by a whole fleet.

The schema (golden test: tests/index/test_redis.py). `{ns}` is the namespace id in braces, a hash tag:
a Cluster keeps a namespace on one node, so a script may use all of its keys.

    key                      type     what
    kvs:ns                   set      ids of the registered namespaces
    kvs:quotas               hash     scope (kvstore.eviction.Scope) -> bytes
    kvs:lease:<name>         string   who has the lease; expires
    kvs:ping                 string   written by ping
    kvs:{ns}:meta            hash     see below
    kvs:{ns}:b:<bucket>      hash     in listpack encoding: digest without its first bits / 8 whole bytes
                                      -> segment id (8 bytes), slot (2 bytes, big endian)
    kvs:{ns}:segs            hash     segment id -> "<bytes>:<slots>:", agreement (first digest, xxh3-64 of
                                      all digests, head of the packed record), packed parts in rank order
    kvs:{ns}:lru             zset     segment id -> its place in the order of eviction, see below
    kvs:{ns}:pins            zset     the same of pinned segments; a visible one is in just one of the two
    kvs:{ns}:trash           zset     segment id -> unix s of its payloads' deletion + ranks / 256
    kvs:{ns}:old:<epoch>     hash     `segs` as it was when that epoch ended, until drain has emptied it
    kvs:{ns}:part:<segment>  hash     incomplete commit: agreement; epoch in which it began; <rank> ->
                                      "<bytes>:", packed part; expires after an hour
    kvs:{ns}:parts           zset     segment id of an incomplete commit -> unix s when it expires
    kvs:{ns}:claim:<digest>  string   segment id of who may write this block; expires
    kvs:{ns}:use:<window>    string   sketch of the blocks asked for in one window of time; expires. <window>
                                      is "<bytes>:<seconds>:<number since 1970>"; the bits: sketch.py
    kvs:{ns}:hot             zset     segment id -> minutes in which a load began with it, halved by cool; at
                                      most some 2,048
    kvs:{ns}:events          stream   ring of what changed: op, segment, first and last digest, depth, slots,
                                      bytes, rule; about journal.events of them
    kvs:{ns}:outcomes        stream   ring of what was told: at (unix s), request, op, asked, served, reason,
                                      position, first missing digest; about journal.outcomes of them
    kvs:{ns}:seen            hash     totals of what was told, by the names that Journal.seen says
    kvs:{ns}:ghosts          zset     first digest of a segment that a quota evicted -> 4 KiB that quotas had
                                      evicted before + slots (at most 4095) / 4096; journal.ghosts of them
    kvs:{ns}:ghost           hash     step (kvstore.eviction.ghost_step) -> blocks

    meta's field             what
    schema                   2. A namespace of schema 1 is unknown until it is registered, and begins anew;
                             one of a newer schema is left alone
    json, kind, tenant       of the namespace
    bucket_bits              of a bucket's number
    created, seen            unix s of the first and the latest registration
    bytes, segments, blocks, pinned, cost      usage; pinned in bytes, cost in microseconds
    changes                  how often the usage changed
    evicted                  bytes that quotas have evicted
    epoch, drained           number of invalidations; the first epoch that may be left in old:<epoch>
    bygone                   segments in all of these
    cursor, erased           where sweep and erase go on; the latter with the `changes` that it holds for

A bucket's number is the digest's first `bucket_bits` bits, in hex; they are chosen at the first registration
so that buckets hold 32 to 64 entries when the namespace is full, well inside the 128 that Redis keeps
in its compact encoding. Records are fields of one hash and not keys of their own so that a match
fetches all of them in one call.

A place in the order of eviction is keep - (depth * 16 + worth) / 2**26, where depth is at most 2**22 - 1,
worth is that of kvstore.eviction, from 0 to 15, and keep the unix minute of the last use plus 10 * worth. So
it is rounded up to keep, the rest says depth and worth, and these and keep say the last use. Worth is 0
but for encoder items (kind ec), and for these too if eviction.cost_aware is off.

Scores are exact in a double: a minute takes 27 bits and depth and worth 26; a second 31 and the ranks 8; the
4 KiB of 8 PiB 41 and slots 12.

One round trip per verb of a request's path; every change is one script, and what race it closes stands
at its head. The two verbs of several steps are register and erase, which change kvs:ns apart from the
namespace's own keys: an id without meta is ignored, and each looks again after the other could have come
between. No answer is wrong because a key has not expired yet, or has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Self

from kvstore.catalogue import Maintenance
from kvstore.errors import NamespaceUnknown, PermissionDenied
from kvstore.eviction import worth
from kvstore.index.contract import (
    HOT_KEPT,
    HOT_MOST,
    INCOMPLETE_TTL_S,
    agreement,
    check_commit,
    check_segments,
    count_digests,
    minute,
)
from kvstore.index.redis_catalogue import RedisCatalogue
from kvstore.index.redis_client import RedisClient, Script
from kvstore.index.redis_journal import RedisJournal
from kvstore.index.redis_upkeep import SLICE, RedisUpkeep
from kvstore.index.redis_values import JOURNAL, NAMESPACES, key, pieces, record_of
from kvstore.index.sketch import Marks, Window
from kvstore.keys import DIGEST_BYTES, NamespaceId, SegmentId, canonical_json, namespace_id
from kvstore.ports import Claim, CommitState, Index, Run
from schemas.namespace import Namespace
from schemas.records import EvictionRule, SegmentRecord, pack_part
from schemas.settings import JournalSettings, RedisSettings

#: Entries of a full bucket, on average, are between half of this and this.
BUCKET_ENTRIES = 64
MAX_BITS = 24
#: Segments that one script of touch is given: 1 to 2 ms of Redis' time.
_TOUCHED = 1000

_REGISTER = Script.load("register")
_MATCH = Script.load("match", "walk")
_FIND = Script.load("find")
_CLAIM = Script.load("claim", "walk")
_COMMIT = Script.load("commit", "changes", "score", "generations")
_TOUCH = Script.load("touch", "score")
_EVICT = Script.load("evict", "changes", "grace", "drop")
_NOTE = Script.load("note")

#: What register.lua answers for a namespace that it must not touch.
_NEWER = 2

_STATES = (CommitState.WAITING, CommitState.VISIBLE, CommitState.REFUSED)


class RedisIndex(RedisCatalogue, RedisUpkeep, RedisJournal, Index, Maintenance):
    """The index over one Redis: a single server, what Sentinel points at, or a Cluster."""

    def __init__(
        self,
        client: RedisClient,
        *,
        journal: JournalSettings = JOURNAL,
        cost_aware: bool = True,
        grace_s: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__(client, journal=journal, cost_aware=cost_aware, grace_s=grace_s, clock=clock)

    @classmethod
    def from_settings(
        cls,
        url: str,
        settings: RedisSettings,
        *,
        journal: JournalSettings = JOURNAL,
        cost_aware: bool = True,
        grace_s: float = 0.0,
        clock: Callable[[], float] = time.time,
    ) -> Self:
        """For `redis://`, `rediss://` or `unix://`. No I/O. Raises ConfigError."""
        client = RedisClient.from_settings(url, settings)
        return cls(client, journal=journal, cost_aware=cost_aware, grace_s=grace_s, clock=clock)

    def __repr__(self) -> str:
        return f"RedisIndex({self._client.where})"

    def sketch_bits(self, namespace: NamespaceId, *, now_s: float, window_s: float, sketch_bytes: int) -> int:
        """How many bits of the sketch that `note` looks at are set, in its fuller window. For people."""
        window = Window.at(now_s, window_s, sketch_bytes)
        names = [key(namespace, f"use:{sketch}") for sketch in (window.now, window.before)]
        return max(int(self._client.command("BITCOUNT", name, name="sketch_bits")) for name in names)

    def close(self) -> None:
        self._client.close()

    def register(self, namespace: Namespace, *, expected_blocks: int) -> NamespaceId:
        name = namespace_id(namespace)
        self._client.command("SADD", NAMESPACES, name)
        begun = self._client.run(
            _REGISTER,
            key(name, "meta"),
            canonical_json(namespace),
            namespace.kind,
            namespace.tenant,
            bucket_bits(expected_blocks),
            round(self._clock(), 3),
        )
        if begun == _NEWER:
            raise PermissionDenied(
                f"redis {self._client.where}: register: namespace {name} is of a newer release's schema; "
                "upgrade this one, which goes on without it until then"
            )
        if begun:
            # An erasing that came between the two may have taken the id away.
            self._client.command("SADD", NAMESPACES, name)
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
            digests[:DIGEST_BYTES] + agreement(digests, record, ranks),
            pack_part(record, record.parts[0]),
            record.nbytes,
            rank,
            ranks,
            INCOMPLETE_TTL_S,
            minute(record.created_s),
            worth(record.cost_us, record.nbytes) if self._cost_aware else 0,
            self._journal.events,
        )
        if state is None:
            raise self._unknown("commit", namespace)
        return _STATES[state]

    def touch(self, namespace: NamespaceId, segments: Sequence[SegmentId], now_s: float) -> None:
        check_segments(segments)
        for first, some in enumerate(pieces(segments, _TOUCHED)):
            how = (minute(now_s), 0 if first else 1, HOT_MOST, HOT_KEPT)
            self._client.run(_TOUCH, key(namespace, "meta"), b"".join(some), *how)

    def evict(
        self,
        namespace: NamespaceId,
        segments: Sequence[SegmentId],
        *,
        delete_after_s: float,
        rule: EvictionRule,
    ) -> int:
        check_segments(segments)
        how = (self.deletion(delete_after_s), *self.recorded(rule))
        return sum(
            self._client.run(_EVICT, key(namespace, "meta"), b"".join(some), *how)
            for some in pieces(segments, SLICE)
        )

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
