"""ShardedLayouts: how namespaces lie, and calls to several shards of one.

How many shards a namespace has is asked of the leaf, and again LOOK_S later: somebody may have erased it and
registered it with another number. While the leaf can't say, what it said last counts.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Protocol, TypeVar

from kvstore.errors import DamagedIndex, KVStoreError, TransientError
from kvstore.index.contract import check_segments
from kvstore.index.near import NearRuns
from kvstore.index.port import EngineIndex
from kvstore.index.sharding.leaf import FILLS, TURNED, Layout, ShardLeaf
from kvstore.index.sharding.names import of_segment, place_of, shard_names
from kvstore.keys import NamespaceId, SaltId, SegmentId, namespace_id
from schemas.namespace import Namespace

#: Seconds for which the number of a namespace's shards is believed.
LOOK_S = 10.0
#: Namespaces of which it is remembered.
_MOST = 4096

_T = TypeVar("_T")


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


class ShardedLayouts(EngineIndex):
    """An index whose namespaces have `shards` shards if they are registered here first. Safe for threads."""

    def __init__(
        self,
        leaf: ShardLeaf,
        *,
        shards: int = 1,
        guard: Guard = unguarded,
        near: NearRuns | None = None,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """`near` remembers what matches have found; None: each asks."""
        self._leaf = leaf
        self._near = near or NearRuns(0.0)
        self._asked = shards
        self._guard = guard
        self._monotonic = monotonic
        #: Each entry is replaced as a whole: threads may look at the same time, and nothing is lost by that.
        self._known: dict[NamespaceId, tuple[float, Layout]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._leaf!r})"

    # Where

    def _layout(self, namespace: NamespaceId, *, may_probe: bool = True) -> Layout:
        now = self._monotonic()
        at, known = self._known.get(namespace, (0.0, None))
        if known is not None and now - at < LOOK_S:
            return known
        try:
            with self._guard(namespace, may_probe=may_probe):
                found = self._leaf.layout(namespace)
        except DamagedIndex:
            found = known
        except KVStoreError:
            # A single shard that can't tell this can't tell anything else either.
            if known is None or known.shards == 1:
                raise
            # Believed for as long again: not every call is to wait for a node that is down.
            found = known
        if found is None:
            # Not remembered: it may be registered any moment.
            self._known.pop(namespace, None)
            return self._unknown(namespace)
        return self._remember(namespace, found, now)

    def _unknown(self, namespace: NamespaceId) -> Layout:
        """Returns the layout of a namespace that isn't registered, or of which that can't be read. What of it
        is under its own id, or is not, the leaf says."""
        return Layout(1, items=False)

    def _remember(self, namespace: NamespaceId, layout: Layout, since: float) -> Layout:
        """Believes in a layout for LOOK_S from the moment before it was asked for."""
        if len(self._known) >= _MOST:
            self._known = {}
        self._known[namespace] = since, layout
        return layout

    def _shards(self, namespace: NamespaceId, *, may_probe: bool = True) -> tuple[NamespaceId, ...]:
        return shard_names(namespace, self._layout(namespace, may_probe=may_probe).shards)

    # Several

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
        shards: Sequence[NamespaceId],
        segments: Sequence[SegmentId],
        ask: Callable[[NamespaceId, list[SegmentId]], Sequence[_T]],
    ) -> list[_T]:
        """Asks each shard about its segments, and returns the answers in step with `segments`."""
        parts = split(shards, segments)
        answers = dict(zip(parts, self._each(parts, lambda name: iter(ask(name, parts[name]))), strict=True))
        return [next(answers[of_segment(shards, segment)]) for segment in segments]

    # Registration

    def register(self, namespace: Namespace, *, expected_blocks: int) -> NamespaceId:
        """Registers every shard that answers. Raises if none does: one that is down costs no other's hits.

        Raises as well if how the namespace lies can't be told. If it is known of before, the shards are asked
        whether they are back, which closes their breakers.

        Race closed: an `erase` that falls in between has erased some of the shards, or all. It ends with what
        lays them out, and only if nobody has done that since it began: so that is done last here as well.
        """
        name = namespace_id(namespace)
        _, known = self._known.get(name, (0.0, None))
        try:
            if self._is_moving(name):
                return name
            layout = self._lay_out(name, namespace, expected_blocks)
            sealed = bool(layout.sealed)
        except TransientError:
            if known is not None and known.shards > 1:
                self._ask(shard_names(name, known.shards))
            raise
        before = None
        while layout.shards > 1 and layout != before:
            sealed = not self.register_shards(name, namespace, layout.shards, expected_blocks)
            before, layout = layout, self._lay_out(name, namespace, expected_blocks)
        if sealed:
            with suppress(KVStoreError), self._guard(name):
                if self._leaf.leaseholder(lease_of(name)) is None:
                    self.unseal(name, layout.shards)
        return name

    def _is_moving(self, name: NamespaceId) -> bool:
        """Tells whether somebody who is about it has sealed a namespace: then there is nothing to register,
        and many ask. If nobody is about it any more, ends the seals, for which a full Redis has room.
        Raises if how the namespace lies can't be told: one call that fails is enough."""
        with self._guard(name):
            found = self._laid_out(name)
        if found is None or not found.to:
            return False
        with suppress(KVStoreError):
            one = shard_names(name, found.shards)[0]
            with self._guard(one):
                first = self._leaf.layout(one)
            if first is None or not first.sealed:
                return False
            with self._guard(name):
                if self._leaf.leaseholder(lease_of(name)) is not None:
                    return True
                self.unseal(name, found.shards)
        return False

    def _lay_out(self, name: NamespaceId, namespace: Namespace, expected_blocks: int) -> Layout:
        now = self._monotonic()
        with self._guard(name):
            found = self._laid_out(name)
            shards = self._asked if found else self._lost(name) or self._asked
            count = self._leaf.lay_out(namespace, expected_blocks=expected_blocks, shards=shards)
        sealed = found.sealed if found else ""
        return self._remember(name, Layout(count, items=namespace.kind == "ec", sealed=sealed), now)

    def _laid_out(self, name: NamespaceId) -> Layout | None:
        try:
            return self._leaf.layout(name)
        except DamagedIndex:
            return None

    def _lost(self, name: NamespaceId) -> int:
        """Returns how many shards a namespace has that has lost what lays it out: of several numbers the one
        whose shards hold most. 0 if there are none. Raises what the leaf raises.

        What a reshard fills counts for nothing until it has turned, and then what it has left does."""
        held = dict[int, tuple[bool, bool, int]]()
        for one in sorted(self._leaf.listed(name)):
            if (layout := self._leaf.layout(one)) is not None:
                shards, _ = place_of(one)
                live, unsealed, most = held.get(shards, (True, True, 0))
                held[shards] = (
                    live and not layout.role.startswith(FILLS),
                    unsealed and not layout.sealed,
                    most + self._leaf.usage(one).segments,
                )
        return max(held, key=lambda shards: (*held[shards], shards == self._asked), default=0)

    def unseal(self, name: NamespaceId, shards: int) -> None:
        """Ends the seals of whoever was bringing a namespace elsewhere and is about it no more: it can't turn
        from then on. Does nothing once it has turned."""
        known = self._leaf.layout(name)
        if known is not None and self.had_turned(name, known):
            return
        for one in shard_names(name, shards):
            layout = self._leaf.layout(one)
            if layout is not None and layout.sealed:
                self._leaf.unseal(one, layout.sealed)

    def had_turned(self, name: NamespaceId, layout: Layout) -> bool:
        """Tells whether a reshard has turned of which `meta` of the id knows no more, as after a failover."""
        if not layout.to:
            return False
        names = {*shard_names(name, layout.shards), *shard_names(name, layout.to)} - {name}
        found = (self._leaf.layout(one) for one in sorted(names))
        return any(one is not None and one.role == TURNED + layout.run for one in found)

    def _ask(self, names: Iterable[NamespaceId]) -> None:
        failures = FailedShards()
        for name in names:
            with failures.passed(), self._guard(name):
                self._leaf.layout(name)

    def register_shards(
        self,
        name: NamespaceId,
        namespace: Namespace,
        shards: int,
        expected_blocks: int,
        *,
        every: bool = False,
    ) -> bool:
        """Registers so many shards, whether or not the namespace lies in them by now, with all that is
        forbidden in it. Returns whether none of them is sealed. Raises if none answers, or not `every` one
        does, after all were asked."""
        with self._guard(name):
            forbidden = self._leaf.forbidden(name)
        failures, done, share = FailedShards(), list[bool](), -(-expected_blocks // shards)
        for one in shard_names(name, shards):
            with failures.passed(), self._guard(one):
                self._forbid_as_before(one, forbidden)
                done.append(self._leaf.register_shard(one, namespace, expected_blocks=share))
        if every or not done:
            failures.end()
        return all(done)

    def forbid_as_before(self, name: NamespaceId, shards: Iterable[NamespaceId]) -> None:
        """Forbids in shards what is forbidden in their namespace. Raises if one of them does not answer."""
        forbidden = self._leaf.forbidden(name)
        self._each(shards, lambda one: self._forbid_as_before(one, forbidden))

    def _forbid_as_before(self, name: NamespaceId, forbidden: Mapping[SaltId, float]) -> None:
        """Forbids in a shard, before it begins, what was forbidden before, and what it was down for.
        ShardedIndex.forbid is the other half of this: one of the two comes after the other's first step."""
        if forbidden:
            there = self._leaf.forbidden(name)
            for salt, until in forbidden.items():
                if there.get(salt, 0.0) < until:
                    self._leaf.forbid_until(name, salt, until)


def lease_of(namespace: NamespaceId) -> str:
    """Returns the lease that whoever brings a namespace into other shards has."""
    return f"reshard:{namespace}"


def split(shards: Sequence[NamespaceId], segments: Sequence[SegmentId]) -> dict[NamespaceId, list[SegmentId]]:
    """Returns which of some segments are in which shard, in their order."""
    check_segments(segments)
    parts = defaultdict[NamespaceId, list[SegmentId]](list)
    for segment in segments:
        parts[of_segment(shards, segment)].append(segment)
    return parts
