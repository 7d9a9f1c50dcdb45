"""Journal: what an index remembers of what happened."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from kvstore.index.port import Outcome, OutcomeSink
from kvstore.keys import NO_SESSION, Digest, NamespaceId, SegmentId, SessionId
from schemas.records import EvictionRule

#: What sessions had to do with a segment that a quota evicted (kvstore.index.sessions). `ended`: the session
#: that alone had used it had ended. `retained`: it still was, and went because all else had gone. `expired`:
#: it, or all that its session used, was to be retained until a time that was over, and nobody used it since.
Fate = Literal["ended", "retained", "expired"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that changed what can be matched."""

    #: Position in the namespace's stream: ask for what comes after it. Numbers joined by hyphens, ascending.
    position: str
    #: Unix seconds, by the index's clock.
    at_s: float
    op: Literal["commit", "evict", "invalidate"]
    #: None: all segments of the namespace (invalidate).
    segment: SegmentId | None
    #: The first and (commit only) the last of its blocks: the digest of the last one stands for the prefix
    #: that ends there.
    first: Digest | None
    last: Digest | None
    #: Index in its chain of the first block.
    depth: int
    slots: int
    nbytes: int
    #: Why it went; None for a commit.
    rule: EvictionRule | None
    #: The operator or janitor that did it, as the index was opened with; "" for an engine, and for what an
    #: older release did.
    by: str = ""
    #: (evict, by a quota) What had been told of it; None: nothing that the index still knew.
    fate: Fate | None = None
    #: (with a fate) The session that alone had used it; empty if none had.
    session: SessionId = NO_SESSION


@dataclass(frozen=True, slots=True)
class Operation:
    """Something that an operator set out to do."""

    #: Unix seconds, by the index's clock.
    at_s: float
    by: str
    #: The command, and in words what it was to do. Neither is longer than a line or two.
    verb: str
    what: str


@dataclass(frozen=True, slots=True)
class Ghosts:
    """Blocks that were asked for, absent, and would have been there with `extra_bytes` more, but not with the
    next smaller number (kvstore.index.eviction.GHOST_STEPS)."""

    extra_bytes: int
    blocks: int


class Journal(OutcomeSink):
    """Remembers, in rings of bounded length (journal.* of the settings), what `commit`, `evict`, `cull`,
    `invalidate` and `tell` wrote. Nothing depends on it being complete: an entry that can't be read is left
    out, and counted."""

    #: How many entries this process has met that it could not read; one that stays is counted every time.
    unreadable = 0

    @abstractmethod
    def events(self, namespace: NamespaceId, *, after: str = "", limit: int = 1000) -> list[Event]:
        """Returns commits and evictions after a position, oldest first; from the oldest kept with `after` "".
        Raises ValueError for a text that is no position."""

    @abstractmethod
    def last_position(self, namespace: NamespaceId) -> str:
        """Returns the newest event's position, "" if there is none: for a reader of what is to come."""

    def has_lost(self, namespace: NamespaceId, after: str) -> bool:
        """Tells whether events after a position may be lost: the ring has moved on past it, or what it was a
        position of is gone. Of a reader that has read nothing ("") nothing is. Raises ValueError for a text
        that is no position. Takes one or two calls of the index.
        """
        place = position_order(after)
        last = self.last_position(namespace) if place else after
        if last == after:
            return False
        oldest = self.events(namespace, limit=1)
        if not oldest or place > position_order(last):
            return True
        return position_order(oldest[0].position) > _next(place)

    @abstractmethod
    def outcomes(self, namespace: NamespaceId, limit: int, *, faults: bool = False) -> list[Outcome]:
        """Returns what became of requests, newest first. `missing` holds the first digest only.

        With `faults` only what has a reason of kvstore.rules.reasons.FAULTS. Of these the newest are kept, a
        quarter as many as of all, however many others have come since: misses are a client's to make."""

    @abstractmethod
    def seen(self, namespace: NamespaceId) -> Mapping[str, int]:
        """Returns totals of the outcomes that engines told: `requests`; `asked` and `served`, in blocks of
        match outcomes, the latter less the blocks that load outcomes lack; `offered` and `stored`, in blocks
        of save outcomes; `miss:<reason>`, in blocks of match and load outcomes (asked = served + all of
        them); `unsaved:<reason>`, in blocks; and `evicted`, the bytes that quotas evicted. Names that were
        never counted, or counted nothing, are absent."""

    @abstractmethod
    def ghosts(self, namespace: NamespaceId) -> list[Ghosts]:
        """Returns the blocks that more capacity would have served since the namespace was made; ascending."""


def position_order(position: str) -> tuple[int, ...]:
    """Returns what positions are compared by. Raises ValueError."""
    return tuple(int(part) for part in position.split("-")) if position else ()


def _next(place: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the position after one: no event is between the two."""
    *most, last = place
    return (*most, last + 1) if last + 1 < 1 << 64 or not most else (*_next(tuple(most)), 0)


class Operations(ABC):
    """Remembers what operators did in the whole store, in a ring of kvstore.index.contract.OPERATIONS_KEPT.

    So it also has what commits would push out of a namespace's journal, and what is no event: pins, quotas.
    """

    @abstractmethod
    def record_operation(self, verb: str, what: str) -> None:
        """Writes an entry, by whom the index was opened. Comes before what it tells of, which is not done if
        this raises; an index that is full takes it."""

    @abstractmethod
    def operations(self, limit: int) -> list[Operation]:
        """Returns the newest entries, newest first."""
