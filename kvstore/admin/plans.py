"""Which segments to move, in which order: most recently used first, heads of chains before their tails."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from kvstore.admin.cache import Cache
from kvstore.admin.segments import find_segment
from kvstore.catalogue import Listing
from kvstore.keys import NamespaceId, SegmentId
from schemas.reports import Amount
from schemas.transfers import NAMED, Left

#: Records asked for in one call, so that a plan of millions holds none of them.
_PAGE = 256


@dataclass(frozen=True, slots=True)
class Planned:
    """One segment to move, without its record: there may be millions."""

    namespace: NamespaceId
    segment: SegmentId
    used_s: float
    depth: int
    blocks: int
    nbytes: int
    ranks: int

    @classmethod
    def of(cls, namespace: NamespaceId, listing: Listing) -> Planned:
        """From what the index lists."""
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
class Plan:
    """What to move."""

    #: Those that it may move segments of: id -> canonical JSON.
    namespaces: dict[NamespaceId, str]
    entries: list[Planned]
    #: What didn't fit under the bound.
    beyond: Amount

    @property
    def amount(self) -> Amount:
        """All of it."""
        return amount_of(self.entries)

    @property
    def payloads(self) -> int:
        """How many objects they are."""
        return sum(entry.ranks for entry in self.entries)

    def listings(self, cache: Cache) -> Iterator[tuple[Planned, Listing | None]]:
        """Each segment in turn with its record of this moment; None if it was evicted meanwhile."""
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
) -> Plan:
    """Choose segments of the namespaces whose ids start so (none: of all).

    `segments`: only those whose ids start so. `depth`: only those that begin within the first `depth`
    blocks of their chains. `max_bytes`: of what remains the most recently used, up to the first that
    doesn't fit: what follows it in a chain would be useless. Raises UnknownName and what the index raises.
    """
    known = cache.namespaces()
    chosen = sorted({cache.namespace(prefix) for prefix in prefixes}) if prefixes else list(known)
    if segments:
        found = [Planned.of(*find_segment(cache, prefix, chosen)) for prefix in dict.fromkeys(segments)]
        chosen = sorted({entry.namespace for entry in found})
    else:
        found = [Planned.of(name, listing) for name in chosen for listing in _listings(cache, name)]
    if depth is not None:
        found = [entry for entry in found if entry.depth < depth]
    found.sort(key=lambda entry: (-entry.used_s, entry.depth, entry.namespace, entry.segment))
    end = len(found) if max_bytes is None else _fitting(found, max_bytes)
    return Plan({name: known[name] for name in chosen}, found[:end], amount_of(found[end:]))


def _listings(cache: Cache, name: NamespaceId) -> Iterator[Listing]:
    return iter(()) if cache.index is None else cache.index.segments(name)


def _fitting(entries: Sequence[Planned], max_bytes: int) -> int:
    """How many from the start on have at most `max_bytes` together."""
    total = 0
    for count, entry in enumerate(entries):
        total += entry.nbytes
        if total > max_bytes:
            return count
    return len(entries)


def amount_of(entries: Iterable[Planned]) -> Amount:
    """What they add up to."""
    tally = Tally()
    for entry in entries:
        tally.add(entry.blocks, entry.nbytes)
    return tally.amount


@dataclass(slots=True)
class Tally:
    """Segments counted one by one."""

    segments: int = 0
    blocks: int = 0
    nbytes: int = 0

    def add(self, blocks: int, nbytes: int) -> None:
        """One segment more."""
        self.segments += 1
        self.blocks += blocks
        self.nbytes += nbytes

    @property
    def amount(self) -> Amount:
        """As a report has it."""
        return Amount(segments=self.segments, blocks=self.blocks, stored_bytes=self.nbytes)


@dataclass(slots=True)
class LeftOut:
    """Segments that were left out: all of them counted, the first ones named."""

    count: int = 0
    named: list[Left] = field(default_factory=list)

    def add(self, namespace: str, segment: SegmentId, reason: object) -> None:
        """One more."""
        self.count += 1
        if len(self.named) < NAMED:
            self.named.append(Left(namespace=namespace, segment=segment.hex(), reason=str(reason)))
