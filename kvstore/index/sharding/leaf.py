"""ShardLeaf: an index that can keep a namespace in several shards, for ShardedIndex to put together."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from kvstore.index.maintenance import Entry, FullIndex
from kvstore.keys import NamespaceId, SaltId, SegmentId
from schemas.namespace import Namespace
from schemas.records import SegmentRecord

#: The steps of a reshard (kvstore.index.sharding.resharding); they stand in lua/reshard.lua.
Step = Literal["begin", "turn", "end", "undo", "disarm", "fill", "ttl", "seal", "unseal", "turned", "aside"]
#: What the role of a shard begins with that a run fills, and of one that a run has turned to, or from.
FILLS, TURNED = "fills ", "turned "
#: Segments or entries of a shard that nobody uses that one call drops.
_STEP = 256


@dataclass(frozen=True, slots=True)
class Layout:
    """How a namespace lies in the index."""

    shards: int
    #: Whether it holds encoder items, each a chain of its own.
    items: bool
    #: The number that a reshard fills, or that it has left and not dropped yet; 0: none.
    to: int = 0
    left: int = 0
    #: The run of a reshard that alone may turn, or that has turned; "": none.
    run: str = ""
    #: The run that has sealed a shard, which takes no changes then; "": it isn't sealed.
    sealed: str = ""
    #: What a shard is to a run: FILLS or TURNED, and the run; "": nothing.
    role: str = ""

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
    def register_shard(self, name: NamespaceId, namespace: Namespace, *, expected_blocks: int) -> bool:
        """Registers a shard of a namespace that was laid out; `expected_blocks` are the shard's. False if it
        is sealed, and stays so."""

    def unseal(self, name: NamespaceId, run: str) -> None:
        """Ends the seal of a run that is about it no more, and sees to it that it can't turn. Does nothing if
        it has turned. (An index that seals nothing has nothing to do.)"""

    def forget(self, name: NamespaceId, role: str) -> None:
        """Drops a shard that nobody uses, whatever it holds, unless it has another role by now."""
        self.invalidate(name)
        while self.drain(name, delete_after_s=0, limit=_STEP):
            pass
        while due := self.reapable(name, None, _STEP):
            self.reaped(name, [segment for segment, _ in due])
        while self.erase(name, _STEP) == "more":
            pass


class MovableLeaf(ShardLeaf):
    """A leaf that can move what is in shards into others (kvstore.index.sharding.resharding).

    `run` is the token of who does it. What fills a shard raises TransientError if another run does by now.
    """

    @abstractmethod
    def reshard(
        self,
        name: NamespaceId,
        step: Step,
        *,
        run: str = "",
        before: int = 0,
        after: int = 0,
        told: str | int = "",
    ) -> bool:
        """Takes one step; False if the namespace, or the shard, is otherwise than it says.

        `begin` is told for how many blocks a single shard is to be, `ttl` seconds, `fill` and `aside` a role.
        """

    @abstractmethod
    def taken(self, name: NamespaceId) -> Iterator[list[Taken]]:
        """Yields what is visible in a shard, in pages, which may be empty. Weakly consistent, as `segments`
        is: exact while the shard is sealed."""

    @abstractmethod
    def adopt(self, name: NamespaceId, segments: Sequence[Taken], run: str) -> int:
        """Makes segments of other shards visible, with their places in the order of eviction, pins and heat.
        Returns how many. What is visible gets the place that it has by now."""

    @abstractmethod
    def withdraw(self, name: NamespaceId, segments: Sequence[SegmentId], run: str) -> int:
        """Makes segments unknown. Returns how many were visible."""

    @abstractmethod
    def enter(self, name: NamespaceId, entries: Sequence[Entry], run: str) -> int:
        """Writes entries of visible segments. One that leads to a visible segment is not overwritten. Returns
        how many."""

    @abstractmethod
    def trashed(self, name: NamespaceId) -> Iterator[list[tuple[SegmentId, float]]]:
        """Yields the trash, in pages, with what `discard` takes."""

    @abstractmethod
    def discard(self, name: NamespaceId, segments: Sequence[tuple[SegmentId, float]], run: str) -> int:
        """Takes over what another shard has in its trash. Returns how many were not there."""

    @abstractmethod
    def drop_aside(self, name: NamespaceId, limit: int) -> bool:
        """Drops up to about `limit` entries of what was put aside or sealed, and all else at last, whatever
        it holds; nothing if it isn't. True if there is more."""
