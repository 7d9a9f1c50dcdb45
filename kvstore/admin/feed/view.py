"""What routers have been told: the segments that the feed has announced, and what engines told of blocks.

Both are bounded by a number of blocks. A segment that has to go is taken back, so that routers never believe
more than this. A block of several segments is gone with the last of them.

A block has tokens for routers only if all blocks before it have: a router hangs a block whose parent it
doesn't know at the root, or drops it. The others are announced bare, by their hashes alone, and again when
they can have tokens. One thread's.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from kvstore.admin.feed.wire import BlockHash, BlockTokens, Owner, SizedHash, removed, stored
from kvstore.keys import NamespaceId, SegmentId

_Key = tuple[NamespaceId, SegmentId]
_Events = list[dict[str, Any]]


class Announced(NamedTuple):
    """A segment that routers know of."""

    owner: Owner
    #: Blocks before its first one.
    depth: int
    hashes: tuple[BlockHash, ...]


class _Blocks:
    """The blocks of one owner and group, as events name them."""

    def __init__(self) -> None:
        #: In how many segments a block is.
        self.copies: dict[BlockHash, int] = {}
        #: Those that every router was told of with tokens, after all blocks before them.
        self.whole: set[BlockHash] = set()


class RoutersView:
    """The segments that are announced. Its methods return the events that tell of a change."""

    def __init__(self, most_blocks: int) -> None:
        self._most = most_blocks
        self._segments: dict[_Key, Announced] = {}
        #: The same by their depths, the oldest first.
        self._depths: dict[int, dict[_Key, None]] = {}
        self._blocks: dict[tuple[str | None, int], _Blocks] = {}
        #: The blocks that segments wait for, of which the first bare block of each is one: its tokens are not
        #: known, or its parent's aren't.
        self._waits: dict[BlockHash, dict[_Key, None]] = {}
        self._waits_for: dict[_Key, tuple[BlockHash, ...]] = {}
        self.told: OrderedDict[SizedHash, BlockTokens] = OrderedDict()
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
        return sum(len(blocks.copies) - len(blocks.whole) for blocks in self._blocks.values())

    def get(self, key: _Key) -> Announced | None:
        """Returns a segment; None if it is not announced."""
        return self._segments.get(key)

    def of(self, namespace: NamespaceId) -> list[SegmentId]:
        """Returns the segments of one namespace."""
        return [segment for name, segment in self._segments if name == namespace]

    def add(self, key: _Key, segment: Announced) -> _Events:
        """Announces a segment; no event if it is announced. The deepest have to go for it: no router finds
        what follows a block that is gone."""
        if key in self._segments:
            return []
        self._segments[key] = segment
        self._depths.setdefault(segment.depth, {})[key] = None
        self.blocks += len(segment.hashes)
        copies = self._of(segment).copies
        for one in segment.hashes:
            copies[one] = copies.get(one, 0) + 1
        events = [*self._whole([key]), *self._bare(key)]
        while self.blocks > self._most and len(self._segments) > 1:
            events += self.drop(next(iter(self._depths[max(self._depths)])))
            self.crowded_out += 1
        return events

    def drop(self, key: _Key) -> _Events:
        """Takes a segment back; no event if it is not announced."""
        segment = self._segments.pop(key, None)
        if segment is None:
            return []
        self._wait(key, ())
        del self._depths[segment.depth][key]
        if not self._depths[segment.depth]:
            del self._depths[segment.depth]
        self.blocks -= len(segment.hashes)
        blocks, gone = self._of(segment), []
        for one in segment.hashes:
            blocks.copies[one] -= 1
            if not blocks.copies[one]:
                del blocks.copies[one]
                blocks.whole.discard(one)
                gone.append(one)
        return list(removed(segment.owner, gone))

    def learn(self, found: Sequence[tuple[SizedHash, BlockTokens]]) -> _Events:
        """Remembers what an engine told; announces with tokens what can have them now. What is announced is
        not forgotten."""
        again: dict[_Key, None] = {}
        for name, told in found:
            self.told[name] = told
            self.told.move_to_end(name)
            again.update(self._waits.get(name.block_hash, {}))
        for _ in range(len(self.told)):
            if len(self.told) <= self._most + self.blocks:
                break
            name, told = self.told.popitem(last=False)
            if any(name.block_hash in blocks.copies for blocks in self._blocks.values()):
                self.told[name] = told
        return list(self._whole(list(again)))

    def snapshot(self) -> Iterator[dict[str, Any]]:
        """Yields the events that announce everything, parents first. It is to be read to its end.

        What has lost a block before it is bare from now on: whoever reads this can't place it.
        """
        for blocks in self._blocks.values():
            blocks.whole.clear()
        for depth in sorted(self._depths):
            for key in self._depths[depth]:
                yield from self._whole([key])
                yield from self._bare(key)

    def _whole(self, keys: list[_Key]) -> Iterator[dict[str, Any]]:
        """Yields the events of blocks that can have tokens now, of these segments and of those that wait for
        them."""
        while keys:
            key = keys.pop(0)
            segment = self._segments[key]
            blocks, size = self._of(segment), segment.owner.spec.block_tokens
            known: list[BlockTokens] = []
            fresh: list[BlockHash] = []
            parent: BlockHash | None = None
            waits_for: tuple[BlockHash, ...] = ()
            for one in segment.hashes:
                told = self.told.get(SizedHash(one, size))
                placed = told is not None and (
                    told.parent == parent if known else told.parent is None or told.parent in blocks.whole
                )
                if told is None or not placed:
                    waits_for = (one,) if told is None or told.parent is None else (one, told.parent)
                    break
                known.append(told)
                if one not in blocks.whole:
                    fresh.append(one)
                parent = one
            self._wait(key, waits_for)
            blocks.whole.update(fresh)
            if fresh:
                at = segment.hashes.index(fresh[0])
                yield stored(segment.owner, segment.hashes[at : len(known)], known[at:])
            for one in fresh:
                keys += self._waits.get(one, {})

    def _bare(self, key: _Key) -> Iterator[dict[str, Any]]:
        """Yields the event of a segment's blocks that can't have tokens yet."""
        segment = self._segments[key]
        whole = self._of(segment).whole
        if bare := [one for one in segment.hashes if one not in whole]:
            yield stored(segment.owner, bare, ())

    def _wait(self, key: _Key, waits_for: tuple[BlockHash, ...]) -> None:
        for one in self._waits_for.pop(key, ()):
            del self._waits[one][key]
            if not self._waits[one]:
                del self._waits[one]
        if waits_for:
            self._waits_for[key] = waits_for
        for one in waits_for:
            self._waits.setdefault(one, {})[key] = None

    def _of(self, segment: Announced) -> _Blocks:
        return self._blocks.setdefault(segment.owner[:2], _Blocks())
