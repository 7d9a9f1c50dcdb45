"""Resharding: brings a namespace from its shards into another number of them, while engines use it.

    fill      the shards after are filled from those before, again and again until little is new. Nobody
              reads them, they count for nothing.
    seal      the shards before take no changes any more: nothing is saved in the namespace, evicted or
              pinned; matches and loads go on. The shards after are held against them once more, which is
              exact now: the same is visible, and the same is in the trash.
    turn      one script: the namespace lies in the shards after, and engines save there.
    finish    once nobody believes the old number any more, the shards before are dropped.

The namespace's `meta` tells which of these it is, so whoever comes after one who was killed goes on. Each run
has a token, which `begin` writes into `meta` and into what it fills and seals. Of two at a time only the one
that began later changes anything, and turns; and whoever ends a seal disarms its run first. So what turns
was compared under seals that nobody has broken.

What only sessions, sketches, ghosts and journals remember is not brought over: owners and what is retained,
what was asked for once, totals, and the positions of readers of events, who have a Gap. Last uses of the time
in which the namespace is sealed are lost.
"""

from __future__ import annotations

import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvstore.errors import KVStoreError, NamespaceUnknown, TransientError
from kvstore.index.contract import is_forbidden
from kvstore.index.maintenance import Entry, Listing
from kvstore.index.sharding.index import ShardedIndex
from kvstore.index.sharding.layouts import LOOK_S, split
from kvstore.index.sharding.leaf import FILLS, Layout, MovableLeaf, Step, Taken
from kvstore.index.sharding.names import of_chain, of_segment, shard_names
from kvstore.keys import NamespaceId, SaltId, SegmentId
from kvstore.rules.units import batches
from schemas.namespace import Namespace

#: Rounds of copying at most before the seal, and the part of all segments that may be new in the last.
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
    #: Segments that were copied and then evicted before.
    withdrawn: int = 0
    #: For how long nothing could be saved.
    sealed_s: float = 0.0


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
        late_s: float,
        hold: Callable[[], None] = lambda: None,
        begin: Callable[[str, int], None] = lambda what, nbytes: None,
        advance: Callable[[int], None] = lambda nbytes: None,
        wait: Callable[[float], None] = time.sleep,
    ) -> None:
        """`late_s`: seconds beyond LOOK_S within which a call that goes by the old number is over. `hold` is
        called before each page, and raises if somebody else has begun. `begin` and `advance` tell how far it
        is, in bytes of segments.
        """
        self._index = index
        self._leaf = leaf
        self._namespace = namespace
        self._name = name
        self._shards = shards
        self._expected_blocks = expected_blocks
        self._late_s = late_s
        self._hold = hold
        self._begin = begin
        self._advance = advance
        self._wait = wait
        self._run = uuid.uuid4().hex
        #: A run of which it is known that it has turned.
        self._turned = ""
        #: How many segments the last round has found in the shards before.
        self._seen = 0
        self.moved = Moved()

    def run(self) -> Moved:
        """Ends where the namespace lies in as many shards as it should, and nothing of it elsewhere."""
        while True:
            layout = self._layout()
            if layout.left:
                self._finish(layout)
            elif layout.to and self._had_turned(layout):
                self._turn_again(layout)
            elif layout.to and layout.to != self._shards:
                self._undo(layout)
            elif layout.shards != self._shards:
                self._fill(layout)
            else:
                self._index.unseal(self._name, layout.shards)
                return self.moved

    def _layout(self) -> Layout:
        layout = self._leaf.layout(self._name)
        if layout is None:
            raise NamespaceUnknown(f"namespace {self._name} is not registered any more")
        return layout

    def _step(self, step: Step, before: int, after: int, run: str = "") -> None:
        self._must(self._leaf.reshard(self._name, step, run=run or self._run, before=before, after=after))

    def _must(self, taken: bool) -> None:
        if not taken:
            raise TransientError(
                f"namespace {self._name} lies otherwise by now, or somebody else brings it into other "
                "shards, or this was held up until engines went on without it; run it again"
            )

    def _roles(self, names: Iterable[NamespaceId]) -> dict[NamespaceId, Layout]:
        """Returns those shards that are there. Under the namespace's own id lies more than a shard."""
        found = {one: self._leaf.layout(one) for one in names}
        return {one: layout for one, layout in found.items() if layout is not None}

    # Fill

    def _fill(self, layout: Layout) -> None:
        name, before, after = self._name, layout.shards, self._shards
        olds, news = shard_names(name, before), shard_names(name, after)
        roles = self._roles(news)
        self._must(len(self._roles(olds)) == before)
        self._must(self._take_over(before, after))
        self._make_ready(news, roles, before)
        few = 0.0
        for _ in range(_ROUNDS):
            new = self._round(olds, news)
            few = few or new * _FEW
            if new <= few:
                break
        try:
            self._turn(olds, news, before)
        except BaseException:
            # Else nothing could be saved until somebody goes on, or an engine sees that nobody is about it.
            # Of its own alone: another run may have begun by now.
            for one in olds:
                with suppress(KVStoreError):
                    self._leaf.unseal(one, self._run)
            raise

    def _take_over(self, before: int, after: int) -> bool:
        told = self._expected_blocks
        return self._leaf.reshard(self._name, "begin", run=self._run, before=before, after=after, told=told)

    def _make_ready(
        self, news: Sequence[NamespaceId], roles: Mapping[NamespaceId, Layout], before: int
    ) -> None:
        """Registers the shards after, and makes them this run's. What an earlier one has filled stays; what
        else is there, or was going to be dropped, nobody uses."""
        for one, layout in roles.items():
            if layout.sealed or (one != self._name and not layout.role.startswith(FILLS)):
                self._drop(one, self._role(one, layout))
        if len(news) == 1:
            # Which makes it, where it was just dropped.
            self._must(self._take_over(before, 1))
            return
        self._register(len(news))
        for one in news:
            found = roles.get(one)
            role = found.role if found and not found.sealed and found.role.startswith(FILLS) else ""
            self._must(self._leaf.reshard(one, "fill", run=self._run, told=role))

    def _role(self, one: NamespaceId, layout: Layout) -> str:
        """Returns the role of a shard after this run has begun."""
        return FILLS + self._run if one == self._name else layout.role

    def _drop(self, name: NamespaceId, role: str) -> None:
        """Drops a shard that has this role still."""
        if self._leaf.reshard(name, "aside", told=role):
            while self._leaf.drop_aside(name, _ENTRIES):
                self._hold()

    def _turn(self, olds: Sequence[NamespaceId], news: Sequence[NamespaceId], before: int) -> None:
        since = time.monotonic()
        for one in olds:
            self._hold()
            self._must(self._leaf.reshard(one, "seal", run=self._run))
        if len(news) > 1:
            # With what was forbidden meanwhile.
            self._register(len(news))
        self._round(olds, news)
        self._bring_trash(olds, news)
        self._hold()
        self._look_again(olds, news)
        self._step("turn", before, len(news))
        self._turned = self._run
        self.moved.sealed_s = time.monotonic() - since

    def _register(self, shards: int) -> None:
        self._index.register_shards(self._name, self._namespace, shards, self._expected_blocks, every=True)

    def _look_again(self, olds: Sequence[NamespaceId], news: Sequence[NamespaceId]) -> None:
        """Sees that no node has lost what it was told, as by a failover to one that had not heard of it."""
        sealed, filled = self._roles(olds), self._roles(news)
        self._must(all(one in sealed and sealed[one].sealed == self._run for one in olds))
        self._must(all(one in filled and filled[one].role == FILLS + self._run for one in news))
        there = sum(self._leaf.usage(one).segments for one in news)
        # Of these two the first may be damaged, and the second tell of some twice.
        self._must(there in (sum(self._leaf.usage(one).segments for one in olds), self._seen))

    def _round(self, olds: Sequence[NamespaceId], news: Sequence[NamespaceId]) -> int:
        """Makes the shards after what those before are. Returns how many segments were new.

        Entries come last: one that leads to a visible segment is not overwritten, so what is not visible
        before must be gone by then.
        """
        self._begin("copy", sum(self._leaf.usage(name).nbytes for name in olds))
        self._tell_lives(news)
        copied, unfindable, self._seen = 0, 0, 0
        for page in self._pages(olds):
            self._seen += len(page)
            parts = defaultdict[NamespaceId, list[Taken]](list)
            for one in page:
                name = of_segment(news, one.segment)
                parts[name].append(one)
                unfindable += not one.record.depth and of_chain(news, one.first) != name
            for name, some in parts.items():
                copied += self._leaf.adopt(name, some, self._run)
            self._advance(sum(one.record.nbytes for one in page))
        for page in self._pages(news):
            segments = [one.segment for one in page]
            kept = set(self._visible(olds, segments))
            for name, gone in split(news, [one for one in segments if one not in kept]).items():
                self.moved.withdrawn += self._leaf.withdraw(name, gone, self._run)
        self._enter(olds, news)
        self.moved.rounds += 1
        self.moved.segments += copied
        self.moved.unfindable = unfindable
        return copied

    def _tell_lives(self, news: Sequence[NamespaceId]) -> None:
        lives = [one.ttl_s for one in self._index.accounts() if one.namespace == self._name]
        self._must(len(lives) == 1)
        for name in news:
            self._leaf.reshard(name, "ttl", told=lives[0])

    def _pages(self, names: Iterable[NamespaceId]) -> Iterator[list[Taken]]:
        for name in names:
            for page in self._leaf.taken(name):
                self._hold()
                yield page

    def _visible(self, names: Sequence[NamespaceId], segments: Sequence[SegmentId]) -> Iterator[SegmentId]:
        for name, some in split(names, segments).items():
            states = self._leaf.states(name, some)
            yield from (one for one, state in zip(some, states, strict=True) if state == "visible")

    def _enter(self, olds: Sequence[NamespaceId], news: Sequence[NamespaceId]) -> None:
        for old in olds:
            for some in _pages(self._leaf.entries(old), _ENTRIES):
                self._hold()
                parts = defaultdict[NamespaceId, list[Entry]](list)
                for one in some:
                    parts[of_segment(news, one.segment)].append(one)
                for name, those in parts.items():
                    self.moved.entries += self._leaf.enter(name, those, self._run)

    def _bring_trash(self, olds: Sequence[NamespaceId], news: Sequence[NamespaceId]) -> None:
        for old in olds:
            # Nothing is invalidated any more. What others drain lies in the same trash.
            while self._leaf.drain(old, delete_after_s=time.time(), limit=_PAGE):
                self._hold()
            for page in self._leaf.trashed(old):
                self._hold()
                scores = dict(page)
                for name, some in split(news, list(scores)).items():
                    self._leaf.discard(name, [(one, scores[one]) for one in some], self._run)

    # Undo, or do again

    def _undo(self, layout: Layout) -> None:
        """Drops what was filled for another number."""
        self._hold()
        roles = self._roles(shard_names(self._name, layout.to))
        self._must(self._take_over(layout.shards, layout.to))
        for one, found in roles.items():
            self._drop(one, self._role(one, found))
        self._index.unseal(self._name, layout.shards)
        self._step("undo", layout.shards, layout.to)

    def _had_turned(self, layout: Layout) -> bool:
        known = layout.run != "" and layout.run == self._turned
        return known or self._index.had_turned(self._name, layout)

    def _turn_again(self, layout: Layout) -> None:
        """After a failover to a server that had not heard of the turn. Nothing is compared: what lies in the
        shards after is the truth since then."""
        if layout.shards == 1:
            # It may not have heard of the seal either.
            self._must(self._leaf.reshard(self._name, "seal", run=layout.run))
        self._step("turn", layout.shards, layout.to, layout.run)

    # Finish

    def _finish(self, layout: Layout) -> None:
        name, before, after = self._name, layout.left, layout.shards
        olds, news = shard_names(name, before), shard_names(name, after)
        turned, self._turned = time.monotonic(), layout.run
        noted = {one: self._leaf.reshard(one, "turned", run=layout.run) for one in {*olds, *news} - {name}}
        lost = [one for one in news if not noted.get(one, True)]
        if lost and layout.run == self._run:
            raise TransientError(
                f"shard {lost[0]} of namespace {name} has lost what was brought there, and nothing that was "
                "left is dropped: bring its node back as it was; or run it again, which drops that, and then "
                "`cache-admin rebuild`"
            )
        if after > 1:
            # What was forbidden while there were two layouts.
            self._index.forbid_as_before(name, news)
        self._evict_forbidden(news)
        self._begin("wait for processes that know the old number", 0)
        self._wait(max(0.0, turned + LOOK_S + self._late_s - time.monotonic()))
        self._hold()
        roles = self._roles(olds)
        # Nothing is dropped on the word of a turn that was lost again: then it turns once more.
        if self._has_turned(layout):
            for one, found in roles.items():
                self._drop(one, found.role)
            if not self._leaf.reshard(name, "end", before=before, after=after):
                self._must(not self._has_turned(layout))

    def _has_turned(self, layout: Layout) -> bool:
        """Tells whether a namespace still lies as after a turn; False if that was lost. Raises if somebody
        has gone on with it."""
        now = self._layout()
        if (now.shards, now.left, now.run) == (layout.shards, layout.left, layout.run):
            return True
        self._must(now.to == layout.shards and now.run == layout.run)
        return False

    def _evict_forbidden(self, news: Sequence[NamespaceId]) -> None:
        """Whoever erased meanwhile was refused where the namespace was sealed, or looked where it lay."""
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
