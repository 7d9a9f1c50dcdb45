"""Commits a segment again from its payloads, even if the index has lost its namespace."""

from __future__ import annotations

from kvstore.admin.backends import Cache
from kvstore.index.port import CommitState
from kvstore.keys import SegmentId
from kvstore.rules.segments import typical_block_bytes
from kvstore.verify.headers import namespace_of
from kvstore.verify.returning import Returns
from kvstore.verify.segments import Whole, commit_whole


def recommit(cache: Cache, segment: SegmentId, whole: Whole, returns: Returns, now_s: float) -> CommitState:
    """Commits every rank as `commit_whole` does; a namespace that the index has lost is registered.

    Raises CorruptPayload for a namespace that this version can't parse, and what the backends raise.
    """
    namespace = namespace_of(whole.headers[0])
    index, settings = cache.made_index(), cache.settings
    blocks = max(1, settings.capacity_bytes // typical_block_bytes(namespace))
    return commit_whole(
        index,
        cache.payloads,
        segment,
        whole,
        returns=returns,
        register=lambda: index.register(namespace, expected_blocks=blocks),
        delete_after_s=now_s + settings.grace_s,
    )
