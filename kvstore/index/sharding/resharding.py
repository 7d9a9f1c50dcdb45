"""Resharding: brings a namespace from its shards into another number of them, while engines use it.

    begin     `meta` of the namespace names the layout that is filled, which never was before. From then on,
              once everybody has looked, what is evicted, pinned, forbidden or invalidated is so in both
    fill      its shards are filled from the present ones, again and again until little is new. Nobody reads
              them, and they count for nothing
    turn      one step: the namespace lies in them, and engines look and save there from then on
    finish    once nobody believes the old layout any more, its trash is brought over, and it is dropped

Each step is one comparison and one write of `meta`. After one that was killed the next begins anew; if it had
turned, it finishes that first. Of two at a time the later one puts its layout in the place of the other's,
which can't turn then; what that still writes lies in a layout that is nobody's.

What is saved between the last look at a shard and the turn, or by a process that has not heard of that, is a
miss later, and `fsck` finds its payload as any that the index does not know. What sessions, sketches, ghosts
and journals alone remember is not brought over: owners, what was asked for once, totals, and positions of
readers of events, who have a Gap.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from kvstore.errors import KVStoreError, NamespaceUnknown, TransientError
from kvstore.index.maintenance import Entry
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sharding.layouts import LOOK_S, split
from kvstore.index.sharding.leaf import Layout, Taken
from kvstore.index.sharding.names import new_layout, of_chain, of_segment, shard_names
from kvstore.keys import NamespaceId
from schemas.namespace import Namespace

#: Rounds of copying at most, and the part of all segments that may be new in the last.
_ROUNDS = 4
_FEW = 0.01
#: Segments, or entries, that are looked at at a time.
_PAGE = 500
_ENTRIES = 5000


@dataclass(slots=True)
class Moved:
    """Counts of what a reshard did."""

    rounds: int = 0
    #: Segments that became visible in the shards after, and entries that were written there.
    segments: int = 0
    entries: int = 0
    #: Segments whose id has another chain's tag, or none: nobody finds them, and they go by age.
    unfindable: int = 0
    #: Segments that were evicted, or replaced, after they were copied.
    withdrawn: int = 0


class Resharding:
    """One run. Raises what the index raises: run it again. Belongs to one thread."""

    def __init__(
        self,
        index: ShardedIndex,
        namespace: Namespace,
        name: NamespaceId,
        shards: int,
        *,
        expected_blocks: int,
        late_s: float,
        begin: Callable[[str, int], None] = lambda what, nbytes: None,
        advance: Callable[[int], None] = lambda nbytes: None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        """`late_s`: seconds beyond LOOK_S within which a call that goes by the old layout is over. `begin`
        and `advance` tell how far it is, in bytes of segments.
        """
        self._index = index
        self._leaf = index.leaf
        self._namespace = namespace
        self._name = name
        self._shards = shards
        self._expected_blocks = expected_blocks
        self._late_s = late_s
        self._begin = begin
        self._advance = advance
        self._wait = wait
        self.moved = Moved()

    def run(self) -> Moved:
        """Ends where the namespace lies in as many shards as it should, and nothing of it elsewhere."""
        layout = self._layout()
        if layout.left:
            layout = self._finish(layout)
        if layout.to:
            # Of one that was killed, or that finds out now that it can't turn.
            layout = self._undo(layout)
        self._index.forget_layouts(self._name)
        if layout.shards != self._shards:
            self._finish(self._fill(layout))
        return self.moved

    def _layout(self) -> Layout:
        layout = self._leaf.layout(self._name)
        if layout is None:
            raise NamespaceUnknown(f"namespace {self._name} is not registered any more")
        return layout

    def _lay(self, was: Layout, now: Layout) -> Layout:
        # An answer may have been lost, and the step be taken.
        if not self._leaf.lay_over(self._name, was, now):
            self._see_that_it_lies(now)
        return now

    def _see_that_it_lies(self, layout: Layout) -> None:
        """Raises TransientError if the namespace lies otherwise by now."""
        if self._layout() != layout:
            raise TransientError(
                f"namespace {self._name} lies otherwise by now: another process brings it into other shards, "
                "or a failover has lost what this one said; wait for that process, or run it again"
            )

    def _look_is_over(self, what: str) -> None:
        self._begin(f"wait until all processes know {what}", 0)
        self._wait(LOOK_S + self._late_s)

    # Fill

    def _fill(self, layout: Layout) -> Layout:
        """Returns how the namespace lies after the turn."""
        filling = replace(layout, to=new_layout(self._shards))
        olds, news = shard_names(self._name, layout.name), shard_names(self._name, filling.to)
        try:
            self._lay(layout, filling)
            self._look_is_over("what is filled")
            # Shards of a layout that is nobody's by now would be left.
            self._see_that_it_lies(filling)
            self._index.register_shards(
                self._name, self._namespace, filling.to, self._expected_blocks, every=True
            )
            self._index.refuse_failed(self._name, filling.to)
            self._tell_ttl(news)
            few = 0.0
            for _ in range(_ROUNDS):
                new = self._round(filling, olds, news)
                few = few or new * _FEW
                if new <= few:
                    break
            # The last look: the turn relies on all that was copied and entered until here.
            self._take_out(filling, olds, news)
            return self._lay(filling, replace(layout, name=filling.to, left=layout.name))
        except BaseException:
            # What it has filled helps nobody: who runs it again begins anew.
            with suppress(KVStoreError):
                self._undo(filling)
            raise

    def _undo(self, filling: Layout) -> Layout:
        """Returns how the namespace lies once nothing is filled any more."""
        layout = self._lay(filling, replace(filling, to=""))
        for name in shard_names(self._name, filling.to):
            self._leaf.forget(name)
        return layout

    def _tell_ttl(self, news: Sequence[NamespaceId]) -> None:
        for one in self._index.accounts():
            if one.namespace == self._name and one.ttl_s:
                for name in news:
                    self._leaf.age_out(name, one.ttl_s, delete_after_s=time.time())

    def _round(self, filling: Layout, olds: Sequence[NamespaceId], news: Sequence[NamespaceId]) -> int:
        """Copies what is there. Returns how many segments were new."""
        self._begin("copy", sum(self._leaf.usage(name).nbytes for name in olds))
        copied, unfindable = 0, 0
        # Before the entries: none is written over one that leads to a visible segment.
        self._take_out(filling, olds, news)
        for old in olds:
            for page in self._leaf.taken(old):
                self._see_that_it_lies(filling)
                unfindable += sum(
                    not one.record.depth and of_chain(news, one.first) != of_segment(news, one.segment)
                    for one in page
                )
                copied += self._copy(old, news, page)
                self._advance(sum(one.record.nbytes for one in page))
            # After the segments: one of a segment that isn't visible here is left out.
            for some in _pages(self._leaf.entries(old), _ENTRIES):
                self._see_that_it_lies(filling)
                parts = defaultdict[NamespaceId, list[Entry]](list)
                for entry in some:
                    parts[of_segment(news, entry.segment)].append(entry)
                for name, those in parts.items():
                    self.moved.entries += self._leaf.enter(name, those)
        self.moved.rounds += 1
        self.moved.segments += copied
        self.moved.unfindable = unfindable
        return copied

    def _take_out(self, filling: Layout, olds: Sequence[NamespaceId], news: Sequence[NamespaceId]) -> None:
        """Takes segments out of the new shards that are no longer visible in the old ones. A process that
        evicted or replaced one there may not have reached the new shards."""
        for new in news:
            for page in self._leaf.taken(new):
                self._see_that_it_lies(filling)
                for old, ids in split(olds, [one.segment for one in page]).items():
                    states = self._leaf.states(old, ids)
                    gone = [one for one, state in zip(ids, states, strict=True) if state != "visible"]
                    self.moved.withdrawn += self._leaf.unlist(new, gone) if gone else 0

    def _copy(self, old: NamespaceId, news: Sequence[NamespaceId], page: Sequence[Taken]) -> int:
        """Copies segments of one shard, and looks again until nothing was evicted or pinned there meanwhile.

        Race closed: whoever evicts one or pins it does so there first and in the shards after then. If that
        comes after the copy it finds it; if it came before, this finds it gone, or pinned, in the next look.
        """
        copied, changed = 0, list(page)
        while changed:
            parts = defaultdict[NamespaceId, list[Taken]](list)
            for one in changed:
                parts[of_segment(news, one.segment)].append(one)
            copied += sum(self._leaf.adopt(name, some) for name, some in parts.items())
            again = {one.segment: one for one in self._leaf.take(old, [one.segment for one in changed])}
            gone = [one.segment for one in changed if one.segment not in again]
            for name, ids in split(news, gone).items():
                self.moved.withdrawn += self._leaf.unlist(name, ids)
            changed = [
                again[one.segment]
                for one in changed
                if one.segment in again and again[one.segment].pinned != one.pinned
            ]
        return copied

    # Finish

    def _finish(self, layout: Layout) -> Layout:
        """Returns how the namespace lies once nothing is left of the layout before."""
        olds, news = shard_names(self._name, layout.left), shard_names(self._name, layout.name)
        self._look_is_over("the new number")
        self._bring_trash(olds, news)
        # Nothing is dropped on the word of a turn that a failover has lost.
        self._see_that_it_lies(layout)
        for name in olds:
            self._leaf.forget(name)
        return self._lay(layout, replace(layout, left=""))

    def _bring_trash(self, olds: Sequence[NamespaceId], news: Sequence[NamespaceId]) -> None:
        """Sees to it that what was evicted there is so here, and that its payloads are deleted: who could not
        see what was filled has told it to the shards before alone."""
        for old in olds:
            while self._leaf.drain(old, delete_after_s=time.time(), limit=_PAGE):
                pass
            for page in self._leaf.trashed(old):
                scores = dict(page)
                for name, some in split(news, list(scores)).items():
                    self._leaf.evict(name, some, delete_after_s=time.time(), rule="repair")
                    self._leaf.discard(name, [(one, scores[one]) for one in some])


def _pages(entries: Iterable[Entry], most: int) -> Iterator[list[Entry]]:
    page: list[Entry] = []
    for one in entries:
        page.append(one)
        if len(page) == most:
            yield page
            page = []
    if page:
        yield page
