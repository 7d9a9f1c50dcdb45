"""Removal: how segments, entries and namespaces leave an index."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

from kvstore.keys import NamespaceId, SegmentId
from schemas.records import EvictionRule


@dataclass(frozen=True, slots=True)
class Candidate:
    """A segment in the order of eviction, which is that of (keep_s, -depth, used_s, id), ascending.

    Depths from 2**22 - 1 on are alike.
    """

    segment: SegmentId
    nbytes: int
    #: Last use plus what its cost is worth (kvstore.index.eviction), unix s, to a quarter of a minute.
    keep_s: float
    #: Last use alone.
    used_s: float
    #: Its depth in its chain, at most 2**22 - 1.
    depth: int = 0


#: Result of `erase`: all is gone; call again; something is stored there, so nothing more was erased.
Erased = Literal["erased", "more", "in_use"]


class Removal(ABC):
    """Takes segments, entries and namespaces out of use, and then forgets them."""

    @abstractmethod
    def order(self, namespace: NamespaceId, limit: int) -> list[Candidate]:
        """Returns the first `limit` in the order of eviction. Pinned segments are not in it."""

    @abstractmethod
    def cull(
        self,
        namespace: NamespaceId,
        *,
        keep_bytes: int,
        delete_after_s: float,
        limit: int,
        rule: EvictionRule,
        spare_from_s: float | None = None,
        among: Collection[NamespaceId] = (),
    ) -> list[SegmentId]:
        """Evicts in the order of eviction until at most `keep_bytes` remain, in all or `among` its shards
        (Account.summed).

        `delete_after_s` as in Index.evict. At most `limit` per call, so that no call holds the index for
        long. Returns those evicted. Segments whose last use, to the quarter of a minute, is not before
        `spare_from_s` are passed over; a call looks at no more than 4,096.
        """

    @abstractmethod
    def reapable(
        self, namespace: NamespaceId, now_s: float | None, limit: int
    ) -> list[tuple[SegmentId, int]]:
        """Returns trashed segments whose grace time is over at `now_s`, with their number of ranks.

        None is now by the index's own clock, by which the grace time began: for those who delete.
        """

    @abstractmethod
    def reaped(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> None:
        """Forgets trashed segments whose payloads are deleted."""

    @abstractmethod
    def sweep(self, namespace: NamespaceId, limit: int) -> int:
        """Drops up to about `limit` entries that point at no visible segment; returns how many.

        Remembers where it stopped, so that repeated calls cover everything.
        """

    @abstractmethod
    def invalidate(self, namespace: NamespaceId) -> int:
        """Makes all that a namespace holds invisible in O(1); returns how many segments that were.

        Pinned ones too. Incomplete commits are refused from then on. What engines commit afterwards is
        visible as usual. `drain` puts what was there into the trash; until it is deleted, a commit of one
        of those segments is refused, as that of an evicted one is. An invalidation of what holds nothing
        visible is no event.
        """

    @abstractmethod
    def drain(self, namespace: NamespaceId, *, delete_after_s: float, limit: int) -> int:
        """Moves up to about `limit` invalidated segments into the trash; returns how many: 0 at the end."""

    @abstractmethod
    def erase(self, namespace: NamespaceId, limit: int) -> Erased:
        """Forgets a namespace that holds nothing: no segment in any state. Drops up to about `limit` entries
        per call. An engine that still uses it registers it again."""
