"""A trace replayed under this store's own rules: segments, watermarks, admission (see kvstore.admin.replay).

What is done here is what the index and the store do:

    match   the leading blocks whose entries name living segments; these are used, to the minute
    save    the rest, from the first missing block on, cut into segments as the connectors cut them; of each,
            leading blocks that are there already are left out
    evict   after a commit that leaves more than `high` of the capacity: segments in the order of
            kvstore.eviction until no more than `low` of it is left

What is left out, and why it can be: the time that computing and saving takes (a request finds what all those
before it have stored), what engines still have in their own memory (a trace says what was asked of the
store), costs (a trace has none; among the chains of one namespace they change nothing), pins, quotas but the
store's, and `fresh_s`, which changes nothing where the least recently used goes first anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from kvstore.admin.replay import Tally
from kvstore.admin.traces import Request, Trace
from kvstore.codec import ALIGN
from kvstore.eviction import MINUTE_S

#: The header of a segment of KV blocks: its own part, and that of each slot.
_HEADER_BYTES = 1000
_SLOT_HEADER_BYTES = 345


def header_bytes(slots: int) -> int:
    """About how long the header of a segment of so many KV blocks is."""
    return -(-(_HEADER_BYTES + slots * _SLOT_HEADER_BYTES) // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class Rules:
    """How the store cuts segments and evicts them (schemas.settings)."""

    #: Per space of the trace, how many blocks make a segment.
    segment_blocks: Sequence[int]
    high: float
    low: float
    #: Of a segment of so many slots.
    header_bytes: Callable[[int], int] = header_bytes


def noted(trace: Trace, window_s: float) -> list[int]:
    """Per request, how many of its leading blocks had been asked for before, in its window of time or the one
    before it: those that `admission.second_use` saves. Without the few that a sketch takes for noted by
    mistake.
    """
    never = -1 << 62
    last = [never] * trace.blocks
    found = []
    for request in trace.requests:
        window, chain = int(request.at_s // window_s), request.chain
        # Whoever notes a block notes what precedes it, so what is noted is a prefix.
        low, high = 0, len(chain)
        while low < high:
            middle = (low + high) // 2
            if last[chain[middle]] >= window - 1:
                low = middle + 1
            else:
                high = middle
        found.append(low)
        for block in chain:
            last[block] = window
    return found


@dataclass(slots=True)
class _Segment:
    """One that lives, or has been evicted."""

    #: Ids rise, so that of two that are equal in all else the older one goes first.
    number: int
    #: Where it begins in its chain, and where the next one would.
    begin: int
    end: int
    nbytes: int
    #: Of its last use.
    minute: int
    living: bool = True


class StoreReplay:
    """The store at one capacity: what its index holds, request after request."""

    def __init__(self, trace: Trace, rules: Rules, capacity: int) -> None:
        self._trace = trace
        self._rules = rules
        self._high, self._low = rules.high * capacity, int(rules.low * capacity)
        #: Per block, the segment that its entry names.
        self._entries: list[_Segment | None] = [None] * trace.blocks
        self._segments: list[_Segment] = []
        #: Minute of the last use, namespace, less the depth, number of the segment; with places that segments
        #: have left since.
        self._order: list[tuple[int, int, int, int]] = []
        # Namespaces are merged in the order of their ids.
        ids = sorted((space.namespace, number) for number, space in enumerate(trace.spaces))
        self._rank = {number: rank for rank, (_, number) in enumerate(ids)}
        self.used_bytes = 0
        self.stored_bytes = 0
        self.evictions = 0
        self.evicted_bytes = 0

    def run(self, notes: Sequence[int] | None = None) -> Tally:
        """Replay all requests. `notes`: how many leading blocks of each are worth saving; None: all."""
        tokens = [space.block_tokens for space in self._trace.spaces]
        blocks = saved = 0
        for number, request in enumerate(self._trace.requests):
            worth = len(request.chain) if notes is None else notes[number]
            hits = self.serve(request, worth)
            blocks += hits
            saved += hits * tokens[request.space]
        return Tally(blocks, saved, self.stored_bytes, self.evictions, self.evicted_bytes)

    def serve(self, request: Request, worth: int) -> int:
        """One request, of which `worth` leading blocks are worth saving; returns how many blocks it found."""
        chain, minute = request.chain, int(request.at_s // MINUTE_S)
        segments, hits = self._match(chain, 0, len(chain))
        for segment in segments:
            if segment.minute < minute:
                segment.minute = minute
                self._queue(segment, request.space)
        step = self._rules.segment_blocks[request.space]
        for begin in range(hits, worth, step):
            self._save(request, begin, min(begin + step, worth), minute)
        return hits

    def _match(self, chain: Sequence[int], begin: int, end: int) -> tuple[list[_Segment], int]:
        """The segments that serve a piece of a chain, and where the blocks end that they serve.

        Of the blocks that are there, each by its own entry. The index's walk over entries finds no more: that
        takes an entry whose segment has gone while an older one with the same block lives, and an older one
        is never used without the newer one, and goes first.
        """
        entries, found, at = self._entries, [], begin
        while at < end:
            segment = entries[chain[at]]
            if segment is None or not segment.living:
                break
            found.append(segment)
            # As much of the segment as this chain shares with the one that it was saved of.
            low, at = at, min(segment.end, end)
            if entries[chain[at - 1]] is not segment:
                high = at - 1
                while high - low > 1:
                    middle = (low + high) // 2
                    if entries[chain[middle]] is segment:
                        low = middle
                    else:
                        high = middle
                at = high
        return found, at

    def _save(self, request: Request, begin: int, end: int, minute: int) -> None:
        begin = self._match(request.chain, begin, end)[1]
        if begin == end:
            return
        slots, space = end - begin, self._trace.spaces[request.space]
        nbytes = slots * space.block_bytes + space.parts * self._rules.header_bytes(slots)
        segment = _Segment(len(self._segments), begin, end, nbytes, minute)
        self._segments.append(segment)
        for block in request.chain[begin:end]:
            self._entries[block] = segment
        self._queue(segment, request.space)
        self.used_bytes += nbytes
        self.stored_bytes += nbytes
        if self.used_bytes > self._high:
            self._evict()

    def _queue(self, segment: _Segment, space: int) -> None:
        heappush(self._order, (segment.minute, self._rank[space], -segment.begin, segment.number))

    def _evict(self) -> None:
        while self.used_bytes > self._low:
            minute, _, _, number = heappop(self._order)
            segment = self._segments[number]
            if segment.living and segment.minute == minute:
                segment.living = False
                self.used_bytes -= segment.nbytes
                self.evictions += 1
                self.evicted_bytes += segment.nbytes
