"""Reports to the index which segments a request's session uses, and the request's hints on that session.

The index gets one call when the request is matched, in place of the touch of its load. A request with hints
causes another call when it ends: "retain for five minutes" means from then on. One thread makes all calls, in
order. Workers don't touch the segments that such a request loads; the segments that they save for it are its
session's own.
"""

from __future__ import annotations

from collections.abc import Iterable

from connectors.engine.guard import otherwise
from connectors.engine.sessions.hints import Hints
from kvstore.index.port import Run
from kvstore.index.sessions import USE, Hint
from kvstore.keys import SaltId, SegmentId, SessionId
from kvstore.store.space import Space
from kvstore.store.store import Store


class SessionTeller:
    """Tells of the sessions of one engine's requests. Call `use` before anything else.

    Belongs to the scheduler's thread, but for the calls of the index."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def use(self, space: Space) -> None:
        """Tell of this namespace from now on."""
        self._space = space

    def arrives(self, hints: Hints) -> None:
        """Count a request's hints that make no sense."""
        if hints.ignored:
            self._store.counters.add("hints_ignored", hints.ignored)

    @otherwise(list)
    def matched(self, hints: Hints, salt: SaltId, runs: Iterable[Iterable[Run]]) -> list[SegmentId]:
        """Tell that a request of a session is matched with these runs, by group; once per request. `salt` is
        the id of the request's.

        Returns the segments for the report at its end, if it has hints."""
        if not hints.session:
            return []
        # A segment may come in several runs. Heads go first: the bounds of sessions cut off the tails.
        segments = list(dict.fromkeys(run.segment for group in runs for run in group))
        # Also if there are none: a session that had ended goes on.
        self._tell(hints, salt, segments, USE)
        return segments if hints.says else []

    def ends(self, hints: Hints, salt: SaltId, segments: list[SegmentId]) -> None:
        """Report the hints of a request that has ended, well or not, and the segments that it has used."""
        if hints.session and hints.says:
            self._tell(hints, salt, segments, Hint(hints.end, hints.retain_s, hints.priority))

    def _tell(self, hints: Hints, salt: SaltId, segments: list[SegmentId], hint: Hint) -> None:
        tell(self._store, self._space, hints.session, salt, segments, hint)


def tell(
    store: Store, space: Space, session: SessionId, salt: SaltId, segments: list[SegmentId], hint: Hint
) -> None:
    """Queues a report of a session's use to the index, after all earlier reports: a use that came after the
    end would have the session go on. A report that doesn't fit into the queue is counted and lost. Any thread
    may call."""

    def call() -> None:
        space.session(session, segments, hint, salt=salt)

    if not store.transfers.call_in_order(call):
        store.counters.add("session_failures")
