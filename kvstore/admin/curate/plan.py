"""Plans which segments to move: the most recently used first, heads of chains before their tails."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kvstore.admin.backends import Cache
from kvstore.admin.counting import AmountSum
from kvstore.admin.inspect.show import find_segment
from kvstore.admin.reports import Amount
from kvstore.index.maintenance import Listing
from kvstore.keys import NamespaceId, SegmentId

#: Records asked for in one call: a plan of millions of segments holds none of theirs.
_PAGE = 256


@dataclass(frozen=True, slots=True)
class Planned:
    """A segment to move, without its record, because there may be millions."""

    namespace: NamespaceId
    segment: SegmentId
    used_s: float
    depth: int
    blocks: int
    nbytes: int
    ranks: int

    @classmethod
    def of(cls, namespace: NamespaceId, listing: Listing) -> Planned:
        """Returns the plan's line for a segment that the index lists."""
        record = listing.record
        return cls(
            namespace,
            listing.segment,
            listing.last_use_s,
            record.depth,
            record.slots,
            record.nbytes,
            len(record.parts),
        )


@dataclass(frozen=True, slots=True)
class MovePlan:
    """The segments to move, in that order."""

    #: Canonical JSON of the namespaces that the segments may be of, by id.
    namespaces: dict[NamespaceId, str]
    entries: list[Planned]
    #: The amount that didn't fit under the bound.
    beyond: Amount

    @property
    def amount(self) -> Amount:
        """The amount of all segments."""
        return amount_of(self.entries)

    @property
    def payloads(self) -> int:
        """The number of payloads of all segments."""
        return sum(entry.ranks for entry in self.entries)

    def listings(self, cache: Cache) -> Iterator[tuple[Planned, Listing | None]]:
        """Yields each segment with its present record, or None if it was evicted meanwhile."""
        for start in range(0, len(self.entries), _PAGE):
            page = self.entries[start : start + _PAGE]
            wanted: dict[NamespaceId, list[SegmentId]] = defaultdict(list)
            for entry in page:
                wanted[entry.namespace].append(entry.segment)
            found: dict[tuple[NamespaceId, SegmentId], Listing | None] = {}
            for namespace, segments in wanted.items():
                assert cache.index is not None, "something is planned, so there is an index"
                for segment, listing in zip(segments, cache.index.get(namespace, segments), strict=True):
                    found[namespace, segment] = listing
            for entry in page:
                yield entry, found[entry.namespace, entry.segment]


def plan(
    cache: Cache,
    prefixes: Sequence[str],
    *,
    segments: Sequence[str] = (),
    depth: int | None = None,
    max_bytes: int | None = None,
) -> MovePlan:
    """Chooses segments of the namespaces whose ids start with one of `prefixes`, or of all if there are none.

    `segments` restricts it to those whose ids start so, `depth` to those that begin within the first `depth`
    blocks of their chains. Of the rest `max_bytes` takes the most recently used, up to the first that doesn't
    fit: what follows it in a chain would be useless. Raises UnknownName and what the index raises.
    """
    known = cache.namespaces()
    chosen = sorted({cache.namespace(prefix) for prefix in prefixes}) if prefixes else list(known)
    if segments:
        found = [Planned.of(*find_segment(cache, prefix, chosen)) for prefix in dict.fromkeys(segments)]
        chosen = sorted({entry.namespace for entry in found})
    else:
        found = [Planned.of(name, listing) for name in chosen for listing in cache.segments(name)]
    if depth is not None:
        found = [entry for entry in found if entry.depth < depth]
    found.sort(key=lambda entry: (-entry.used_s, entry.depth, entry.namespace, entry.segment))
    return plan_of({name: known[name] for name in chosen}, found, max_bytes)


def plan_of(namespaces: dict[NamespaceId, str], entries: list[Planned], max_bytes: int | None) -> MovePlan:
    """Returns a plan of the entries up to the first that `max_bytes` has no room for."""
    end = len(entries) if max_bytes is None else _fitting(entries, max_bytes)
    return MovePlan(namespaces, entries[:end], amount_of(entries[end:]))


def _fitting(entries: Sequence[Planned], max_bytes: int) -> int:
    """Returns how many, counted from the first, have at most `max_bytes` together."""
    total = 0
    for count, entry in enumerate(entries):
        total += entry.nbytes
        if total > max_bytes:
            return count
    return len(entries)


def amount_of(entries: Iterable[Planned]) -> Amount:
    """Returns what the entries add up to."""
    tally = AmountSum()
    for entry in entries:
        tally.add(entry.blocks, entry.nbytes)
    return tally.amount
