"""Carries the outcomes of requests to the index's journal (kvstore.index.maintenance.Journal).

    engine's thread    appends to a deque, and once a step checks whether it is time to write
    call thread        makes outcomes of what has gathered and writes them, with one call per namespace

It is time about once a second, or when `BATCH` outcomes have gathered, or when the engine is about to have
nothing to do. While the index is down, which the reasons of outcomes are the first to show, they are kept, up
to `MOST` of them; more are dropped and counted. No outcome is written twice: a call that failed may have been
carried out, so it is not repeated.

A request's match counts once, with the blocks that it had to ask the store for: the full blocks that the
engine did not have itself. The reason is that of the first block that was not served, and stands for all that
follow it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from connectors.engine.guard import otherwise
from kvstore.errors import KVStoreError
from kvstore.index.port import Outcome
from kvstore.keys import SegmentId
from kvstore.store.space import Space
from kvstore.store.store import Store
from schemas.records import OutcomeOp

#: Most outcomes that wait to be written.
MOST: Final = 1024
#: Number of waiting outcomes that are written before the period ends, and most that go with one call.
BATCH: Final = 64
#: Shortest time between two writes of fewer than `BATCH` outcomes, in seconds.
_PERIOD_S: Final = 1.0
#: Reasons that suggest that the index does not answer.
_DOWN: Final = frozenset({"unavailable", "deadline", "breaker_open", "failed"})

#: Returns the packed digests of an outcome's missing blocks; called on a call thread.
Missing = Callable[[], bytes]


def nothing_missing() -> bytes:
    """Returns no digests: for outcomes that were served in full, or whose digests aren't known."""
    return b""


@dataclass(frozen=True, slots=True)
class _Noted:
    """An outcome that waits; it is made whole on a call thread."""

    space: Space
    at_s: float
    request: str
    op: OutcomeOp
    asked: int
    served: int
    reason: str
    position: int
    missing: Missing
    detail: str
    chain: Missing

    def outcome(self) -> Outcome:
        return Outcome(
            self.at_s,
            self.request,
            self.op,
            self.asked,
            self.served,
            self.reason,
            self.position,
            self.missing() if self.reason else b"",
            self.detail if self.reason else "",
            self.chain() if self.reason else b"",
        )


class Outcomes:
    """Writes one connector half's outcomes to the journal. The engine's thread calls the public methods."""

    def __init__(self, store: Store) -> None:
        self._store = store
        #: Two threads use both ends, so only operations that are atomic on a deque are allowed.
        self._waiting: deque[_Noted] = deque()
        self._lock = threading.Lock()
        #: Whether a call thread is writing, and whether it must look again at its end. The lock guards both.
        self._telling = False
        self._again = False
        self._next = 0.0
        #: Whether the last call failed. Belongs to the call thread.
        self._doubtful = False

    def note(
        self,
        space: Space,
        request: str,
        op: OutcomeOp,
        *,
        asked: int,
        served: int,
        reason: str,
        position: int = 0,
        missing: Missing = nothing_missing,
        detail: str = "",
        chain: Missing = nothing_missing,
    ) -> None:
        """Queue an outcome; the arguments are those of kvstore.index.port.Outcome.

        Does nothing if nothing was asked for, and leaves out `reason` if all was served."""
        if asked <= 0:
            return
        if len(self._waiting) >= MOST:
            self._store.counters.add("outcomes_lost")
            return
        reason = reason if served < asked else ""
        noted = _Noted(
            space,
            self._store.clock(),
            request,
            op,
            asked,
            served,
            reason,
            position,
            missing,
            detail,
            chain,
        )
        self._waiting.append(noted)

    def tick(self, *, idle: bool = False) -> None:
        """Start a write if it is time. Called once a step; `idle`: there may be no next one."""
        if not self._waiting:
            return
        now = time.monotonic()
        if not idle and len(self._waiting) < BATCH and now < self._next:
            return
        with self._lock:
            if self._telling:
                self._again |= idle
                return
            self._telling = True
        self._next = now + _PERIOD_S
        if not self._store.transfers.call(self._tell):
            with self._lock:
                self._telling = False

    def _tell(self) -> None:
        """Write batch after batch, on a call thread."""
        over = False
        try:
            while not over and self._tell_batch():
                over = self._is_over()
        finally:
            # This also runs after a bug, which so costs its batch and not all that follow.
            if not over:
                with self._lock:
                    self._telling = self._again = False

    def _is_over(self) -> bool:
        """Returns whether nothing is left to write now. If so, `_telling` is cleared under the same lock, so
        that what an engine notes afterwards, before it goes idle, starts another call."""
        with self._lock:
            again, self._again = self._again, False
            self._telling = len(self._waiting) >= BATCH or (again and bool(self._waiting))
            return not self._telling

    def _tell_batch(self) -> bool:
        batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        runs = groupby(batch, lambda one: one.space)
        told = [self._tell_some(space, list(some)) for space, some in runs]
        return all(told)

    def _tell_some(self, space: Space, noted: Sequence[_Noted]) -> bool:
        """Write outcomes of one namespace."""
        kept: Sequence[_Noted] = ()
        if not self._answers(noted):
            kept = noted[: max(0, MOST - len(self._waiting))]
            self._waiting.extendleft(reversed(kept))
        elif space.tell([one.outcome() for one in noted]):
            self._doubtful = False
            return True
        if lost := len(noted) - len(kept):
            self._store.counters.add("outcomes_lost", lost)
        self._doubtful = True
        return False

    def _answers(self, noted: Sequence[_Noted]) -> bool:
        """Returns whether the index answers; pings it if there is reason to doubt that."""
        if self._store.health.index_down:
            return False
        if not self._doubtful and not any(one.reason in _DOWN for one in noted):
            return True
        try:
            self._store.maintenance.ping()
        except KVStoreError:
            return False
        return True


@dataclass(slots=True)
class _Saving:
    """A segment that the workers have and of which no outcome is known yet."""

    request: str
    blocks: int
    position: int
    missing: Missing
    reason: str = ""


@dataclass
class SaveOutcomes:
    """Makes outcomes of the segments that were handed to the workers. Belongs to the engine's thread."""

    outcomes: Outcomes
    _saving: dict[SegmentId, _Saving] = field(default_factory=dict)

    def planned(self, segment: SegmentId, request: str, blocks: int, position: int, missing: Missing) -> None:
        """Records that `blocks` blocks of a request, from `position` on, are on their way to the store."""
        self._saving[segment] = _Saving(request, blocks, position, missing)

    def because(self, segment: SegmentId, reason: str) -> None:
        """Records why some rank has not stored its part; the first reason counts."""
        if (saving := self._saving.get(segment)) is not None:
            saving.reason = saving.reason or reason

    @otherwise(str)
    def ended(self, space: Space, segment: SegmentId, *, stored: bool) -> str:
        """Notes the outcome of a segment that all ranks have ended. One that was present already, saved by
        another engine, counts as served. Returns the first reason why some rank has not stored its part; ""
        if there was none, or the segment isn't known."""
        if (saving := self._saving.pop(segment, None)) is None:
            return ""
        served = saving.blocks if stored or saving.reason == "present" else 0
        self.outcomes.note(
            space,
            saving.request,
            "save",
            asked=saving.blocks,
            served=served,
            reason=saving.reason or "failed",
            position=saving.position,
            missing=saving.missing,
        )
        return saving.reason

    def restart(self) -> None:
        """Forget the segments under way: they belong to a namespace that this engine has left."""
        self._saving.clear()
