"""What routers have been told: the segments that the feed has announced, and what engines told of blocks.

Both are bounded by a number of blocks. A segment that has to go is taken back, so that routers never believe
more than this. A block of several segments is gone with the last of them. One thread's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvstore.admin.feed.wire import BlockHash, BlockTokens, Owner, Told, removed, stored
from kvstore.keys import NamespaceId, SegmentId

_Key = tuple[NamespaceId, SegmentId]
_Events = list[dict[str, Any]]


class Announced(NamedTuple):
    """A segment that routers know of."""

    owner: Owner
    hashes: tuple[BlockHash, ...]


class RoutersView:
    """The segments that are announced, oldest first. Its methods return the events that tell of a change."""

    def __init__(self, most_blocks: int) -> None:
        self._most = most_blocks
        self._segments: OrderedDict[_Key, Announced] = OrderedDict()
        #: In how many segments a block is, by the owner and group that events name.
        self._copies: dict[tuple[str | None, int], dict[BlockHash, int]] = {}
        #: Blocks that were announced without tokens, and the segments that have them: one, as a rule, but
        #: groups of one model name their blocks alike.
        self._bare: dict[BlockHash, tuple[_Key, ...]] = {}
        self.told: OrderedDict[Told, BlockTokens] = OrderedDict()
        #: Blocks of all segments, those in several counted as often.
        self.blocks = 0
        #: Segments that were taken back for want of room.
        self.crowded_out = 0

    def __len__(self) -> int:
        return len(self._segments)

    def __contains__(self, key: _Key) -> bool:
        return key in self._segments

    @property
    def bare_blocks(self) -> int:
        """How many blocks are announced without tokens."""
        return len(self._bare)

    def of(self, namespace: NamespaceId) -> list[SegmentId]:
        """Returns the segments of one namespace."""
        return [segment for name, segment in self._segments if name == namespace]

    def add(self, key: _Key, segment: Announced) -> _Events:
        """Announces a segment; no event if it is announced."""
        if key in self._segments:
            return []
        self._segments[key] = segment
        self.blocks += len(segment.hashes)
        copies = self._copies.setdefault(segment.owner[:2], {})
        for one in segment.hashes:
            copies[one] = copies.get(one, 0) + 1
        events = self._stored(key, segment)
        while self.blocks > self._most and len(self._segments) > 1:
            events += self.drop(next(iter(self._segments)))
            self.crowded_out += 1
        return events

    def drop(self, key: _Key) -> _Events:
        """Takes a segment back; no event if it is not announced."""
        segment = self._segments.pop(key, None)
        if segment is None:
            return []
        self.blocks -= len(segment.hashes)
        copies, gone = self._copies[segment.owner[:2]], []
        for one in segment.hashes:
            copies[one] -= 1
            if not copies[one]:
                del copies[one]
                gone.append(one)
            if left := tuple(other for other in self._bare.pop(one, ()) if other != key):
                self._bare[one] = left
        return list(removed(segment.owner, gone))

    def learn(self, found: Sequence[tuple[Told, BlockTokens]]) -> _Events:
        """Remembers what an engine told; announces again, with tokens, what was announced without."""
        again: dict[_Key, None] = {}
        for name, told in found:
            self.told[name] = told
            self.told.move_to_end(name)
            again.update(dict.fromkeys(self._bare.pop(name.block_hash, ())))
        while len(self.told) > self._most:
            self.told.popitem(last=False)
        return [event for key in again for event in self._stored(key, self._segments[key])]

    def snapshot(self) -> Iterator[dict[str, Any]]:
        """Yields the events that announce everything, in the order in which it was."""
        for segment in self._segments.values():
            yield from stored(segment.owner, segment.hashes, self.told)

    def _stored(self, key: _Key, segment: Announced) -> _Events:
        events, own = list(stored(segment.owner, segment.hashes, self.told)), (key,)
        for event in events:
            if not event["token_ids"]:
                for one in event["block_hashes"]:
                    others = self._bare.get(one, own)
                    self._bare[one] = others if key in others else (*others, key)
        return events
