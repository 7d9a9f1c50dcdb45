"""ShardedIndex: an index whose namespaces may lie in several shards, over one that keeps each as a namespace.

    requests     what engines ask, and where what is
    catalogue    looks
    removal      evicts, deletes, mends
    journal      what happened
    verdicts     what is known of writers
    here         what a store has once, whatever its namespaces are made of: quotas

With one shard, which is the default, every verb is the leaf's, under the namespace's own id.

What several shards cost: order among them is as good as their clocks agree (events), or as of the moment of
the look (evictions). What is retained for sessions is bounded in each shard by its equal part, and each keeps
as long a journal as one shard would. An invalidation is an event of each shard. A call on the request's path
goes to one shard, but for those that requests.py names.
"""

from __future__ import annotations

from kvstore.index.maintenance import FullIndex
from kvstore.index.sharding.journal import ShardedJournal
from kvstore.index.sharding.leaf import ShardLeaf
from kvstore.index.sharding.removal import ShardedRemoval


class ShardedIndex(ShardedRemoval, ShardedJournal, FullIndex):
    """An index with every ability over a leaf that has them; closes the leaf."""

    @property
    def leaf(self) -> ShardLeaf:
        """What keeps the shards."""
        return self._leaf

    @property
    def unreadable(self) -> int:  # type: ignore[override]
        """How many entries the leaf has met that it could not read."""
        return self._leaf.unreadable

    def quotas(self) -> dict[str, int]:
        return self._leaf.quotas()

    def set_quota(self, scope: str, nbytes: int | None) -> None:
        self._leaf.set_quota(scope, nbytes)
