"""ShardLeaf: an index that can keep a namespace in several shards, for ShardedIndex to put together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvstore.index.maintenance import Entry, FullIndex
from kvstore.keys import NamespaceId, SaltId, SegmentId
from schemas.namespace import Namespace
from schemas.records import SegmentRecord

#: The steps of a reshard (kvstore.index.sharding.resharding), in their order, and what undoes the first.
Step = Literal["begin", "ttl", "turn", "seal", "end", "undo"]


@dataclass(frozen=True, slots=True)
class Layout:
    """How a namespace lies in the index."""

    shards: int
    #: Whether it holds encoder items, each a chain of its own.
    items: bool
    #: The number that a reshard fills, or that it has left and not dropped yet; 0: none.
    to: int = 0
    left: int = 0

    @property
    def others(self) -> set[int]:
        """The numbers of shards that are not the namespace's, and not to be dropped."""
        return {self.to, self.left} - {0}


@dataclass(frozen=True, slots=True)
class Taken:
    """A segment as one shard gives it, for another to adopt."""

    segment: SegmentId
    record: SegmentRecord
    #: Its first digest.
    first: bytes
    #: What only the leaf understands: the record as it is stored, its place in the order of eviction, heat.
    kept: tuple[bytes, ...]


class ShardLeaf(FullIndex):
    """Takes the name of a shard (kvstore.index.sharding.names) wherever its verbs take a namespace's id.

    With more than one shard nothing is stored under the id itself, but for what is forbidden there
    (Salts.forbid).
    """

    @abstractmethod
    def layout(self, namespace: NamespaceId) -> Layout | None:
        """Returns how a namespace lies; None for an unknown one."""

    @abstractmethod
    def lay_out(self, namespace: Namespace, *, expected_blocks: int, shards: int) -> int:
        """Registers a namespace as Index.register does, but no shard if it has several. Returns how many it
        has: as many as its first registration asked for. Ends what `begin_erasing` began."""

    @abstractmethod
    def listed(self, namespace: NamespaceId) -> set[NamespaceId]:
        """Returns the names of its shards, of whatever number, without a look at any of them."""

    @abstractmethod
    def is_in_use(self, name: NamespaceId) -> bool:
        """Tells whether there is a segment in any state: what Removal.erase leaves alone."""

    @abstractmethod
    def begin_erasing(self, namespace: NamespaceId) -> None:
        """Begins to erase a namespace that lies in several shards; does nothing to any other. `erase` of its
        id, which comes after that of the shards, then drops what lays it out; if that was laid out again in
        between, or this was not called, it is "in_use"."""

    @abstractmethod
    def forbid_until(self, name: NamespaceId, salt: SaltId, until_s: float) -> None:
        """Forbids as Salts.forbid does, but what was created until a given time (unix seconds)."""

    @abstractmethod
    def register_shard(self, name: NamespaceId, namespace: Namespace, *, expected_blocks: int) -> None:
        """Registers a shard of a namespace that was laid out; `expected_blocks` are the shard's."""


class MovableLeaf(ShardLeaf):
    """A leaf that can move what is in shards into others (kvstore.index.sharding.resharding)."""

    @abstractmethod
    def reshard(
        self,
        name: NamespaceId,
        step: Step,
        before: int,
        after: int,
        *,
        expected_blocks: int = 0,
        ttl_s: int = 0,
    ) -> bool:
        """Takes one step; False if the namespace lies otherwise than it says. `seal` and `ttl` are of a
        shard, the others of the id. `expected_blocks` is for `begin`, which may make a single shard."""

    @abstractmethod
    def taken(self, name: NamespaceId) -> Iterator[list[Taken]]:
        """Yields what is visible in a shard, in pages, which may be empty. Weakly consistent, as `segments`
        is."""

    @abstractmethod
    def adopt(self, name: NamespaceId, segments: Sequence[Taken], *, building: bool) -> int:
        """Makes segments of other shards visible, with their places in the order of eviction, pins and heat.
        Returns how many. What is known in any state, or forbidden, stays as it is, except that while the
        shard is `building` a segment gets the place that it has by now. Raises NamespaceUnknown."""

    @abstractmethod
    def enter(self, name: NamespaceId, entries: Sequence[Entry], *, visible: bool) -> int:
        """Writes entries, only those of visible segments if `visible`. One that leads to a visible segment is
        not overwritten. Returns how many. Raises NamespaceUnknown."""

    @abstractmethod
    def discarded(self, name: NamespaceId, limit: int) -> dict[SegmentId, float]:
        """Returns some of the trash, with what `discard` takes."""

    @abstractmethod
    def discard(self, name: NamespaceId, segments: Mapping[SegmentId, float]) -> int:
        """Takes over what another shard has in its trash, and evicts what of it is visible. Returns how many
        were."""

    @abstractmethod
    def drop_aside(self, name: NamespaceId, limit: int) -> bool:
        """Drops up to about `limit` entries of what a reshard has put aside, and all else at last, whatever
        it holds; nothing if nothing lies aside. True if there is more."""
