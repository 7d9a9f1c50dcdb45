"""What became of requests, on its way to the index's journal (kvstore.catalogue.Journal).

    engine's thread    appends to a deque, and once a step looks whether it is time
    call thread        makes outcomes of what has gathered and tells the index, one call per namespace

about once a second, or when `BATCH` have gathered, or when the engine is about to have nothing to do. While
the index is down, which outcomes themselves are the first to say, they are kept; of more than `MOST` the rest
is dropped and counted. Nothing is told twice: a call that failed may have been carried out.

A request counts once, with what it had to ask the store for: the full blocks that the engine did not have
itself. The reason is that of the first block that was not served, and counts for all that follow it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Final

from kvstore.errors import KVStoreError
from kvstore.keys import SegmentId
from kvstore.ports import Outcome
from kvstore.store import Space, Store
from schemas.records import OutcomeOp

#: Outcomes that wait to be told.
MOST: Final = 1024
#: So many are told without waiting for the second to end, and at most so many with one call.
BATCH: Final = 64
_PERIOD_S: Final = 1.0
#: Reasons of an index that does not answer.
_DOWN: Final = frozenset({"unavailable", "deadline", "breaker_open", "failed"})

#: The digests of an outcome's `missing`, packed; asked for on a call thread.
Missing = Callable[[], bytes]


def nothing_missing() -> bytes:
    """Of an outcome that was served in full, or that has no digests to tell."""
    return b""


@dataclass(frozen=True, slots=True)
class _Noted:
    space: Space
    at_s: float
    request: str
    op: OutcomeOp
    asked: int
    served: int
    reason: str
    position: int
    missing: Missing

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
        )


class Outcomes:
    """Of one half of a connector. The engine's thread calls what is public."""

    def __init__(self, store: Store) -> None:
        self._store = store
        #: Both ends are used by two threads, so nothing but what a deque does atomically.
        self._waiting: deque[_Noted] = deque()
        self._lock = threading.Lock()
        #: Guarded by the lock: a call thread is at it; look again when it ends.
        self._telling = False
        self._again = False
        self._next = 0.0
        #: Of the call thread: the last call failed.
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
    ) -> None:
        """See kvstore.ports.Outcome; `reason` is left out if all was served."""
        if asked <= 0:
            return
        if len(self._waiting) >= MOST:
            self._store.counters.add("outcomes_lost")
            return
        reason = reason if served < asked else ""
        self._waiting.append(
            _Noted(space, self._store.clock(), request, op, asked, served, reason, position, missing)
        )

    def tick(self, *, idle: bool = False) -> None:
        """Once a step; `idle`: there may be no next one."""
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
        """Call thread."""
        over = False
        try:
            while not over and self._tell_batch():
                over = self._is_over()
        finally:
            # Also after a bug, which costs its batch and not all that follow.
            if not over:
                with self._lock:
                    self._telling = self._again = False

    def _is_over(self) -> bool:
        """Whether nothing is left to tell now; if so, nobody is at it from this moment on: what an engine
        that goes idle notes after this look begins another call."""
        with self._lock:
            again, self._again = self._again, False
            self._telling = len(self._waiting) >= BATCH or (again and bool(self._waiting))
            return not self._telling

    def _tell_batch(self) -> bool:
        batch = [self._waiting.popleft() for _ in range(min(BATCH, len(self._waiting)))]
        told = [self._tell_some(space, list(some)) for space, some in groupby(batch, lambda one: one.space)]
        return all(told)

    def _tell_some(self, space: Space, noted: Sequence[_Noted]) -> bool:
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
        """Whether the index answers, asked for sure if there is reason to doubt it."""
        breaker = self._store.index_breaker
        if breaker is not None and not breaker.is_closed:
            return False
        if not self._doubtful and not any(one.reason in _DOWN for one in noted):
            return True
        try:
            self._store.catalogue.ping()
        except KVStoreError:
            return False
        return True


@dataclass(slots=True)
class _Saving:
    request: str
    blocks: int
    position: int
    missing: Missing
    reason: str = ""


@dataclass
class SaveOutcomes:
    """What became of segments that were handed to the workers. Owned by the engine's thread."""

    outcomes: Outcomes
    _saving: dict[SegmentId, _Saving] = field(default_factory=dict)

    def planned(self, segment: SegmentId, request: str, blocks: int, position: int, missing: Missing) -> None:
        """So many blocks of a request are on their way to the store."""
        self._saving[segment] = _Saving(request, blocks, position, missing)

    def because(self, segment: SegmentId, reason: str) -> None:
        """Why some rank has not stored its part; the first reason counts."""
        if (saving := self._saving.get(segment)) is not None:
            saving.reason = saving.reason or reason

    def ended(self, space: Space, segment: SegmentId, *, stored: bool) -> None:
        """All ranks have ended. What is stored already, from elsewhere, has its reason."""
        if (saving := self._saving.pop(segment, None)) is None:
            return
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

    def restart(self) -> None:
        """What is under way belongs to a namespace that this engine has left."""
        self._saving.clear()
