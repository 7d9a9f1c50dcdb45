"""BreakingIndex: an index behind a circuit breaker."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvstore.breaker import Breaker
from kvstore.index.port import Claim, CommitState, EngineIndex, Outcome, Replaced, Run
from kvstore.index.sessions import NOTHING_RETAINED, USE, Allowance, Hint, HintEffect
from kvstore.index.verdicts import Opinion, Verdict, VerdictState
from kvstore.keys import NO_SESSION, NamespaceId, PlaceId, SegmentId, SessionId, WriterId
from schemas.namespace import Namespace
from schemas.records import EvictionRule, SegmentRecord


class BreakingIndex(EngineIndex):
    """Passes every call on, or raises BreakerOpen at once while the breaker is open.

    A match is never the probe, because a request waits for it. A caller that wants to know whether the index
    is back sends register.
    """

    def __init__(self, inner: EngineIndex, breaker: Breaker) -> None:
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

    def find(self, namespace: NamespaceId, digests: bytes, chain: bytes = b"") -> list[Run | None]:
        with self._breaker.guard():
            return self._inner.find(namespace, digests, chain)

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
        session: SessionId = NO_SESSION,
        allowance: Allowance = NOTHING_RETAINED,
        replaces: Sequence[Replaced] = (),
    ) -> CommitState:
        with self._breaker.guard():
            return self._inner.commit(
                namespace,
                segment,
                digests,
                record,
                rank=rank,
                ranks=ranks,
                session=session,
                allowance=allowance,
                replaces=replaces,
            )

    def touch(
        self, namespace: NamespaceId, segments: Sequence[SegmentId], used_s: float | None = None
    ) -> None:
        with self._breaker.guard():
            self._inner.touch(namespace, segments, used_s)

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

    def sketch_bits(self, namespace: NamespaceId, *, now_s: float, window_s: float, sketch_bytes: int) -> int:
        with self._breaker.guard():
            return self._inner.sketch_bits(
                namespace, now_s=now_s, window_s=window_s, sketch_bytes=sketch_bytes
            )

    def tell(self, namespace: NamespaceId, outcomes: Sequence[Outcome]) -> None:
        with self._breaker.guard():
            self._inner.tell(namespace, outcomes)

    def session(
        self,
        namespace: NamespaceId,
        session: SessionId,
        segments: Sequence[SegmentId],
        used_s: float | None = None,
        hint: Hint = USE,
        *,
        allowance: Allowance = NOTHING_RETAINED,
    ) -> HintEffect:
        with self._breaker.guard():
            return self._inner.session(namespace, session, segments, used_s, hint, allowance=allowance)

    def owned(self, namespace: NamespaceId, session: SessionId) -> dict[SegmentId, SegmentRecord]:
        with self._breaker.guard():
            return self._inner.owned(namespace, session)

    def verdicts(
        self, namespace: NamespaceId, writers: Sequence[WriterId] | None = None
    ) -> Mapping[WriterId, Verdict]:
        with self._breaker.guard(may_probe=False):
            return self._inner.verdicts(namespace, writers)

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
        with self._breaker.guard():
            return self._inner.judge(namespace, writer, opinion, by=by, stands=stands, name=name)

    def close(self) -> None:
        self._inner.close()
