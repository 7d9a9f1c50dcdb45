"""ShardedRequests: what engines ask of an index that keeps namespaces in several shards.

    by the chain's tag        match, find, note, tell
    by the segment's tag      claim, commit, touch, evict, session
    in all shards             register, a hint about a session, owned, find of blocks whose chain isn't known

What goes to one shard takes one call of the leaf, as without shards. What goes to several goes to one after
the other, and to all of them though one fails; the failure is raised at the end.

How many shards a namespace has is asked of the leaf, and again LOOK_S later: somebody may have erased it and
registered it with another number. While the leaf can't say, what it said last counts.
"""

from __future__ import annotations

import time
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar

from kvstore.errors import KVStoreError
from kvstore.index.contract import check_commit, check_segments, count_digests
from kvstore.index.demand import Raised
from kvstore.index.port import Claim, CommitState, EngineIndex, Outcome, Run
from kvstore.index.sessions import NOTHING_RETAINED, USE, Allowance, Hint, HintEffect
from kvstore.index.sharding.leaf import Layout, ShardLeaf
from kvstore.index.sharding.names import of_chain, of_segment, shard_names
from kvstore.keys import (
    DIGEST_BYTES,
    NO_SESSION,
    NamespaceId,
    SaltId,
    SegmentId,
    SessionId,
    namespace_id,
    split_digests,
)
from schemas.namespace import Namespace
from schemas.records import EvictionRule, SegmentRecord

#: Seconds for which the number of a namespace's shards is believed.
LOOK_S = 10.0
#: Namespaces of which it is remembered.
_MOST = 4096

_T = TypeVar("_T")
_Key = TypeVar("_Key")


class Guard(Protocol):
    """Guards a call to a shard, as kvstore.breaker.Breaker.guard does."""

    def __call__(self, name: NamespaceId, *, may_probe: bool = True) -> AbstractContextManager[None]: ...


def unguarded(name: NamespaceId, *, may_probe: bool = True) -> AbstractContextManager[None]:
    """Lets every call pass: for maintenance."""
    return nullcontext()


class FailedShards:
    """Collects the failures of calls to several shards; the first one is raised at the end."""

    def __init__(self) -> None:
        self.first: KVStoreError | None = None

    @contextmanager
    def passed(self) -> Iterator[None]:
        """Goes on after a failure."""
        try:
            yield
        except KVStoreError as exc:
            self.first = self.first or exc

    def end(self) -> None:
        """Raises the first failure, if there was one."""
        if self.first is not None:
            raise self.first


class ShardedRequests(EngineIndex):
    """An index whose namespaces have `shards` shards if they are registered here first. Safe for threads."""

    def __init__(
        self,
        leaf: ShardLeaf,
        *,
        shards: int = 1,
        guard: Guard = unguarded,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._leaf = leaf
        self._asked = shards
        self._guard = guard
        self._monotonic = monotonic
        #: Each entry is replaced as a whole: threads may look at the same time, and nothing is lost by that.
        self._known: dict[NamespaceId, tuple[float, Layout]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._leaf!r})"

    # Where

    def _layout(self, namespace: NamespaceId) -> Layout:
        now = self._monotonic()
        at, known = self._known.get(namespace, (0.0, None))
        if known is not None and now - at < LOOK_S:
            return known
        try:
            with self._guard(namespace, may_probe=False):
                found = self._leaf.layout(namespace)
        except KVStoreError:
            if known is None:
                raise
            found = known
        if found is None:
            # Not remembered: it may be registered any moment.
            self._known.pop(namespace, None)
            return Layout(1, items=False)
        return self._remember(namespace, found)

    def _remember(self, namespace: NamespaceId, layout: Layout) -> Layout:
        if len(self._known) >= _MOST:
            self._known = {}
        self._known[namespace] = self._monotonic(), layout
        return layout

    def _shards(self, namespace: NamespaceId) -> tuple[NamespaceId, ...]:
        return shard_names(namespace, self._layout(namespace).shards)

    def _of_chain(self, namespace: NamespaceId, chain: bytes) -> NamespaceId:
        return of_chain(self._shards(namespace), chain)

    def _split(
        self, namespace: NamespaceId, segments: Sequence[SegmentId]
    ) -> dict[NamespaceId, list[SegmentId]]:
        """Returns which of some segments are in which shard, in their order."""
        check_segments(segments)
        shards, parts = self._shards(namespace), defaultdict[NamespaceId, list[SegmentId]](list)
        for segment in segments:
            parts[of_segment(shards, segment)].append(segment)
        return parts

    def _each(self, names: Iterable[NamespaceId], call: Callable[[NamespaceId], _T]) -> list[_T]:
        """Calls of each shard. Raises the first failure, after all were called."""
        failures, answers = FailedShards(), []
        for name in names:
            with failures.passed(), self._guard(name):
                answers.append(call(name))
        failures.end()
        return answers

    def _gathered(
        self,
        namespace: NamespaceId,
        segments: Sequence[SegmentId],
        ask: Callable[[NamespaceId, list[SegmentId]], Sequence[_T]],
    ) -> list[_T]:
        """Asks each shard about its segments, and returns the answers in step with `segments`."""
        parts = self._split(namespace, segments)
        answers = dict(zip(parts, self._each(parts, lambda name: iter(ask(name, parts[name]))), strict=True))
        shards = self._shards(namespace)
        return [next(answers[of_segment(shards, segment)]) for segment in segments]

    # The index

    def register(self, namespace: Namespace, *, expected_blocks: int) -> NamespaceId:
        """Registers every shard that answers. Raises if none does: one that is down costs no other's hits."""
        name = namespace_id(namespace)
        items = namespace.kind == "ec"
        with self._guard(name):
            count = self._leaf.lay_out(namespace, expected_blocks=expected_blocks, shards=self._asked)
        self._remember(name, Layout(count, items))
        if count > 1:
            shards, share = shard_names(name, count), -(-expected_blocks // count)
            with self._guard(name):
                forbidden = self._leaf.forbidden(name)
            failures, done = FailedShards(), 0
            for one in shards:
                with failures.passed(), self._guard(one):
                    self._forbid_as_before(one, forbidden)
                    self._leaf.register_shard(one, namespace, expected_blocks=share)
                    done += 1
            if not done:
                failures.end()
        return name

    def _forbid_as_before(self, name: NamespaceId, forbidden: Mapping[SaltId, float]) -> None:
        """Forbids in a shard, before it begins, what was forbidden before. ShardedIndex.forbid is the other
        half of this: one of the two comes after the other's first step."""
        if forbidden:
            for salt in forbidden.keys() - self._leaf.forbidden(name).keys():
                self._leaf.forbid(name, salt)

    def match(self, namespace: NamespaceId, digests: bytes) -> list[Run]:
        name = self._of_chain(namespace, digests)
        with self._guard(name, may_probe=False):
            return self._leaf.match(name, digests)

    def find(self, namespace: NamespaceId, digests: bytes, chain: bytes = b"") -> list[Run | None]:
        layout = self._layout(namespace)
        shards = shard_names(namespace, layout.shards)
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
    ) -> CommitState:
        """In a namespace of several shards, a segment that begins a chain and has another's tag is REFUSED:
        nobody would find it. Releases that knew no tags wrote such."""
        check_commit(segment, digests, record, rank, ranks)
        shards = self._shards(namespace)
        name = of_segment(shards, segment)
        if not record.depth and of_chain(shards, digests) != name:
            return CommitState.REFUSED
        with self._guard(name):
            return self._leaf.commit(
                name,
                segment,
                digests,
                record,
                rank=rank,
                ranks=ranks,
                session=session,
                allowance=_share(allowance, len(shards)),
            )

    def touch(self, namespace: NamespaceId, segments: Sequence[SegmentId], now_s: float) -> None:
        parts = self._split(namespace, segments)
        self._each(parts, lambda name: self._leaf.touch(name, parts[name], now_s))

    def evict(
        self,
        namespace: NamespaceId,
        segments: Sequence[SegmentId],
        *,
        delete_after_s: float,
        rule: EvictionRule,
    ) -> int:
        parts = self._split(namespace, segments)

        def evict(name: NamespaceId) -> int:
            return self._leaf.evict(name, parts[name], delete_after_s=delete_after_s, rule=rule)

        return sum(self._each(parts, evict))

    # Notes, outcomes, sessions

    def note(
        self, namespace: NamespaceId, digests: bytes, *, now_s: float, window_s: float, sketch_bytes: int
    ) -> int:
        name = self._of_chain(namespace, digests)
        with self._guard(name):
            return self._leaf.note(name, digests, now_s=now_s, window_s=window_s, sketch_bytes=sketch_bytes)

    def sketch_bits(self, namespace: NamespaceId, *, now_s: float, window_s: float, sketch_bytes: int) -> int:
        """Returns those of the fullest shard."""

        def bits(name: NamespaceId) -> int:
            return self._leaf.sketch_bits(name, now_s=now_s, window_s=window_s, sketch_bytes=sketch_bytes)

        return max(self._each(self._shards(namespace), bits))

    def tell(self, namespace: NamespaceId, outcomes: Sequence[Outcome], raised: Raised | None = None) -> None:
        """What was raised goes to one of the shards: ShardedJournal.asked looks at all."""
        layout = self._layout(namespace)
        shards = shard_names(namespace, layout.shards)
        parts = defaultdict[NamespaceId, list[Outcome]](list)
        for one in outcomes:
            count_digests(one.missing)
            parts[_told(shards, one, items=layout.items)].append(one)
        first = next(iter(parts), None)

        def tell(name: NamespaceId) -> None:
            self._leaf.tell(name, parts[name], raised if raised is None or name == first else raised.after())

        self._each(parts, tell)

    def session(
        self,
        namespace: NamespaceId,
        session: SessionId,
        segments: Sequence[SegmentId],
        now_s: float,
        hint: Hint = USE,
        *,
        allowance: Allowance = NOTHING_RETAINED,
    ) -> HintEffect:
        """Each shard allows an equal part of the allowance. A use is told to the shards of its segments, and
        its effect says what is there; what is told of the session goes to all."""
        parts, shards = self._split(namespace, segments), self._shards(namespace)
        share = _share(allowance, len(shards))
        names = shards if hint != USE else list(parts) or shards[:1]

        def tell(name: NamespaceId) -> HintEffect:
            some = parts.get(name, [])
            return self._leaf.session(name, session, some, now_s, hint, allowance=share)

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


def _share(allowance: Allowance, shards: int) -> Allowance:
    return Allowance(allowance.namespace_bytes // shards, allowance.salt_bytes // shards)


def _at(place: int, run: Run | None) -> Run | None:
    return None if run is None else Run(place, run.segment, run.slot, run.count, run.record)


def _told(shards: Sequence[NamespaceId], one: Outcome, *, items: bool) -> NamespaceId:
    """Returns the shard that remembers an outcome: that which remembers what was evicted of its chain, if the
    chain is known, or else any, but the same for all that becomes of a request."""
    chain = one.chain or (one.missing if items or not one.position else b"")
    if chain:
        return of_chain(shards, chain)
    return shards[zlib.crc32(one.request.encode("utf-8", "surrogatepass")) % len(shards)]
