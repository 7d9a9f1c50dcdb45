"""Resharding: brings a namespace from its shards into another number of them, while engines use it.

    build     the shards after are filled from those before, again and again until little is new. Nobody
              reads them, they count for nothing, and what is not visible before is not in them.
    turn      one script: the namespace lies in the shards after. Who believes the old number is still served
              there, for LOOK_S at most, and is told that it is gone when he writes.
    finish    each shard before is sealed. What came since the last look is brought over, and what was evicted
              or invalidated there is evicted after; then it is dropped.

The namespace's `meta` tells which of these it is, so whoever comes after one who was killed goes on. Until
the turn what is visible before is the truth, and from then on what is after: to that only what was committed
before the seal is added, and from it only goes what was evicted before.

What only sessions, sketches, ghosts and journals remember is not brought over: owners and what is retained,
what was asked for once, totals, and the positions of readers of events, who have a Gap.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvstore.errors import NamespaceUnknown, TransientError
from kvstore.index.contract import is_forbidden
from kvstore.index.maintenance import Entry, Listing
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sharding.layouts import LOOK_S, split
from kvstore.index.sharding.leaf import Layout, MovableLeaf, Step, Taken
from kvstore.index.sharding.names import of_chain, of_segment, shard_names
from kvstore.keys import NamespaceId, SaltId, SegmentId
from kvstore.rules.units import batches
from schemas.namespace import Namespace

#: Rounds of copying at most, and the part of all segments that may be new in the last: what is left then the
#: finish brings over, while it is not found.
_ROUNDS = 4
_FEW = 0.01
#: Segments, or entries, that are looked at at a time.
_PAGE = 500
_ENTRIES = 5000
#: Seconds within which what was made is not evicted, or is on its way to the shared store.
_YOUNG_S = 3600.0
#: Seconds beyond LOOK_S for which the shards before are left as they are: a call takes that long at most.
_LATE_S = 2.0


@dataclass(slots=True)
class Moved:
    """Counts of what a reshard did."""

    rounds: int = 0
    #: Segments that became visible in the shards after, and entries that were written there.
    segments: int = 0
    entries: int = 0
    #: Segments whose id has another chain's tag, or none: nobody finds them, and they go by age.
    unfindable: int = 0
    #: Segments that were committed before while the turn came, and those of them whose payloads were gone.
    late: int = 0
    missing: int = 0
    #: Segments that were copied and then evicted before.
    withdrawn: int = 0


class Resharding:
    """One run. Raises what the index raises: run it again. Belongs to one thread."""

    def __init__(
        self,
        index: ShardedIndex,
        leaf: MovableLeaf,
        namespace: Namespace,
        name: NamespaceId,
        shards: int,
        *,
        expected_blocks: int,
        is_stored: Callable[[SegmentId, int], bool],
        hold: Callable[[], None] = lambda: None,
        begin: Callable[[str, int], None] = lambda what, nbytes: None,
        advance: Callable[[int], None] = lambda nbytes: None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        """`is_stored` tells whether the payloads of all ranks are there. `hold` is called before each page,
        and raises if somebody else has begun. `begin` and `advance` tell how far it is, in bytes of segments.
        """
        self._index = index
        self._leaf = leaf
        self._namespace = namespace
        self._name = name
        self._shards = shards
        self._expected_blocks = expected_blocks
        self._is_stored = is_stored
        self._hold = hold
        self._begin = begin
        self._advance = advance
        self._wait = wait
        self.moved = Moved()

    def run(self) -> Moved:
        """Ends where the namespace lies in as many shards as it should, and nothing of it elsewhere."""
        while True:
            layout = self._leaf.layout(self._name)
            if layout is None:
                raise NamespaceUnknown(f"namespace {self._name} is not registered any more")
            if layout.left:
                self._finish(layout)
            elif layout.to and layout.to != self._shards:
                self._undo(layout)
            elif layout.shards != self._shards:
                self._build(layout)
            else:
                return self.moved

    # Build

    def _build(self, layout: Layout) -> None:
        name, before, after = self._name, layout.shards, self._shards
        olds, news = shard_names(name, before), shard_names(name, after)
        self._step("begin", before, after)
        if after > 1:
            for one in news:
                # Of an undoing that was killed: what lies aside takes nothing.
                while self._leaf.drop_aside(one, _ENTRIES):
                    self._hold()
            self._index.register_shards(name, self._namespace, after, self._expected_blocks)
        few = 0.0
        for _ in range(_ROUNDS):
            self._tell_lives(news)
            new = self._round(olds, news)
            few = few or new * _FEW
            if new <= few:
                break
        self._hold()
        self._step("turn", before, after)

    def _step(self, step: Step, before: int, after: int) -> None:
        if not self._leaf.reshard(self._name, step, before, after, expected_blocks=self._expected_blocks):
            raise TransientError(
                f"namespace {self._name} does not lie in {before} shards any more, or somebody else brings "
                "it into others; run it again"
            )

    def _tell_lives(self, news: Sequence[NamespaceId]) -> None:
        (account,) = (one for one in self._index.accounts() if one.namespace == self._name)
        for name in news:
            self._leaf.reshard(name, "ttl", 0, 0, ttl_s=account.ttl_s)

    def _round(self, olds: Sequence[NamespaceId], news: Sequence[NamespaceId]) -> int:
        """Makes the shards after what those before are. Returns how many segments were new."""
        self._begin("copy", sum(self._leaf.usage(name).nbytes for name in olds))
        copied, unfindable = 0, 0
        for page in self._pages(olds):
            parts = defaultdict[NamespaceId, list[Taken]](list)
            for one in page:
                name = of_segment(news, one.segment)
                parts[name].append(one)
                unfindable += not one.record.depth and of_chain(news, one.first) != name
            for name, some in parts.items():
                copied += self._leaf.adopt(name, some, building=True)
            self._advance(sum(one.record.nbytes for one in page))
        for segments in self._listed(news):
            kept = set(self._visible(olds, segments))
            for name, gone in split(news, [one for one in segments if one not in kept]).items():
                self.moved.withdrawn += self._leaf.unlist(name, gone)
        self._enter(olds, news, None)
        self.moved.rounds += 1
        self.moved.segments += copied
        self.moved.unfindable = unfindable
        return copied

    def _pages(self, names: Iterable[NamespaceId]) -> Iterator[list[Taken]]:
        for name in names:
            for page in self._leaf.taken(name):
                self._hold()
                yield page

    def _listed(self, names: Sequence[NamespaceId]) -> Iterator[list[SegmentId]]:
        for page in self._pages(names):
            yield [one.segment for one in page]

    def _visible(self, names: Sequence[NamespaceId], segments: Sequence[SegmentId]) -> Iterator[SegmentId]:
        for name, some in split(names, segments).items():
            states = self._leaf.states(name, some)
            yield from (one for one, state in zip(some, states, strict=True) if state == "visible")

    def _enter(
        self, olds: Sequence[NamespaceId], news: Sequence[NamespaceId], only: Collection[SegmentId] | None
    ) -> None:
        """Copies the entries of what is visible after, or of some segments, whether or not they are."""
        for old in olds:
            entries = (one for one in self._leaf.entries(old) if only is None or one.segment in only)
            for some in _pages(entries, _ENTRIES):
                self._hold()
                parts = defaultdict[NamespaceId, list[Entry]](list)
                for one in some:
                    parts[of_segment(news, one.segment)].append(one)
                for name, those in parts.items():
                    self.moved.entries += self._leaf.enter(name, those, visible=only is None)

    def _undo(self, layout: Layout) -> None:
        """Drops what was built for another number."""
        self._hold()
        for name in shard_names(self._name, layout.to):
            self._drop(name)
        self._step("undo", layout.shards, layout.to)

    def _drop(self, name: NamespaceId) -> None:
        if name != self._name:
            self._leaf.reshard(name, "seal", 0, 0)
        while self._leaf.drop_aside(name, _ENTRIES):
            self._hold()

    # Finish

    def _finish(self, layout: Layout) -> None:
        name, before, after = self._name, layout.left, layout.shards
        olds, news = shard_names(name, before), shard_names(name, after)
        if before > 1:
            for old in olds:
                self._leaf.reshard(old, "seal", 0, 0)
        sealed = time.monotonic()
        if after > 1:
            # What was forbidden while there were two layouts.
            self._index.register_shards(name, self._namespace, after, self._expected_blocks)
        self._bring_late(olds, news)
        self._bring_trash(olds, news)
        self._evict_forbidden(news)
        self._begin("wait for processes that know the old number", 0)
        self._wait(max(0.0, sealed + LOOK_S + _LATE_S - time.monotonic()))
        self._bring_trash(olds, news)
        for old in olds:
            self._drop(old)
        self._step("end", before, after)

    def _bring_late(self, olds: Sequence[NamespaceId], news: Sequence[NamespaceId]) -> None:
        """Brings over what is known before and not after.

        That was committed since the last round; or, if who turned was killed and nobody went on for long, it
        was evicted and deleted after. So payloads are looked for, but of what is so young that it may be on a
        node still. Entries come first: of a segment whose record is there nobody would look for them again.
        """
        young_s = time.time() - _YOUNG_S
        late: dict[SegmentId, Taken] = {}
        for page in self._pages(olds):
            for name, some in split(news, [one.segment for one in page]).items():
                states = self._leaf.states(name, some)
                unknown = {one for one, state in zip(some, states, strict=True) if state is None}
                late |= {one.segment: one for one in page if one.segment in unknown}
        for segment, one in list(late.items()):
            self._hold()
            if one.record.created_s < young_s and not self._is_stored(segment, len(one.record.parts)):
                del late[segment]
                self.moved.missing += 1
        if not late:
            return
        self._enter(olds, news, late.keys())
        for name, some in split(news, list(late)).items():
            self.moved.late += self._leaf.adopt(name, [late[one] for one in some], building=False)

    def _bring_trash(self, olds: Sequence[NamespaceId], news: Sequence[NamespaceId]) -> None:
        for old in olds:
            while self._leaf.drain(old, delete_after_s=time.time(), limit=_PAGE):
                self._hold()
            while found := self._leaf.discarded(old, _PAGE):
                self._hold()
                for name, some in split(news, list(found)).items():
                    self.moved.withdrawn += self._leaf.discard(name, {one: found[one] for one in some})
                self._leaf.reaped(old, list(found))

    def _evict_forbidden(self, news: Sequence[NamespaceId]) -> None:
        """An erasure deletes at once what it finds, and it looked where the namespace lay."""
        forbidden = self._leaf.forbidden(self._name)
        if not forbidden:
            return

        def is_gone(one: Listing) -> bool:
            return is_forbidden(forbidden, SaltId(one.record.salt), one.record.created_s)

        for name in news:
            gone = [one.segment for one in self._leaf.segments(name) if is_gone(one)]
            for some in batches(gone, _PAGE):
                self._hold()
                self.moved.withdrawn += self._leaf.evict(name, some, delete_after_s=0, rule="erased")


def _pages(entries: Iterable[Entry], most: int) -> Iterator[list[Entry]]:
    page: list[Entry] = []
    for one in entries:
        page.append(one)
        if len(page) == most:
            yield page
            page = []
    if page:
        yield page
