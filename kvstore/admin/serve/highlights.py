"""Highlights of a cache for `cache-admin serve`, from the index's journal and its order of eviction.

They are the most and least used prefixes, the newest evictions and faults, and what more room would bring.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvstore.admin.serve.reports import EvictionLine, FaultLine, GainLine, PrefixLine
from kvstore.errors import DamagedIndex
from kvstore.index.eviction import shift_s
from kvstore.index.maintenance import Account, Event, FullIndex, Listing
from kvstore.index.port import Outcome
from kvstore.keys import NamespaceId, SegmentId
from kvstore.rules.text import readable

#: Lines of the hottest and the coldest, of the faults and of the evictions; and how many namespaces are asked
#: for their hottest and coldest.
LINES = 12
_FAULTS = 30
_EVICTIONS = 60
_ASKED = 16
#: Events of a page, and pages for each namespace and look: the ring is read through in a few looks, and kept
#: up with from then on.
_EVENT_PAGE, _EVENT_PAGES = 1000, 4


class Highlights:
    """Reads the highlights. For one thread, which replaces each tuple as a whole; any may look at the tuples.

    `on_time` is called between two calls of the index, and raises if they have taken too long.
    """

    def __init__(self, began_s: float) -> None:
        self._began_s = began_s
        self._positions: dict[NamespaceId, str] = {}
        self._by_rule: Counter[str] = Counter()
        self.evictions: tuple[EvictionLine, ...] = ()
        self.by_rule: dict[str, int] = {}
        self.hottest: tuple[PrefixLine, ...] = ()
        self.coldest: tuple[PrefixLine, ...] = ()
        self.faults: tuple[FaultLine, ...] = ()
        self.gains: tuple[GainLine, ...] = ()
        #: Namespaces in which something made no sense, and what. All else is read without them.
        self.damaged: dict[NamespaceId, str] = {}

    @contextmanager
    def _of(self, name: NamespaceId) -> Iterator[None]:
        try:
            yield
            self.damaged.pop(name, None)
        except DamagedIndex as exc:
            self.damaged[name] = str(exc)

    def read_events(
        self, index: FullIndex, names: Sequence[NamespaceId], on_time: Callable[[], None]
    ) -> None:
        """Reads what was evicted since the last call; in the first calls, what the ring still holds.

        Raises what the index raises.
        """
        lately = list(self.evictions)
        for name in names:
            for _ in range(_EVENT_PAGES):
                on_time()
                events: list[Event] = []
                with self._of(name):
                    events = self._after(index, name)
                lately += [line for event in events if (line := self._line(name, event)) is not None]
                lately = heapq.nlargest(_EVICTIONS, lately, key=lambda line: line.at_s)
                self.evictions = tuple(lately)
                if len(events) < _EVENT_PAGE:
                    break
        self.by_rule = dict(sorted(self._by_rule.items()))

    def _after(self, index: FullIndex, name: NamespaceId) -> list[Event]:
        try:
            events = index.events(name, after=self._positions.get(name, ""), limit=_EVENT_PAGE)
        except ValueError:
            # The index was emptied, and its positions begin anew.
            events = index.events(name, limit=_EVENT_PAGE)
        if events:
            self._positions[name] = events[-1].position
        return events

    def _line(self, name: NamespaceId, event: Event) -> EvictionLine | None:
        if event.op == "commit" or event.rule is None:
            return None
        if event.at_s >= self._began_s:
            self._by_rule[event.rule] += 1
        if event.rule == "joined":
            # Nothing was lost, and there is one for each turn of a conversation.
            return None
        return EvictionLine(
            at_s=event.at_s,
            namespace=name,
            segment=None if event.segment is None else event.segment.hex(),
            depth=event.depth,
            slots=event.slots,
            stored_bytes=event.nbytes,
            rule=event.rule,
        )

    def read_uses(
        self,
        index: FullIndex,
        accounts: Sequence[Account],
        on_time: Callable[[], None],
        *,
        cost_aware: bool,
    ) -> None:
        """Reads the hottest and the coldest segments of the first of `accounts`.

        Raises what the index raises.
        """
        hot: list[tuple[float, NamespaceId, SegmentId]] = []
        cold: list[tuple[float, NamespaceId, SegmentId]] = []
        for account in accounts[:_ASKED]:
            on_time()
            name = account.namespace
            # Several namespaces are merged in the order of kvstore.index.eviction.
            shift = shift_s(account.kind, account.usage) if cost_aware else 0.0
            with self._of(name):
                hot += [(minutes, name, segment) for segment, minutes in index.hottest(name, LINES)]
                cold += [(found.keep_s + shift, name, found.segment) for found in index.order(name, LINES)]
        hot.sort(key=lambda item: -item[0])
        cold.sort(key=lambda item: item[0])
        on_time()
        self.hottest = self._prefixes(index, hot[:LINES], counted=True)
        self.coldest = self._prefixes(index, cold[:LINES], counted=False)

    def read_journal(
        self, index: FullIndex, names: Sequence[NamespaceId], on_time: Callable[[], None]
    ) -> None:
        """Reads what went wrong for requests, and what more room would have brought.

        Raises what the index raises.
        """
        faults: list[FaultLine] = []
        gains: Counter[int] = Counter()
        for name in names:
            on_time()
            with self._of(name):
                outcomes = index.outcomes(name, _FAULTS, faults=True)
                faults += [self._fault(name, outcome) for outcome in outcomes]
                for ghosts in index.ghosts(name):
                    gains[ghosts.extra_bytes] += ghosts.blocks
        faults.sort(key=lambda line: -line.at_s)
        self.faults = tuple(faults[:_FAULTS])
        total, lines = 0, []
        for extra_bytes, blocks in sorted(gains.items()):
            total += blocks
            lines.append(GainLine(extra_bytes=extra_bytes, blocks=total))
        self.gains = tuple(lines)

    def _fault(self, name: NamespaceId, outcome: Outcome) -> FaultLine:
        lost = outcome.asked - outcome.served
        return FaultLine(
            at_s=outcome.at_s,
            where=outcome.op,
            namespace=name,
            subject=readable(outcome.request),
            problem=f"{readable(outcome.reason)}, {lost} of {outcome.asked} blocks",
        )

    def keep_to(self, names: Sequence[NamespaceId]) -> None:
        """Forgets all namespaces but these."""
        for gone in self._positions.keys() - set(names):
            del self._positions[gone]
        for gone in self.damaged.keys() - set(names):
            del self.damaged[gone]

    def _prefixes(
        self, index: FullIndex, found: Sequence[tuple[float, NamespaceId, SegmentId]], *, counted: bool
    ) -> tuple[PrefixLine, ...]:
        listings: dict[SegmentId, Listing] = {}
        for name in {name for _, name, _ in found}:
            asked = [segment for _, of, segment in found if of == name]
            with self._of(name):
                listings |= {one.segment: one for one in index.get(name, asked) if one is not None}
        return tuple(
            PrefixLine(
                namespace=name,
                segment=segment.hex(),
                depth=listing.record.depth,
                slots=listing.record.slots,
                stored_bytes=listing.record.nbytes,
                last_use_s=listing.last_use_s,
                minutes=round(number, 2) if counted else 0.0,
            )
            for number, name, segment in found
            # A segment may have been evicted since.
            if (listing := listings.get(segment)) is not None
        )
