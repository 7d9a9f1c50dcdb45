"""ShardedRequests: what engines ask of an index that keeps namespaces in several shards.

    by the chain's tag        match, find, note, tell
    by the segment's tag      claim, commit, touch, evict, session
    under the namespace's id  verdicts about writers
    in all shards             register, a hint about a session, owned, find of blocks whose chain isn't known

What goes to one shard takes one call of the leaf, as without shards. What goes to several goes to one after
the other, and to all of them though one fails; the failure is raised at the end.
"""

from __future__ import annotations

import logging
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence

from kvstore.errors import KVStoreError
from kvstore.index.contract import check_commit, check_segments, count_digests
from kvstore.index.port import Claim, CommitState, Outcome, Replaced, Run
from kvstore.index.sessions import NOTHING_RETAINED, USE, Allowance, Hint, HintEffect
from kvstore.index.sharding.layouts import FailedShards, ShardedLayouts, split
from kvstore.index.sharding.leaf import Layout
from kvstore.index.sharding.names import of_chain, of_segment, shard_names
from kvstore.index.verdicts import Opinion, Verdict, VerdictState
from kvstore.keys import (
    DIGEST_BYTES,
    NO_SESSION,
    NamespaceId,
    PlaceId,
    SegmentId,
    SessionId,
    WriterId,
    split_digests,
)
from schemas.records import EvictionRule, SegmentRecord

log = logging.getLogger(__name__)


class ShardedRequests(ShardedLayouts):
    """The part of ShardedIndex that engines use."""

    def match(self, namespace: NamespaceId, digests: bytes) -> list[Run]:
        name = of_chain(self._shards(namespace, may_probe=False), digests)
        with self._guard(name, may_probe=False):
            return self._leaf.match(name, digests)

    def find(self, namespace: NamespaceId, digests: bytes, chain: bytes = b"") -> list[Run | None]:
        layout = self._layout(namespace)
        shards = shard_names(namespace, layout.name)
        if chain or len(shards) == 1:
            name = of_chain(shards, chain)
            with self._guard(name):
                return self._leaf.find(name, digests)
        if layout.items:
            return self._find_items(shards, digests)
        return self._find_anywhere(shards, digests)

    def _find_items(self, shards: Sequence[NamespaceId], digests: bytes) -> list[Run | None]:
        places: Mapping[NamespaceId, list[int]] = defaultdict(list)
        items = split_digests(digests)
        for place, item in enumerate(items):
            places[of_chain(shards, item)].append(place)
        found: list[Run | None] = [None] * len(items)

        def find(name: NamespaceId) -> None:
            some = self._leaf.find(name, b"".join(items[place] for place in places[name]))
            for place, run in zip(places[name], some, strict=True):
                found[place] = _at(place, run)

        self._each(places, find)
        return found

    def _find_anywhere(self, shards: Sequence[NamespaceId], digests: bytes) -> list[Run | None]:
        """Looks in one shard after the other for what is not found yet. One that fails has nothing, unless
        all do."""
        found: list[Run | None] = [None] * (len(digests) // DIGEST_BYTES)
        failures, answered = FailedShards(), False
        for name in shards:
            with failures.passed(), self._guard(name):
                some, answered = self._leaf.find(name, digests), True
                found = [one or other for one, other in zip(found, some, strict=True)]
            if None not in found:
                break
        if not answered:
            failures.end()
        return found

    def claim(self, namespace: NamespaceId, digests: bytes, segment: SegmentId, ttl_s: float) -> Claim:
        name = self._of_segment(namespace, segment)
        with self._guard(name):
            return self._leaf.claim(name, digests, segment, ttl_s)

    def _of_segment(self, namespace: NamespaceId, segment: SegmentId) -> NamespaceId:
        check_segments([segment])
        return of_segment(self._shards(namespace), segment)

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
        """In a namespace of several shards, a segment that begins a chain and has another's tag is REFUSED:
        nobody would find it. Releases that knew no tags wrote such. What it replaces and has another tag
        stays."""
        check_commit(segment, digests, record, rank, ranks)
        layout = self._layout(namespace)
        shards = shard_names(namespace, layout.name)
        name = of_segment(shards, segment)
        if not record.depth and of_chain(shards, digests) != name:
            return CommitState.REFUSED
        with self._guard(name):
            state = self._leaf.commit(
                name,
                segment,
                digests,
                record,
                rank=rank,
                ranks=ranks,
                session=session,
                allowance=_share(allowance, len(shards)),
                replaces=replaces,
            )
        if state is CommitState.VISIBLE and replaces and layout.others:
            self._replaced(namespace, layout, name, [one.segment for one in replaces])
        return state

    def _replaced(
        self, namespace: NamespaceId, layout: Layout, name: NamespaceId, olds: Sequence[SegmentId]
    ) -> None:
        """Evicts in the other layouts what a commit has replaced. It is saved whatever these say: a reshard
        looks once more before it turns."""
        try:
            with self._guard(name):
                states = self._leaf.states(name, olds)
            gone = [one for one, state in zip(olds, states, strict=True) if state != "visible"]
            for other in sorted(layout.others) if gone else ():
                for one, some in split(shard_names(namespace, other), gone).items():
                    with self._guard(one):
                        # Its payload may go at once, as commit.lua has it.
                        self._leaf.evict(one, some, delete_after_s=1, rule="joined")
        except KVStoreError as exc:
            log.warning("what %s has replaced is left in other shards of %s: %s", name, namespace, exc)

    def touch(
        self, namespace: NamespaceId, segments: Sequence[SegmentId], used_s: float | None = None
    ) -> None:
        parts = split(self._shards(namespace), segments)
        self._each(parts, lambda name: self._leaf.touch(name, parts[name], used_s))

    def evict(
        self,
        namespace: NamespaceId,
        segments: Sequence[SegmentId],
        *,
        delete_after_s: float,
        rule: EvictionRule,
    ) -> int:
        def evict(shards: Sequence[NamespaceId]) -> int:
            parts = split(shards, segments)

            def evict_some(name: NamespaceId) -> int:
                return self._leaf.evict(name, parts[name], delete_after_s=delete_after_s, rule=rule)

            return sum(self._each(parts, evict_some))

        return self._in_all(namespace, evict)

    # Notes, outcomes, sessions

    def note(
        self, namespace: NamespaceId, digests: bytes, *, now_s: float, window_s: float, sketch_bytes: int
    ) -> int:
        name = of_chain(self._shards(namespace), digests)
        with self._guard(name):
            return self._leaf.note(name, digests, now_s=now_s, window_s=window_s, sketch_bytes=sketch_bytes)

    def sketch_bits(self, namespace: NamespaceId, *, now_s: float, window_s: float, sketch_bytes: int) -> int:
        """Returns those of the fullest shard."""

        def bits(name: NamespaceId) -> int:
            return self._leaf.sketch_bits(name, now_s=now_s, window_s=window_s, sketch_bytes=sketch_bytes)

        return max(self._each(self._shards(namespace), bits))

    def tell(self, namespace: NamespaceId, outcomes: Sequence[Outcome]) -> None:
        layout = self._layout(namespace)
        shards = shard_names(namespace, layout.name)
        parts = defaultdict[NamespaceId, list[Outcome]](list)
        for one in outcomes:
            count_digests(one.missing)
            parts[_told(shards, one, items=layout.items)].append(one)
        self._each(parts, lambda name: self._leaf.tell(name, parts[name]))

    def session(
        self,
        namespace: NamespaceId,
        session: SessionId,
        segments: Sequence[SegmentId],
        used_s: float | None = None,
        hint: Hint = USE,
        *,
        allowance: Allowance = NOTHING_RETAINED,
    ) -> HintEffect:
        """Each shard allows an equal part of the allowance. A use is told to the shards of its segments, and
        its effect says what is there; what is told of the session goes to all."""
        shards = self._shards(namespace)
        parts = split(shards, segments)
        share = _share(allowance, len(shards))
        names = shards if hint != USE else list(parts) or shards[:1]

        def tell(name: NamespaceId) -> HintEffect:
            some = parts.get(name, [])
            return self._leaf.session(name, session, some, used_s, hint, allowance=share)

        told = self._each(names, tell)
        return HintEffect(
            min((one.state for one in told), key=("retained", "live", "ended").index),
            sum(one.segments for one in told),
            sum(one.demoted for one in told),
            sum(one.retained_bytes for one in told),
            sum(one.refused_bytes for one in told),
        )

    def owned(self, namespace: NamespaceId, session: SessionId) -> dict[SegmentId, SegmentRecord]:
        found: dict[SegmentId, SegmentRecord] = {}
        for some in self._each(self._shards(namespace), lambda name: self._leaf.owned(name, session)):
            found |= some
        return found

    def close(self) -> None:
        self._leaf.close()

    def verdicts(
        self, namespace: NamespaceId, writers: Sequence[WriterId] | None = None
    ) -> Mapping[WriterId, Verdict]:
        with self._guard(namespace, may_probe=False):
            return self._leaf.verdicts(namespace, writers)

    def judge(
        self,
        namespace: NamespaceId,
        writer: WriterId,
        opinion: Opinion,
        *,
        by: PlaceId,
        stands: bool,
        name: str = "",
    ) -> VerdictState:
        with self._guard(namespace):
            state = self._leaf.judge(namespace, writer, opinion, by=by, stands=stands, name=name)
        if state == "failed":
            # Where its commits are refused. A shard that is down now takes them: readers don't.
            try:
                layout = self._layout(namespace)
                names = (shard_names(namespace, one) for one in (layout.name, *sorted(layout.others)))
                shards = [one for some in names for one in some if one != namespace]
                self._each(shards, lambda one: self._leaf.judge(one, writer, "differs", by=by, stands=True))
            except KVStoreError as exc:
                log.warning("not every shard of %s refuses writer %s: %s", namespace, writer.hex(), exc)
        return state


def _share(allowance: Allowance, shards: int) -> Allowance:
    return Allowance(
        allowance.namespace_bytes // shards, allowance.salt_bytes // shards, allowance.session_bytes // shards
    )


def _at(place: int, run: Run | None) -> Run | None:
    return None if run is None else Run(place, run.segment, run.slot, run.count, run.record)


def _told(shards: Sequence[NamespaceId], one: Outcome, *, items: bool) -> NamespaceId:
    """Returns the shard that remembers an outcome: that which remembers what was evicted of its chain, if the
    chain is known, or else any, but the same for all that becomes of a request."""
    chain = one.chain or (one.missing if items or not one.position else b"")
    if chain:
        return of_chain(shards, chain)
    return shards[zlib.crc32(one.request.encode("utf-8", "surrogatepass")) % len(shards)]
