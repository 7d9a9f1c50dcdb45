"""BreakingIndex: an index behind a circuit breaker."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.breaker import Breaker
from kvstore.keys import NamespaceId, SegmentId
from kvstore.ports import Claim, CommitState, Index, Outcome, Run
from schemas.namespace import Namespace
from schemas.records import EvictionRule, SegmentRecord


class BreakingIndex(Index):
    """Passes every call on, or raises BreakerOpen at once while the breaker is open.

    A match never is the probe, because a request waits for it; register is what a caller sends to
    find out.
    """

    def __init__(self, inner: Index, breaker: Breaker) -> None:
        self._inner = inner
        self._breaker = breaker

    def __repr__(self) -> str:
        return f"BreakingIndex({self._inner!r})"

    def register(self, namespace: Namespace, *, expected_blocks: int) -> NamespaceId:
        with self._breaker.guard():
            return self._inner.register(namespace, expected_blocks=expected_blocks)

    def match(self, namespace: NamespaceId, digests: bytes) -> list[Run]:
        with self._breaker.guard(may_probe=False):
            return self._inner.match(namespace, digests)

    def find(self, namespace: NamespaceId, digests: bytes) -> list[Run | None]:
        with self._breaker.guard():
            return self._inner.find(namespace, digests)

    def claim(self, namespace: NamespaceId, digests: bytes, segment: SegmentId, ttl_s: float) -> Claim:
        with self._breaker.guard():
            return self._inner.claim(namespace, digests, segment, ttl_s)

    def commit(
        self,
        namespace: NamespaceId,
        segment: SegmentId,
        digests: bytes,
        record: SegmentRecord,
        *,
        rank: int,
        ranks: int,
    ) -> CommitState:
        with self._breaker.guard():
            return self._inner.commit(namespace, segment, digests, record, rank=rank, ranks=ranks)

    def touch(self, namespace: NamespaceId, segments: Sequence[SegmentId], now_s: float) -> None:
        with self._breaker.guard():
            self._inner.touch(namespace, segments, now_s)

    def evict(
        self,
        namespace: NamespaceId,
        segments: Sequence[SegmentId],
        *,
        delete_after_s: float,
        rule: EvictionRule,
    ) -> int:
        with self._breaker.guard():
            return self._inner.evict(namespace, segments, delete_after_s=delete_after_s, rule=rule)

    def note(
        self, namespace: NamespaceId, digests: bytes, *, now_s: float, window_s: float, sketch_bytes: int
    ) -> int:
        with self._breaker.guard():
            return self._inner.note(
                namespace, digests, now_s=now_s, window_s=window_s, sketch_bytes=sketch_bytes
            )

    def tell(self, namespace: NamespaceId, outcomes: Sequence[Outcome]) -> None:
        with self._breaker.guard():
            self._inner.tell(namespace, outcomes)

    def close(self) -> None:
        self._inner.close()
