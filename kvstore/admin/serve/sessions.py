"""Counts the sessions that an index remembers, for `cache-admin serve`: some at each look, since there may be
a million, and nothing but reading all of them tells their states."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from kvstore.admin.curate.sessions import SessionTally
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
_LINES = 12


class SessionRounds:
    """Reads all sessions, round after round. For one thread, which replaces `seen` as a whole; any may look
    at it.

    Its states and the largest are of `read_s`, when the last round ended. None: they are those met so far."""

    def __init__(self, clock: Callable[[], float], monotonic: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._monotonic = monotonic
        self._rest: Iterator[tuple[NamespaceId, SessionListing]] | None = None
        self._due = float("-inf")
        self._tally = SessionTally(_LINES)
        self.seen = self._tally.report(0, clock())
        self.read_s: float | None = None

    def read(self, index: FullIndex, names: Sequence[NamespaceId]) -> None:
        """Reads on, and what is retained now. Raises what the index raises; then the round begins anew."""
        retained = sum(_retained(index, name) for name in names)
        ended = False
        if self._rest is not None or self._monotonic() >= self._due:
            ended = self._advance(index, names)
        if ended:
            self._due, self.read_s = self._monotonic() + PAUSE_S, self._clock()
        if ended or self.read_s is None:
            self.seen = self._tally.report(retained, self._clock())
        else:
            self.seen = self.seen.model_copy(update={"retained_bytes": retained})

    def _advance(self, index: FullIndex, names: Sequence[NamespaceId]) -> bool:
        """Reads on for a while. Returns whether that was all."""
        rest, self._rest = self._rest, None
        if rest is None:
            rest, self._tally = _all(index, list(names)), SessionTally(_LINES)
        until = self._monotonic() + _MOST_S
        for number, (name, one) in enumerate(rest, 1):
            self._tally.add(name, one)
            if number == AT_ONCE or self._monotonic() > until:
                self._rest = rest
                return False
        return True


def _all(index: FullIndex, names: Sequence[NamespaceId]) -> Iterator[tuple[NamespaceId, SessionListing]]:
    for name in names:
        try:
            for one in index.sessions(name):
                yield name, one
        except DamagedIndex:
            # Readers of accounts and the journal tell what is wrong there.
            continue


def _retained(index: FullIndex, name: NamespaceId) -> int:
    try:
        return index.retained(name).get(NO_SALT, 0)
    except DamagedIndex:
        return 0
