"""A rank's knowledge of a load that is under way, and of each of its reads."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from connectors.engine.tensors import Blocks
from connectors.kv.messages import GroupLoad, Load
from connectors.telemetry.spans import LoadTimes, Mark
from kvstore.index.port import Run
from kvstore.rules.tiers import Tier
from kvstore.store.space import Space


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The work of one read: a run of one group's blocks that fits into one chunk of staging."""

    group: GroupLoad
    run: Run
    #: Where its payload lies, or None if that is unknown: then the read isn't measured.
    tier: Tier | None

    @property
    def nbytes(self) -> int:
        """Returns what it counts for when reads are measured."""
        return self.run.count * self.group.block_bytes

    def cut(self) -> slice:
        """Returns the slice of the group's lists that belongs to its blocks."""
        at = self.run.start - self.group.first
        return slice(at, at + self.run.count)

    @property
    def blocks(self) -> Blocks:
        """Returns the ids of its paged blocks, by table."""
        return {table: ids[self.cut()] for table, ids in self.group.tables.items()}

    @property
    def range(self) -> range:
        """Returns its blocks, counted from the start of the chain."""
        return range(self.run.start, self.run.start + self.run.count)


@dataclass(slots=True, eq=False)
class Ticket:
    """A load that is under way. The lock of its `KVReads` guards everything but the first four fields.

    It is cut, like one whose deadline has come, when computing what it has not brought is faster than waiting
    for that. Pieces are read in order, so what it has brought is a prefix but for a few, and is used."""

    load: Load
    #: `time.monotonic` time of its deadline.
    end: float
    #: The namespace that the scheduler half had named when the load started.
    space: Space
    #: Event on the engine's stream, after which the load may write its blocks.
    after: Any
    #: Pieces that have not ended.
    pending: list[Piece]
    #: Bytes of those, by tier.
    left: dict[Tier, int]
    #: Blocks that could not be loaded, or that no run covers.
    failed: list[tuple[GroupLoad, range]] = field(default_factory=list)
    #: Pieces whose copies to the paged cache have begun and not ended.
    writing: set[Piece] = field(default_factory=set)
    expired: bool = False
    cut: bool = False
    #: When it is next looked at whether to cut it.
    look_at: float = 0.0
    #: Reason of the first failure, one of kvstore.rules.reasons.MISS_REASONS; "" if nothing has failed.
    reason: str = ""
    began: float = field(default_factory=time.monotonic)
    #: When its last piece so far has ended.
    ended: float = field(default_factory=time.monotonic)
    #: When pieces under way began and when each of their stages ended, in ns since the epoch, if times are to
    #: be reported. Each piece's own thread fills in its entry.
    marks: dict[Piece, dict[Mark, int]] = field(default_factory=dict)
    #: Times of the pieces that came.
    times: LoadTimes = field(default_factory=LoadTimes)

    def mark(self, piece: Piece, mark: Mark) -> None:
        """Notes that a piece begins, or that a stage of it has ended. Any thread may call it."""
        if self.load.timed:
            self.marks.setdefault(piece, {})[mark] = time.time_ns()


def wanted(group: GroupLoad) -> range:
    """Returns all blocks of a group that a load asks for."""
    return range(group.first, group.first + len(group.hashes))
