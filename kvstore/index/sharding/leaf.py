"""ShardLeaf: an index that can keep a namespace in several shards, for ShardedIndex to put together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.index.maintenance import Entry, FullIndex
from kvstore.index.sharding.names import ONE, shards_in
from kvstore.keys import NamespaceId, SaltId, SegmentId
from schemas.namespace import Namespace
from schemas.records import SegmentRecord


@dataclass(frozen=True, slots=True)
class Layout:
    """How a namespace lies in the index; names of layouts as in kvstore.index.sharding.names."""

    name: str = ONE
    #: Whether it holds encoder items, each a chain of its own.
    items: bool = False
    #: The layout that a reshard fills, or that it has left and not dropped yet; "": none.
    to: str = ""
    left: str = ""
    #: When it was registered, unix seconds; 0: not known.
    created_s: int = field(default=0, compare=False)

    @property
    def shards(self) -> int:
        """In how many shards it lies."""
        return shards_in(self.name)

    @property
    def others(self) -> set[str]:
        """The layouts that are there besides: what leaves this one, or is pinned, leaves all of them."""
        return {self.to, self.left} - {""}


@dataclass(frozen=True, slots=True)
class Taken:
    """A segment as one shard gives it, for another to adopt."""

    segment: SegmentId
    record: SegmentRecord
    pinned: bool
    #: Its first digest.
    first: bytes
    #: What only the leaf understands: the record as it is stored, its place in the order of eviction, heat,
    #: until when it is retained.
    kept: tuple[bytes, ...]


class LaidOut(FullIndex):
    """Says how namespaces lie. Takes the name of a shard (kvstore.index.sharding.names) wherever its verbs
    take a namespace's id.

    Of a namespace in any layout but ONE nothing is stored under the id itself, but for what is forbidden
    there (Salts.forbid), and what a reshard has left there.
    """

    @abstractmethod
    def layout(self, namespace: NamespaceId) -> Layout | None:
        """Returns how a namespace lies; None for an unknown one."""

    @abstractmethod
    def lay_out(self, namespace: Namespace, *, expected_blocks: int, layout: str) -> str:
        """Registers a namespace as Index.register does, but no shard in any layout but ONE. Returns how it
        lies: as its first registration asked for, or a reshard has left it. Ends what `begin_erasing` began.
        """

    @abstractmethod
    def lay_over(self, namespace: NamespaceId, was: Layout, now: Layout) -> bool:
        """Says that a namespace lies otherwise from now on; False if it doesn't lie as it `was`."""

    @abstractmethod
    def listed(self, namespace: NamespaceId) -> set[NamespaceId]:
        """Returns the names of its shards, of whatever layout, without a look at any of them."""

    @abstractmethod
    def is_in_use(self, name: NamespaceId) -> bool:
        """Tells whether there is a segment in any state: what Removal.erase leaves alone."""

    @abstractmethod
    def begin_erasing(self, namespace: NamespaceId) -> None:
        """Begins to erase a namespace that lies in shards; does nothing to any other. `erase` of its id,
        which comes after that of the shards, then drops what lays it out; if that was laid out again in
        between, or this was not called, it is "in_use"."""

    @abstractmethod
    def forbid_until(self, name: NamespaceId, salt: SaltId, until_s: float) -> None:
        """Forbids as Salts.forbid does, but what was created until a given time (unix seconds)."""

    @abstractmethod
    def register_shard(self, name: NamespaceId, namespace: Namespace, *, expected_blocks: int) -> None:
        """Registers a shard of a namespace that was laid out; `expected_blocks` are the shard's."""


class ShardLeaf(LaidOut):
    """Copies what is in one shard into another, and drops it."""

    @abstractmethod
    def forget(self, name: NamespaceId) -> None:
        """Drops a shard of a layout that is nobody's any more, whatever it holds. Of an id it drops what was
        left there, and nothing if the namespace lies there."""

    @abstractmethod
    def taken(self, name: NamespaceId) -> Iterator[list[Taken]]:
        """Yields what is visible in a shard, in pages, which may be empty. Weakly consistent, as `segments`
        is."""

    @abstractmethod
    def take(self, name: NamespaceId, segments: Sequence[SegmentId]) -> list[Taken]:
        """Returns those that are visible."""

    @abstractmethod
    def adopt(self, name: NamespaceId, segments: Sequence[Taken]) -> int:
        """Makes segments of other shards visible, with their places in the order of eviction, pins, heat and
        retention. Returns how many. What is visible gets the place that it has by now."""

    @abstractmethod
    def enter(self, name: NamespaceId, entries: Sequence[Entry]) -> int:
        """Writes entries of visible segments. One that leads to a visible segment is not overwritten. Returns
        how many."""

    @abstractmethod
    def trashed(self, name: NamespaceId) -> Iterator[list[tuple[SegmentId, float]]]:
        """Yields the trash, in pages, with what `discard` takes."""

    @abstractmethod
    def discard(self, name: NamespaceId, segments: Sequence[tuple[SegmentId, float]]) -> None:
        """Takes over what another shard has in its trash, and this one has not. What is visible here
        is not: it was stored again."""
