"""ShardLeaf: an index that can keep a namespace in several shards, for ShardedIndex to put together."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from kvstore.index.maintenance import FullIndex
from kvstore.keys import NamespaceId, SaltId
from schemas.namespace import Namespace


@dataclass(frozen=True, slots=True)
class Layout:
    """How a namespace lies in the index."""

    shards: int
    #: Whether it holds encoder items, each a chain of its own.
    items: bool


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
