"""ShardedVerdicts: verdicts about the writers of a namespace, which lie under its own id, in no shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.index.sharding.layouts import ShardedLayouts
from kvstore.index.verdicts import Opinion, Verdict, VerdictState
from kvstore.keys import NamespaceId, WriterId


class ShardedVerdicts(ShardedLayouts):
    """The part of ShardedIndex that keeps verdicts."""

    def verdicts(
        self, namespace: NamespaceId, writers: Sequence[WriterId] | None = None
    ) -> Mapping[WriterId, Verdict]:
        with self._guard(namespace, may_probe=False):
            return self._leaf.verdicts(namespace, writers)

    def judge(
        self,
        namespace: NamespaceId,
        writer: WriterId,
        opinion: Opinion,
        *,
        by: WriterId,
        stands: bool,
        name: str = "",
    ) -> VerdictState:
        with self._guard(namespace):
            return self._leaf.judge(namespace, writer, opinion, by=by, stands=stands, name=name)
