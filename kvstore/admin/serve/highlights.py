"""Highlights of a cache for `cache-admin serve`, from the index's journal and its order of eviction.

They are the most and least used prefixes, and the newest evictions and faults.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from kvstore.admin.inspect.events import event_lines
from kvstore.admin.inspect.reports import EventLine, EventsReport, TopReport
from kvstore.admin.serve.reports import FaultLine
from kvstore.events import Event, EventReader, Gap
from kvstore.index.maintenance import FullIndex
from kvstore.index.port import Outcome
from kvstore.keys import NamespaceId
from kvstore.rules.text import readable

#: Lines of the hottest and the coldest, of the faults and of the evictions.
LINES = 12
_FAULTS = 30
_EVICTIONS = 60
#: Events of a page, and pages for each namespace and look: the ring is read through in a few looks, and kept
#: up with from then on.
_EVENT_PAGE, _EVENT_PAGES = 1000, 4

Within = Callable[[NamespaceId], AbstractContextManager[object]]


class Highlights:
    """Keeps the highlights. For one thread, which replaces each attribute as a whole; any may look at them.

    Each namespace is read `within(namespace)`. The methods raise what the index raises.
    """

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._readers: dict[NamespaceId, EventReader] = {}
        #: Time of the newest event that was read of each namespace, and of the newest before the last gap.
        self._newest_s: dict[NamespaceId, float] = {}
        self._read_s: dict[NamespaceId, float] = {}
        self._by_rule: Counter[str] = Counter()
        self.events = EventsReport(at_s=began_s, events=())
        self.by_rule: dict[str, int] = {}
        self.top = TopReport(at_s=began_s, namespace=None, limit=LINES, hottest=(), coldest=())
        self.faults: tuple[FaultLine, ...] = ()

    def read_events(
        self, index: FullIndex, names: Sequence[NamespaceId], now_s: float, within: Within
    ) -> None:
        """Reads what was evicted since the last call; in the first calls, what the ring still holds."""
        lately: list[EventLine] = list(self.events.events)
        for name in names:
            reader = self._readers.setdefault(name, EventReader(index, name))
            for _ in range(_EVENT_PAGES):
                found: list[Event | Gap] = []
                with within(name):
                    found = reader.read(_EVENT_PAGE)
                lately += map(_anonymous, event_lines(name, self._evictions(name, found)))
                lately = sorted(lately, key=lambda line: line.at_s)[-_EVICTIONS:]
                self.events = EventsReport(at_s=now_s, events=tuple(lately))
                if len(found) < _EVENT_PAGE:
                    break
        self.by_rule = dict(sorted(self._by_rule.items()))

    def _evictions(self, name: NamespaceId, found: Sequence[Event | Gap]) -> list[Event]:
        """Counts evictions since this server began, and returns those that lost something."""
        if found and isinstance(found[0], Gap):
            # The ring is read from its beginning again: it may hold what was read before.
            self._read_s[name] = self._newest_s.get(name, 0.0)
        read_s = self._read_s.get(name, 0.0)
        fresh = [event for event in found if isinstance(event, Event) and event.at_s > read_s]
        if fresh:
            self._newest_s[name] = max(self._newest_s.get(name, 0.0), *(event.at_s for event in fresh))
        gone = [event for event in fresh if event.rule is not None]
        self._by_rule.update(str(event.rule) for event in gone if event.at_s >= self._began_s)
        # A segment that was joined lost nothing, and there is one for each turn of a conversation.
        return [event for event in gone if event.rule != "joined"]

    def read_faults(self, index: FullIndex, names: Sequence[NamespaceId], within: Within) -> None:
        """Reads what went wrong for requests."""
        faults: list[FaultLine] = []
        for name in names:
            with within(name):
                faults += [_fault(name, outcome) for outcome in index.outcomes(name, _FAULTS, faults=True)]
        self.faults = tuple(sorted(faults, key=lambda line: -line.at_s)[:_FAULTS])

    def keep_to(self, names: Sequence[NamespaceId]) -> None:
        """Forgets all namespaces but these."""
        for gone in self._readers.keys() - set(names):
            del self._readers[gone]
            self._newest_s.pop(gone, None)
            self._read_s.pop(gone, None)


def _fault(name: NamespaceId, outcome: Outcome) -> FaultLine:
    lost = outcome.asked - outcome.served
    return FaultLine(
        at_s=outcome.at_s,
        where=outcome.op,
        namespace=name,
        subject=readable(outcome.request),
        problem=f"{readable(outcome.reason)}, {lost} of {outcome.asked} blocks",
    )


def _anonymous(line: EventLine) -> EventLine:
    """Returns the line without who did it and without digests: anybody may ask who reaches the port, and a
    digest tells whoever has the prompt that somebody asked it."""
    return line.model_copy(update={"by": "", "first": None, "last": None, "position": ""})
