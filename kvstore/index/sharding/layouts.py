"""ShardedLayouts: how namespaces lie, and calls to several shards of one.

How a namespace lies is asked of the leaf, and again LOOK_S later: it may have been brought into another
number of shards, or erased and registered with one. While the leaf can't say, what it said last counts.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol, TypeVar

from kvstore.errors import CapacityExceeded, DamagedIndex, KVStoreError, TransientError
from kvstore.index.contract import check_segments
from kvstore.index.port import EngineIndex
from kvstore.index.sharding.leaf import Layout, ShardLeaf
from kvstore.index.sharding.names import ONE, layout_of, of_segment, shard_names
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
            if known is None or known.name == ONE:
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
        return Layout()

    def _remember(self, namespace: NamespaceId, layout: Layout, since: float) -> Layout:
        """Believes in a layout for LOOK_S from the moment before it was asked for."""
        if len(self._known) >= _MOST:
            self._known = {}
        self._known[namespace] = since, layout
        return layout

    def _shards(self, namespace: NamespaceId, *, may_probe: bool = True) -> tuple[NamespaceId, ...]:
        return shard_names(namespace, self._layout(namespace, may_probe=may_probe).name)

    def _in_all(self, namespace: NamespaceId, work: Callable[[Sequence[NamespaceId]], _T]) -> _T:
        """Does some work in the shards of the namespace, and then in those of the layouts that are there
        besides while a reshard is under way. Returns what the first was answered; raises the first failure,
        after all was done.

        That is how what is evicted, pinned, forbidden or invalidated is so in all of them: a reshard that
        copies what it sees looks again after that, so one of the two sees what the other did.
        """
        layout, failures = self._layout(namespace), FailedShards()
        answers = list[_T]()
        for one in (layout.name, *sorted(layout.others)):
            with failures.passed():
                answers.append(work(shard_names(namespace, one)))
            if isinstance(failures.first, CapacityExceeded):
                break  # what is too much to be pinned is pinned nowhere
        failures.end()
        return answers[0]

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
            layout = self._lay_out(name, namespace, expected_blocks)
        except TransientError:
            if known is not None and known.shards > 1:
                self._ask(shard_names(name, known.name))
            raise
        before = ONE
        while layout.name not in (ONE, before):
            self.register_shards(name, namespace, layout.name, expected_blocks)
            before, layout = layout.name, self._lay_out(name, namespace, expected_blocks)
        return name

    def _lay_out(self, name: NamespaceId, namespace: Namespace, expected_blocks: int) -> Layout:
        now = self._monotonic()
        with self._guard(name):
            found = self._laid_out(name)
            asked = found.name if found else self._lost(name) or str(self._asked)
            lies = self._leaf.lay_out(namespace, expected_blocks=expected_blocks, layout=asked)
            if found is None or found.name != lies:
                found = self._laid_out(name)
        return self._remember(name, found or Layout(lies, namespace.kind == "ec"), now)

    def _laid_out(self, name: NamespaceId) -> Layout | None:
        try:
            return self._leaf.layout(name)
        except DamagedIndex:
            return None

    def _lost(self, name: NamespaceId) -> str:
        """Returns the layout of a namespace that has lost what lays it out: of several the one whose shards
        hold most, and of those the oldest: a fresh one holds all segments before it holds their entries. ""
        if there are none. Raises what the leaf raises."""
        held, since = Counter[str](), dict[str, int]()
        for one in sorted(self._leaf.listed(name)):
            if (found := self._leaf.layout(one)) is not None:
                held[layout := layout_of(one)] += self._leaf.usage(one).segments
                since[layout] = min(found.created_s, since.get(layout, found.created_s))
        # Drawn ones are younger, also within a second.
        return max(held, key=lambda one: (held[one], -since[one], "." not in one), default="")

    def _ask(self, names: Iterable[NamespaceId]) -> None:
        failures = FailedShards()
        for name in names:
            with failures.passed(), self._guard(name):
                self._leaf.layout(name)

    def register_shards(
        self,
        name: NamespaceId,
        namespace: Namespace,
        layout: str,
        expected_blocks: int,
        *,
        every: bool = False,
    ) -> None:
        """Registers the shards of a layout, whether or not the namespace lies in them by now, with all that
        is forbidden in it. Raises if none answers, or not `every` one does, after all were asked."""
        with self._guard(name):
            forbidden = self._leaf.forbidden(name)
        shards, failures, done = shard_names(name, layout), FailedShards(), 0
        for one in shards:
            with failures.passed(), self._guard(one):
                self._forbid_as_before(one, forbidden)
                self._leaf.register_shard(one, namespace, expected_blocks=-(-expected_blocks // len(shards)))
                done += 1
        if every or not done:
            failures.end()

    def refuse_failed(self, name: NamespaceId, layout: str) -> None:
        """Tells fresh shards of a layout which writers have failed, so that they refuse their commits."""
        verdicts = self._leaf.verdicts(name)
        for writer, one in verdicts.items():
            if one.state == "failed":
                for shard in shard_names(name, layout):
                    self._leaf.judge(shard, writer, "differs", by=one.by, stands=True)

    def _forbid_as_before(self, name: NamespaceId, forbidden: Mapping[SaltId, float]) -> None:
        """Forbids in a shard, before it begins, what was forbidden before, and what it was down for.
        ShardedIndex.forbid is the other half of this: one of the two comes after the other's first step."""
        if forbidden:
            there = self._leaf.forbidden(name)
            for salt, until in forbidden.items():
                if there.get(salt, 0.0) < until:
                    self._leaf.forbid_until(name, salt, until)


def split(shards: Sequence[NamespaceId], segments: Sequence[SegmentId]) -> dict[NamespaceId, list[SegmentId]]:
    """Returns which of some segments are in which shard, in their order."""
    check_segments(segments)
    parts = defaultdict[NamespaceId, list[SegmentId]](list)
    for segment in segments:
        parts[of_segment(shards, segment)].append(segment)
    return parts
