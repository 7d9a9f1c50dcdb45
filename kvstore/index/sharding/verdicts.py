"""ShardedVerdicts: verdicts about the writers of a namespace, which lie under its own id, in no shard."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from kvstore.errors import KVStoreError
from kvstore.index.sharding.layouts import ShardedLayouts
from kvstore.index.verdicts import Opinion, Verdict, VerdictState
from kvstore.keys import NamespaceId, PlaceId, WriterId

log = logging.getLogger(__name__)


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
        by: PlaceId,
        stands: bool,
        name: str = "",
    ) -> VerdictState:
        with self._guard(namespace):
            state = self._leaf.judge(namespace, writer, opinion, by=by, stands=stands, name=name)
        if state == "failed":
            # Where its commits are refused. A shard that is down now, or that a reshard makes, takes them:
            # readers don't.
            try:
                shards = [one for one in self._shards(namespace) if one != namespace]
                self._each(shards, lambda one: self._leaf.judge(one, writer, "differs", by=by, stands=True))
            except KVStoreError as exc:
                log.warning("not every shard of %s refuses writer %s: %s", namespace, writer.hex(), exc)
        return state
