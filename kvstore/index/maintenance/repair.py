"""Repair: checking an index against what is stored, and making good what is wrong."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from kvstore.index.maintenance.catalogue import Entry, Listing, Usage
from kvstore.keys import NamespaceId, SegmentId


@dataclass(frozen=True, slots=True)
class Reconciled:
    """What counting a namespace found. `counted` is None if it changed too fast to be counted."""

    recorded: Usage
    counted: Usage | None
    #: Visible segments that were not in the order of eviction, and are now.
    mended: int
    #: What made no sense and was put right or removed, by name.
    replaced: tuple[str, ...] = ()


class Repair(ABC):
    """What fsck and scrubbing need. An index without it can still be deleted and rebuilt."""

    @abstractmethod
    def sample(self, namespace: NamespaceId, count: int) -> list[Listing]:
        """Returns up to `count` different visible segments, drawn by chance; fewer if there are fewer."""

    @abstractmethod
    def unlist(self, namespace: NamespaceId, segments: Sequence[SegmentId]) -> int:
        """Forgets segments in whatever state, without scheduling their payloads' deletion: for a repair that
        commits them again from their payloads. Returns how many were visible."""

    @abstractmethod
    def unlink(self, namespace: NamespaceId, entries: Sequence[Entry]) -> int:
        """Drops entries that still say what is given; returns how many did."""

    @abstractmethod
    def reconcile(self, namespace: NamespaceId) -> Reconciled:
        """Counts what is there, in pages, and corrects the usage if it says otherwise. Exact: corrects only
        what did not change while it was counted, and tries a few times.

        Before that it replaces what makes no sense, so that every verb can go on; what that loses is misses.
        """
