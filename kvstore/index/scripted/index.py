"""ScriptedIndex: the index as scripts over the keys of Redis, which may lie in SQLite.

The schema (golden test: tests/index/redis/test_index.py). `{ns}` is the namespace id in braces, a hash tag:
a Cluster keeps a namespace on one node, so a script may use all of its keys.

    key                      type     what
    kvs:ns                   set      ids of the registered namespaces
    kvs:quotas               hash     scope (kvstore.index.eviction.Scope) -> bytes, or seconds to live
    kvs:operations              stream   ring of what operators did: by, verb, what; about 1,000; expires when
                                      nobody has done anything for 400 days
    kvs:ping                 string   written by ping
    kvs:{ns}:meta            hash     see below
    kvs:{ns}:b:<bucket>      hash     in listpack encoding (in SQLite all in one): digest without its first
                                      bits / 8 whole bytes -> segment id (8 bytes), slot (2 bytes, big endian)
    kvs:{ns}:segs            hash     segment id -> "<bytes>:<slots>:", agreement (first digest, xxh3-64 of
                                      all digests, head of the packed record with the salt's id), packed
                                      parts in rank order
    kvs:{ns}:lru             zset     segment id -> its place in the order of eviction, see below
    kvs:{ns}:pins            zset     the same for pinned segments; a visible one is in exactly one of the two
    kvs:{ns}:trash           zset     segment id -> unix s of its payloads' deletion + ranks / 256
    kvs:{ns}:old:<epoch>     hash     `segs` as it was when that epoch ended, until drain has emptied it
    kvs:{ns}:part:<segment>  hash     incomplete commit: agreement; epoch in which it began; <rank> ->
                                      "<bytes>:", packed part; expires after an hour
    kvs:{ns}:parts           zset     segment id of an incomplete commit -> unix s when it expires
    kvs:{ns}:claim:<digest>  string   segment id of the save that may write this block; expires
    kvs:{ns}:use:<window>    string   sketch of the blocks asked for in one window of time; expires. <window>
                                      is "<bytes>:<seconds>:<number since 1970>"; the bits: sketch.py
    kvs:{ns}:hot             zset     segment id -> minutes in which a load began with it, halved by cool;
                                      about 2,048 at most
    kvs:{ns}:salts           zset     salt id + id of a visible segment that was saved under it -> 0
    kvs:{ns}:held            zset     salt id -> bytes of its visible segments
    kvs:{ns}:owner           hash     segment id -> id of the session that alone has used it
    kvs:{ns}:sessions:<0|1>  hash     session id -> record (lua/sessions.lua); of the window in which it was
                                      used last, by its number mod 2: this one, or the one before
    kvs:{ns}:kept            zset     segment id, retained -> unix s of the end + minutes from its last use to
                                      that / 2**21
    kvs:{ns}:retained        hash     salt id -> bytes of its retained segments; "" -> of all
    kvs:{ns}:erased          hash     salt id, or "" for all of the namespace -> unix s; what was computed
                                      until then is not committed any more. Outlives the namespace
    kvs:{ns}:writers         hash     writer id -> state (0 proven, 1 disputed, 2 failed), u32 unix s, place
                                      id of who found it out, name; about 1,024; expires 90 days after the
                                      last. Under the id itself, whatever the number of shards; those that
                                      have failed in each shard, too
    kvs:{ns}:events          stream   ring of changes: op, segment, first and last digest, depth, slots,
                                      bytes, rule; of what was done by name also by; of what was told
                                      of (fate.lua) also fate and session; about journal.events
    kvs:{ns}:outcomes        stream   ring of outcomes: at (unix s), request, op, asked, served, reason,
                                      position, first missing digest; about journal.outcomes of them
    kvs:{ns}:faults          stream   those of them whose reason means that something doesn't work, under the
                                      same ids; about a quarter as many
    kvs:{ns}:seen            hash     totals of outcomes, by the names in Journal.seen
    kvs:{ns}:ghosts          zset     first digest of a segment that a quota evicted -> how much quotas had
                                      evicted before, in units of 4 KiB, + slots (at most 4095) / 4096;
                                      journal.ghosts of them
    kvs:{ns}:ghost           hash     step (kvstore.index.eviction.ghost_step) -> blocks

    A namespace in shards (kvstore.index.sharding) has these keys for each of them, under its name in the
    place of the id. Under the id itself it has a meta without bucket_bits, of schema 3, erased and writers.
    While a reshard has left there what was in one shard, that is there as well.

    meta's field             what
    shards                   its layout (kvstore.index.sharding.names); only with schema 3
    erasing                  1: an erase has begun, and nobody has registered it since; only with schema 3
    to                       the layout that a reshard fills
    from                     the layout that one has left, and drops
    schema                   2, or 3. A namespace of schema 1 is unknown until it is registered, and begins
                             anew; one of a newer schema is left alone
    json, kind, tenant       the namespace's
    bucket_bits              bits of a bucket's number
    created, seen            unix s of the first and the latest registration
    bytes, segments, blocks, pinned, cost      usage; pinned in bytes, cost in microseconds
    changes                  how often the usage changed
    evicted                  bytes that quotas have evicted
    epoch, drained           number of invalidations; the first epoch that may be left in old:<epoch>
    bygone                   number of segments in all old:<epoch>
    window                   number of the window of a day in which sessions were used last
    ttl                      seconds; what was created longer ago serves nobody. Absent: nothing is too old
    cursor, erased           where sweep and erase go on; the latter with the `changes` for which it is valid

A bucket's number is the digest's first `bucket_bits` bits, in hex; they are chosen at the first registration
so that buckets hold 32 to 64 entries when the namespace is full, well inside the 128 that Redis keeps
in its compact encoding. Records are fields of one hash and not keys of their own so that a match
fetches all of them in one call.

A place in the order of eviction is keep - (depth * 16 + worth) / 2**26, where depth is at most 2**20 - 1,
worth is that of index.eviction, from 0 to 15, and keep is the unix minute of the last use, down to the
quarter, plus 10 * worth. Rounded up to a quarter it is keep; the rest tells depth and worth, and keep and
worth tell the last use. Worth is 0 except for encoder items (kind ec), and for these too if
eviction.cost_aware is off. Releases that know whole minutes alone read such a score as of the minute that
begins next.

Scores are exact in a double: a minute takes 27 bits, depth and worth take 26; a second takes 31 and the ranks
8; 8 PiB in units of 4 KiB take 41 and slots 12.

A verb on a request's path takes one round trip. Every change is one script, and the race that it closes is
named at its head. Two verbs take several steps, register and erase: they change kvs:ns as well as the
namespace's own keys, which may lie on another node. So an id without meta is ignored, and each of the two
looks again after the other could have come between. No answer is wrong because a key has not expired yet, or
has.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.index.contract import (
    HOT_KEPT,
    HOT_MOST,
    INCOMPLETE_TTL_S,
    agreement,
    check_commit,
    check_replaced,
    check_segments,
    check_session,
    count_digests,
    minute,
)
from kvstore.index.eviction import worth
from kvstore.index.numbers import real, whole
from kvstore.index.port import Claim, CommitState, Replaced, Run
from kvstore.index.scripted.journal import JournalPart
from kvstore.index.scripted.layouts import LayoutsPart
from kvstore.index.scripted.maintenance import SLICE
from kvstore.index.scripted.scripts import Script
from kvstore.index.scripted.values import (
    key,
    record_of,
    understood,
)
from kvstore.index.scripted.verdicts import VerdictsPart
from kvstore.index.sessions import NOTHING_RETAINED, Allowance
from kvstore.index.sketch import Marks, Window
from kvstore.keys import (
    DIGEST_BYTES,
    NO_SESSION,
    SEGMENT_ID_BYTES,
    NamespaceId,
    SegmentId,
    SessionId,
)
from kvstore.rules.units import batches
from schemas.records import EvictionRule, SegmentRecord, pack_part

#: Segments that one touch script is given: 1 to 2 ms of Redis's time.
_TOUCH_SLICE = 1000

_MATCH = Script.load("match", "age", "walk")
_FIND = Script.load("find", "age")
_CLAIM = Script.load("claim", "age", "walk")
_COMMIT = Script.load(
    "commit", "changes", "score", "generations", "forbidden", "retention", "sessions", "grace", "drop"
)
_TOUCH = Script.load("touch", "score", "retention")
_EVICT = Script.load("evict", "changes", "score", "retention", "grace", "fate", "drop")
_NOTE = Script.load("note")

_STATES = (CommitState.WAITING, CommitState.VISIBLE, CommitState.REFUSED)


class ScriptedIndex(LayoutsPart, VerdictsPart, JournalPart):
    """The index, wherever its scripts run: a subclass brings the client."""

    @understood
    def sketch_bits(self, namespace: NamespaceId, *, now_s: float, window_s: float, sketch_bytes: int) -> int:
        window = Window.at(now_s, window_s, sketch_bytes)
        names = [key(namespace, f"use:{sketch}") for sketch in (window.now, window.before)]
        return max(whole(self._client.command("BITCOUNT", name, name="sketch_bits")) for name in names)

    def close(self) -> None:
        self._client.close()

    @understood
    def match(self, namespace: NamespaceId, digests: bytes) -> list[Run]:
        asked = count_digests(digests)
        segments, places, values = self._client.run(_MATCH, key(namespace, "meta"), digests)
        if not all(isinstance(one, bytes) and len(one) == SEGMENT_ID_BYTES for one in segments):
            raise ValueError("ids of segments have another length")
        runs: list[Run] = []
        start = 0
        for segment, place, value in zip(segments, places, values, strict=True):
            record, slot, count = record_of(value), place >> 16, place & 0xFFFF
            if record is None or not (slot >= 0 and 0 < count <= record.slots - slot):
                break
            if count > asked - start:
                raise ValueError(f"{start + count} blocks of {asked}")
            runs.append(Run(start, segment, slot, count, record))
            start += count
        return runs

    @understood
    def find(self, namespace: NamespaceId, digests: bytes, chain: bytes = b"") -> list[Run | None]:
        count = count_digests(digests)
        entries, segments, values = self._client.run(_FIND, key(namespace, "meta"), digests)
        known = {s: record_of(v) for s, v in zip(segments, values, strict=True) if v}
        runs: list[Run | None] = [None] * count
        for start, entry in enumerate(entries):
            if not entry or len(entry) != SEGMENT_ID_BYTES + 2:
                continue
            record, slot = known.get(entry[:8]), int.from_bytes(entry[8:], "big")
            if record is not None and slot < record.slots:
                runs[start] = Run(start, SegmentId(entry[:8]), slot, 1, record)
        return runs

    @understood
    def claim(self, namespace: NamespaceId, digests: bytes, segment: SegmentId, ttl_s: float) -> Claim:
        count = count_digests(digests)
        check_segments([segment])
        ttl_ms = max(1, round(ttl_s * 1000))
        reply = self._run(_CLAIM, namespace, digests, segment, ttl_ms)
        if reply is None:
            raise self._unregistered("claim", namespace)
        present, granted, time_s = reply
        # Records hold seconds in four bytes.
        at_s = real(time_s, least=0.0, most=(1 << 32) - 1)
        return Claim(present=whole(present, most=count), granted=bool(granted), at_s=at_s)

    @understood
    def commit(
        self,
        namespace: NamespaceId,
        segment: SegmentId,
        digests: bytes,
        record: SegmentRecord,
        *,
        rank: int,
        ranks: int,
        session: SessionId = NO_SESSION,
        allowance: Allowance = NOTHING_RETAINED,
        replaces: Sequence[Replaced] = (),
    ) -> CommitState:
        check_commit(segment, digests, record, rank, ranks)
        check_replaced(replaces)
        check_session(session, none=True)
        state = self._run(
            _COMMIT,
            namespace,
            segment,
            digests,
            digests[:DIGEST_BYTES] + agreement(digests, record, ranks),
            pack_part(record, record.parts[0]),
            record.nbytes,
            rank,
            ranks,
            INCOMPLETE_TTL_S,
            worth(record.cost_us, record.nbytes) if self._cost_aware else 0,
            self._journal.events,
            session,
            allowance.namespace_bytes,
            allowance.salt_bytes,
            allowance.session_bytes,
            b"".join(map(_packed, replaces)),
            self.deletion(1),
            self._by,
        )
        if state is None:
            raise self._unregistered("commit", namespace)
        return _STATES[whole(state, most=len(_STATES) - 1)]

    @understood
    def touch(
        self, namespace: NamespaceId, segments: Sequence[SegmentId], used_s: float | None = None
    ) -> None:
        check_segments(segments)
        for number, some in enumerate(batches(segments, _TOUCH_SLICE)):
            how = ("" if used_s is None else minute(used_s), 0 if number else 1, HOT_MOST, HOT_KEPT)
            self._run(_TOUCH, namespace, b"".join(some), *how)

    @understood
    def evict(
        self,
        namespace: NamespaceId,
        segments: Sequence[SegmentId],
        *,
        delete_after_s: float,
        rule: EvictionRule,
    ) -> int:
        check_segments(segments)
        how = (self.deletion(delete_after_s), *self.recorded(rule), self._by)
        return self._run_all(_EVICT, namespace, segments, SLICE, *how)

    @understood
    def note(
        self, namespace: NamespaceId, digests: bytes, *, now_s: float, window_s: float, sketch_bytes: int
    ) -> int:
        window = Window.at(now_s, window_s, sketch_bytes)
        asked = count_digests(digests)
        if not asked:
            return 0
        marks = Marks.of(digests)
        noted = self._run(
            _NOTE,
            namespace,
            marks.blocks,
            marks.masks,
            f"use:{window.now}",
            f"use:{window.before}",
            window.lines,
            window.keep_s,
        )
        if noted is None:
            raise self._unregistered("note", namespace)
        return whole(noted, most=asked)


def _packed(old: Replaced) -> bytes:
    """Returns what commit.lua reads of a segment that is replaced."""
    return old.segment + count_digests(old.digests).to_bytes(2, "big") + old.digests
