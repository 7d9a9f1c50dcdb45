"""Counts the sessions that an index remembers, for `cache-admin serve`: some at each look, since there may be
a million, and nothing but reading all of them tells their states."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from kvstore.admin.curate.reports import SessionLine
from kvstore.admin.curate.sessions import session_line
from kvstore.admin.serve.reports import ServedSessions
from kvstore.errors import DamagedIndex
from kvstore.index.maintenance import FullIndex
from kvstore.index.sessions import SessionListing
from kvstore.keys import NO_SALT, NamespaceId

#: Sessions that one look reads at most, and for how many seconds at most.
AT_ONCE = 2000
_MOST_S = 0.5
#: Seconds from the end of a round to the beginning of the next one.
PAUSE_S = 15.0
#: How many of the largest are told.
LINES = 12


class SessionRounds:
    """Reads all sessions, round after round. For one thread, which replaces `seen` as a whole; any may look
    at it.

    What it says of states and of the largest is of the last round that ended: before the first has, `read_s`
    is None and it is of those that were met so far."""

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._round: Iterator[tuple[NamespaceId, SessionListing]] | None = None
        self._due = float("-inf")
        self._states: Counter[str] = Counter()
        self._largest: list[SessionLine] = []
        self.seen = ServedSessions()

    def read(self, index: FullIndex, names: Sequence[NamespaceId], allowed_bytes: int) -> None:
        """Reads on, and what is retained now. Raises what the index raises; then the round begins anew."""
        retained = sum(_retained(index, name) for name in names)
        told = {"retained_bytes": retained, "allowed_bytes": allowed_bytes}
        self.seen = self.seen.model_copy(update=told)
        if self._round is None:
            if self._monotonic() < self._due:
                return
            self._round = _all(index, list(names))
            self._states, self._largest = Counter(), []
        ended = self._advance(self._round)
        if ended:
            self._round, self._due = None, self._monotonic() + PAUSE_S
        if ended or self.seen.read_s is None:
            self.seen = ServedSessions(
                live=self._states["live"],
                retained=self._states["retained"],
                ended=self._states["ended"],
                **told,
                largest=tuple(self._largest),
                read_s=self._clock() if ended else None,
            )

    def _advance(self, some: Iterator[tuple[NamespaceId, SessionListing]]) -> bool:
        """Reads on for a while. Returns whether that was all."""
        until = self._monotonic() + _MOST_S
        try:
            for _ in range(AT_ONCE):
                if (one := next(some, None)) is None:
                    return True
                self._note(*one)
                if self._monotonic() > until:
                    break
        except Exception:
            self._round = None
            raise
        return False

    def _note(self, name: NamespaceId, one: SessionListing) -> None:
        self._states[one.state] += 1
        line = session_line(name, one)
        if len(self._largest) == LINES and _size(line) <= _size(self._largest[-1]):
            return
        # One that is used meanwhile may come twice.
        others = [old for old in self._largest if (old.namespace, old.session) != (name, line.session)]
        self._largest = sorted([*others, line], key=_size, reverse=True)[:LINES]


def _size(line: SessionLine) -> tuple[int, float, str]:
    return line.stored_bytes, line.last_use_s, line.session


def _all(index: FullIndex, names: Sequence[NamespaceId]) -> Iterator[tuple[NamespaceId, SessionListing]]:
    for name in names:
        try:
            for one in index.sessions(name):
                yield name, one
        except DamagedIndex:
            # What is wrong there is told by those who read its accounts and its journal.
            continue


def _retained(index: FullIndex, name: NamespaceId) -> int:
    try:
        return index.retained(name).get(NO_SALT, 0)
    except DamagedIndex:
        return 0
