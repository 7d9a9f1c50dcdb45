"""Commits and evictions as they happen: for a router that sends a prompt to where its prefix is, and for a
cache warmer that fetches what others have saved. docs/events.md has an example of each.

    for event in follow(index, namespace, after=position):
        match event:
            case Gap():
                ...  # what was known is out of date: forget it, and ask the index again
            case Event(op="commit"):
                ...  # the prefix that ends with `event.last` can be loaded from now on

The index keeps the latest `journal.events` of a namespace. A reader that falls further behind is told so by a
Gap in between: nothing is lost in silence. `position` is all that a reader must remember between two runs.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from kvstore.errors import TransientError
from kvstore.index.maintenance import Event, Journal, position_order
from kvstore.jitter import jittered
from kvstore.keys import NamespaceId

__all__ = ["Event", "EventReader", "Gap", "follow"]

log = logging.getLogger(__name__)

_PAGE = 1000


@dataclass(frozen=True, slots=True)
class Gap:
    """Events may be lost here: the ring has moved on past the reader, or the index was emptied."""

    #: Position of the last event that was read before it.
    after: str
    #: Position of the first event that is read after it; "" if there is none yet.
    position: str


class EventReader:
    """Reads one namespace's events in their order. Belongs to one thread."""

    def __init__(self, index: Journal, namespace: NamespaceId, *, after: str | None = "") -> None:
        """`after` is the position to go on from; "": all that the ring holds; None: only what comes from now
        on. No I/O unless it is None, which raises what the index raises.
        """
        self._index = index
        self._namespace = namespace
        #: Position of the last event that was read, from which another reader can go on.
        self.position = index.last_position(namespace) if after is None else after

    def read(self, limit: int = _PAGE) -> list[Event | Gap]:
        """Returns the events since, at most `limit`, oldest first; a Gap stands where some may be missing.

        Takes two to four calls of the index. An empty list means that there is nothing new. Raises
        ValueError if `after` is not spelled as a position, and what the index raises; nothing is skipped by
        asking again.
        """
        before = self.position
        position_order(before)  # raises for what is none
        try:
            events = self._index.events(self._namespace, after=before, limit=limit)
            # Asked afterwards: what the ring has lost until now may have been lost before those were read.
            lost = bool(before) and self._index.has_lost(self._namespace, before)
        except ValueError:
            # A position of an index that was emptied since.
            lost = True
        if not lost:
            self._move(events)
            return list(events)
        # From the beginning: of several shards those that have lost nothing go on from there as well.
        events = self._index.events(self._namespace, limit=limit)
        self.position = ""
        self._move(events)
        return [Gap(before, events[0].position if events else ""), *events]

    def _move(self, events: list[Event]) -> None:
        if events:
            self.position = events[-1].position


def follow(
    index: Journal,
    namespace: NamespaceId,
    *,
    after: str | None = "",
    poll_s: float = 1.0,
    stop: threading.Event | None = None,
) -> Iterator[Event | Gap]:
    """Yields the events after a position, as an EventReader reads them, and those that come, until `stop`.

    Asks about every `poll_s` seconds while there is nothing new. While the index does not answer it goes on
    trying, and says so in the log once. Raises ValueError if `after` is no position, and PermissionDenied.
    """
    stop = stop or threading.Event()
    reader: EventReader | None = None
    failing = False
    while not stop.is_set():
        try:
            reader = reader or EventReader(index, namespace, after=after)
            found = reader.read()
        except TransientError as exc:
            if not failing:
                log.warning("events of namespace %s: %s; trying again", namespace, exc)
            failing, found = True, []
        else:
            failing = False
        for event in found:
            if stop.is_set():
                return
            yield event
        if not found:
            stop.wait(jittered(poll_s))
