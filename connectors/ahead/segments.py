"""Segments to fetch ahead, the requests that wait for them, and the hints that name them.

A caller holds one lock for all of these objects.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Final

from kvstore.index.port import Run
from kvstore.keys import SegmentId, payload_name
from kvstore.rules.tiers import Tier
from kvstore.store.space import Space
from schemas.records import SegmentRecord

#: Largest share of the budget that hints may fill, and most segments that they name at a time.
_SHARE: Final = 0.5
_MOST: Final = 4096
#: How long what a hint names counts in the budget, in seconds.
HINT_S: Final = 120.0


@dataclass(slots=True, eq=False)
class WaitingRequest:
    """A request that has not started."""

    request_id: str
    #: Whether the scheduler has passed it over.
    passed: bool = False
    #: Its match, once known: the space, the runs, and the tier of each segment.
    found: tuple[Space, Iterable[Run], dict[SegmentId, Tier]] | None = None
    #: Segments that are to be fetched for it, or were.
    segments: list[Segment] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Segment:
    """A segment that is to be fetched, or was and is not loaded yet."""

    segment: SegmentId
    #: Its payloads that were not asked for yet, with their sizes.
    rest: deque[tuple[str, int]]
    #: Bytes of all of its payloads.
    nbytes: int
    #: Number of its payloads that aren't known to be in the folder.
    missing: int
    #: Bytes that it counts in the budget: 0 before its fetch begins, then all of its bytes, and at the end
    #: those that were fetched.
    held: int = 0
    #: Bytes that were fetched.
    brought: int = 0
    #: Whether one of its payloads is being fetched at this moment.
    running: bool = False
    #: Whether a payload has failed to come once.
    failed: bool = False
    #: Whether a request has begun to load it.
    used: bool = False
    #: Requests that may load it -> their mapping of segments to tiers.
    waiting: dict[str, dict[SegmentId, Tier]] = field(default_factory=dict)
    #: Until when a hint names it; 0: none does.
    hinted_until: float = 0.0

    @classmethod
    def of(cls, space: Space, segment: SegmentId, record: SegmentRecord) -> Segment:
        """Returns a segment of which nothing is fetched yet."""
        names = (payload_name(space.id, segment, rank) for rank in range(len(record.parts)))
        parts = deque(zip(names, (part.nbytes for part in record.parts), strict=True))
        return cls(segment, parts, record.nbytes, len(parts))

    @property
    def wanted(self) -> bool:
        """Whether a request waits for it, or a hint names it."""
        return bool(self.waiting or self.hinted_until)

    @property
    def under_way(self) -> bool:
        """Whether something of it is to come yet, or a request waits for it."""
        return bool(self.running or self.rest or self.waiting)


class Hinted:
    """The segments that hints name, begun or not, in the order in which they cease to."""

    def __init__(self, budget_bytes: int) -> None:
        self._most = int(budget_bytes * _SHARE)
        self._segments: dict[SegmentId, Segment] = {}
        self._nbytes = 0

    def __iter__(self) -> Iterator[Segment]:
        return iter(list(self._segments.values()))

    def add(self, one: Segment, now: float, wasted: int) -> bool:
        """Names a segment from now on for HINT_S, or anew; returns whether there is room for it. `wasted` are
        bytes that were fetched of late and not used: hints come after whom that leaves little room."""
        self.discard(one)
        if self._nbytes + wasted + one.nbytes > self._most or len(self._segments) >= _MOST:
            return False
        self._segments[one.segment] = one
        self._nbytes += one.nbytes
        one.hinted_until = now + HINT_S
        return True

    def discard(self, one: Segment) -> None:
        """Drops a segment's name, if it has one."""
        if self._segments.pop(one.segment, None) is not None:
            self._nbytes -= one.nbytes
        one.hinted_until = 0.0

    def over(self, now: float) -> Iterator[Segment]:
        """Yields the segments whose time is over, and drops their names."""
        while (one := next(iter(self._segments.values()), None)) is not None and one.hinted_until <= now:
            self.discard(one)
            yield one
