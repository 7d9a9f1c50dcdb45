"""What stands out in a cache: what is used most and least, what was evicted, what went wrong, what more room
would bring. Read from the index's journal and its order of eviction, for `cache-admin serve`."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence

from kvstore.catalogue import Account, Event, Listing, Maintenance
from kvstore.eviction import shift_s
from kvstore.keys import NamespaceId, SegmentId
from kvstore.ports import Outcome
from schemas.serving import EvictionLine, FaultLine, Gain, PrefixLine

_TEXT_CHARS = 128
#: Lines of each list, and of namespaces those that are asked for their hottest and coldest.
LINES = 12
_FAULTS = 30
_EVICTIONS = 60
_ASKED = 16
#: Per namespace and look: the ring is read through in a few looks, and kept up with from then on.
_EVENT_PAGE, _EVENT_PAGES = 1000, 4
_OUTCOMES = 200

#: Reasons that mean that something doesn't work. The others are how a cache is: absent, held, not admitted.
FAULTS = frozenset(
    {
        "corrupt", "namespace_mismatch", "missing", "unavailable", "deadline", "throttled", "breaker_open",
        "permission", "error", "failed", "refused",
    }
)  # fmt: skip


def readable(text: object) -> str:
    """`text` as labels and pages can carry it: of bounded length, and without what could change how the rest
    reads, such as line ends, directional overrides or halves of surrogate pairs."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in str(text)[:_TEXT_CHARS])


class Noticed:
    """One thread reads, which replaces the tuples as a whole; any thread may look at them.

    `on_time` is called between two calls of the index, and raises if there have been enough.
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
        self.gains: tuple[Gain, ...] = ()

    def read_events(
        self, index: Maintenance, names: Sequence[NamespaceId], on_time: Callable[[], None]
    ) -> None:
        """What was evicted since the last call; at first, what the ring still knows. Raises what the index
        raises."""
        lately = list(self.evictions)
        for name in names:
            for _ in range(_EVENT_PAGES):
                on_time()
                events = self._after(index, name)
                lately += [line for event in events if (line := self._line(name, event)) is not None]
                lately = heapq.nlargest(_EVICTIONS, lately, key=lambda line: line.at_s)
                self.evictions = tuple(lately)
                if len(events) < _EVENT_PAGE:
                    break
        self.by_rule = dict(sorted(self._by_rule.items()))

    def _after(self, index: Maintenance, name: NamespaceId) -> list[Event]:
        try:
            events = index.events(name, after=self._positions.get(name, ""), limit=_EVENT_PAGE)
        except ValueError:
            # The index was emptied and counts anew.
            events = index.events(name, limit=_EVENT_PAGE)
        if events:
            self._positions[name] = events[-1].position
        return events

    def _line(self, name: NamespaceId, event: Event) -> EvictionLine | None:
        if event.op == "commit" or event.rule is None:
            return None
        if event.at_s >= self._began_s:
            self._by_rule[event.rule] += 1
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
        index: Maintenance,
        accounts: Sequence[Account],
        on_time: Callable[[], None],
        *,
        cost_aware: bool,
    ) -> None:
        """The hottest and the coldest, of the first of `accounts`. Raises what the index raises."""
        hot: list[tuple[float, NamespaceId, SegmentId]] = []
        cold: list[tuple[float, NamespaceId, SegmentId]] = []
        for account in accounts[:_ASKED]:
            on_time()
            name = account.namespace
            hot += [(minutes, name, segment) for segment, minutes in index.hottest(name, LINES)]
            # Across namespaces the order is that of kvstore.eviction.
            shift = shift_s(account.kind, account.usage) if cost_aware else 0.0
            cold += [(found.keep_s + shift, name, found.segment) for found in index.order(name, LINES)]
        hot.sort(key=lambda item: -item[0])
        cold.sort(key=lambda item: item[0])
        on_time()
        self.hottest = _prefixes(index, hot[:LINES], counted=True)
        self.coldest = _prefixes(index, cold[:LINES], counted=False)

    def read_journal(
        self, index: Maintenance, names: Sequence[NamespaceId], on_time: Callable[[], None]
    ) -> None:
        """What went wrong for requests, and what more room would have brought. Raises what the index
        raises."""
        faults: list[FaultLine] = []
        gains: Counter[int] = Counter()
        for name in names:
            on_time()
            outcomes = index.outcomes(name, _OUTCOMES)
            faults += [self._fault(name, outcome) for outcome in outcomes if outcome.reason in FAULTS]
            for ghosts in index.ghosts(name):
                gains[ghosts.extra_bytes] += ghosts.blocks
        faults.sort(key=lambda line: -line.at_s)
        self.faults = tuple(faults[:_FAULTS])
        total, lines = 0, []
        for extra_bytes, blocks in sorted(gains.items()):
            total += blocks
            lines.append(Gain(extra_bytes=extra_bytes, blocks=total))
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
        """Only these namespaces exist."""
        for gone in self._positions.keys() - set(names):
            del self._positions[gone]


def _prefixes(
    index: Maintenance, found: Sequence[tuple[float, NamespaceId, SegmentId]], *, counted: bool
) -> tuple[PrefixLine, ...]:
    listings: dict[SegmentId, Listing] = {}
    for name in {name for _, name, _ in found}:
        asked = [segment for _, of, segment in found if of == name]
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
        # Evicted since.
        if (listing := listings.get(segment)) is not None
    )
