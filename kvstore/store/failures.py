"""Log lines of loads and saves that fail, one per reason and minute: a store that is down for a day fails
some with every prompt."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from kvstore.errors import KVStoreError
from kvstore.keys import SegmentId
from kvstore.rules.reasons import MISS_REASONS

log = logging.getLogger(__name__)

#: Seconds after a failure in which more failures of the same reason are only counted.
_QUIET_S = 60.0


class Failures:
    """Logs why blocks are not loaded, or not saved: at once for each reason, and then once a minute. Safe for
    threads."""

    def __init__(self, what: str, clock: Callable[[], float]) -> None:
        """`what` becomes of the blocks, as in "3 blocks are computed"."""
        self._what = what
        self._clock = clock
        self._lock = threading.Lock()
        #: Reason -> when it was last said, and how many blocks it has cost since.
        self._said: dict[str, tuple[float, int]] = {}

    def note(self, blocks: int, problem: Exception, segment: SegmentId | None = None) -> str:
        """Records a failure for so many blocks, or items; with its traceback, if it's a bug.

        Returns the counters' label of the problem.
        """
        reason, now = miss_reason(problem), self._clock()
        with self._lock:
            at_s, more = self._said.get(reason, (float("-inf"), 0))
            # A clock that was set back doesn't keep it quiet for longer.
            if at_s <= now < at_s + _QUIET_S:
                self._said[reason] = at_s, more + blocks
                return reason
            self._said[reason] = now, 0
        # An error from outside the tree of errors is wrapped in the tree's root.
        bug = problem if type(problem) is KVStoreError or not isinstance(problem, KVStoreError) else None
        since = f", and {more} since this was last said" if more else ""
        of = f" of segment {segment.hex()}" if segment else ""
        log.warning("%d blocks%s %s%s: %s", blocks, of, self._what, since, problem, exc_info=bug)
        return reason


def miss_reason(error: BaseException) -> str:
    """Returns the counters' label of an error."""
    reason = getattr(error, "reason", "error")
    return reason if reason in MISS_REASONS else "error"
