"""ShardedJournal: the journals of a namespace's shards as one.

Shards' events are merged by their times, which are those of their nodes' clocks; within one shard they keep
their order. A position is the positions of all shards, joined by hyphens: what comes after it is what comes
after each part of it in its shard.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from heapq import merge
from itertools import islice

from kvstore.index.contract import BadArgument
from kvstore.index.maintenance import Event, Ghosts, Operation
from kvstore.index.port import Outcome
from kvstore.index.sharding.requests import ShardedRequests
from kvstore.keys import NamespaceId


class ShardedJournal(ShardedRequests):
    """The part of ShardedIndex that reads journals."""

    def events(self, namespace: NamespaceId, *, after: str = "", limit: int = 1000) -> list[Event]:
        shards = self._shards(namespace)
        if len(shards) == 1:
            return self._leaf.events(shards[0], after=after, limit=limit)
        places = _split(after, len(shards))
        found = [
            self._leaf.events(name, after=place, limit=limit)
            for name, place in zip(shards, places, strict=True)
        ]
        # What isn't read yet of a shard is no longer lost in silence from here on.
        places = [
            place or (_before(some[0].position) if some else "")
            for place, some in zip(places, found, strict=True)
        ]
        numbered = [[(one, number) for one in some] for number, some in enumerate(found)]
        merged = merge(*numbered, key=lambda item: item[0].at_s)
        return list(_placed(islice(merged, max(0, limit)), places))

    def last_position(self, namespace: NamespaceId) -> str:
        shards = self._shards(namespace)
        if len(shards) == 1:
            return self._leaf.last_position(shards[0])
        return _join(self._each(shards, self._leaf.last_position))

    def has_lost(self, namespace: NamespaceId, after: str) -> bool:
        """Each shard tells it of its part. Of one that had no event then it can't be told whether its first
        is still there: it may be lost, as soon as there is any."""
        shards = self._shards(namespace)
        if len(shards) == 1 or not after:
            return self._leaf.has_lost(shards[0], after)
        places = dict(zip(shards, _split(after, len(shards)), strict=True))

        def has_lost(name: NamespaceId) -> bool:
            if not places[name]:
                return bool(self._leaf.last_position(name))
            return self._leaf.has_lost(name, places[name])

        return any(self._each(shards, has_lost))

    def outcomes(self, namespace: NamespaceId, limit: int, *, faults: bool = False) -> list[Outcome]:
        shards = self._shards(namespace)
        found = self._each(shards, lambda name: self._leaf.outcomes(name, limit, faults=faults))
        return list(islice(merge(*found, key=lambda one: -one.at_s), max(0, limit)))

    def seen(self, namespace: NamespaceId) -> Mapping[str, int]:
        counted: Counter[str] = Counter()
        for some in self._each(self._shards(namespace), self._leaf.seen):
            counted.update(some)
        return counted

    def ghosts(self, namespace: NamespaceId) -> list[Ghosts]:
        """More room is shared by all shards: what one of them would have served with a number of bytes, it
        serves if the namespace has that for each."""
        shards = self._shards(namespace)
        blocks: Counter[int] = Counter()
        for some in self._each(shards, self._leaf.ghosts):
            for one in some:
                blocks[one.extra_bytes * len(shards)] += one.blocks
        return [Ghosts(extra, blocks[extra]) for extra in sorted(blocks)]

    def record_operation(self, verb: str, what: str) -> None:
        self._leaf.record_operation(verb, what)

    def operations(self, limit: int) -> list[Operation]:
        return self._leaf.operations(limit)


def _placed(found: Iterator[tuple[Event, int]], places: Sequence[str]) -> Iterator[Event]:
    """Yields events of numbered shards with their positions in the whole, which begins at `places`."""
    known = list(places)
    for one, number in found:
        known[number] = one.position
        yield replace(one, position=_join(known))


def _before(position: str) -> str:
    """Returns the position right before that of an event."""
    *most, last = position.split("-")
    if int(last) or not most:
        return "-".join([*most, str(int(last) - 1)])
    return "-".join([_before("-".join(most)), str((1 << 64) - 1)])


def _join(places: Sequence[str]) -> str:
    """Returns the position that stands for a position in each shard; "" for the beginning of all of them."""
    width = max((place.count("-") + 1 for place in places if place), default=0)
    beginning = "-".join("0" * width)
    return "-".join(place or beginning for place in places) if width else ""


def _split(position: str, shards: int) -> list[str]:
    """Returns the position in each shard. Raises BadArgument."""
    if not position:
        return [""] * shards
    numbers = position.split("-")
    width, rest = divmod(len(numbers), shards)
    if rest or not all(one.isascii() and one.isdecimal() for one in numbers):
        raise BadArgument(f"{position!r} is no position of an event of a namespace in {shards} shards")
    places = ["-".join(numbers[at : at + width]) for at in range(0, len(numbers), width)]
    return ["" if not place.strip("0-") else place for place in places]
