"""A trace replayed under this store's own rules: segments, watermarks, admission (see kvstore.admin.replay).

What is done here is what the index and the store do, on the same walk over entries (kvstore.index.walk):

    match   the leading blocks that are proved to be in living segments; these are used, to the minute
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
from kvstore.index.walk import walk
from kvstore.keys import SegmentId
from schemas.records import PartRecord, SegmentRecord

#: The header of a segment of KV blocks: its own part, and that of each slot.
_HEADER_BYTES = 1500
_SLOT_HEADER_BYTES = 375
#: What the walk gets for a living segment; it only looks whether there is one.
_LIVING = SegmentRecord((PartRecord(0, (0,)),), 1, "none", 0)


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
    """A living one."""

    #: Where it begins in its chain.
    depth: int
    slots: int
    nbytes: int
    #: In the order of eviction: minute of the last use, space, less the depth.
    place: tuple[int, int, int]


class StoreReplay:
    """The store at one capacity: what its index holds, request after request."""

    def __init__(self, trace: Trace, rules: Rules, capacity: int) -> None:
        self._trace = trace
        self._rules = rules
        self._high, self._low = rules.high * capacity, int(rules.low * capacity)
        #: Per block, the segment that its entry names, dead or alive.
        self._entries: list[SegmentId | None] = [None] * trace.blocks
        self._living: dict[SegmentId, _Segment] = {}
        #: Segments in the order of eviction, with places that they have left since.
        self._order: list[tuple[tuple[int, int, int], SegmentId]] = []
        # Namespaces are merged in the order of their ids.
        ids = sorted((space.namespace, number) for number, space in enumerate(trace.spaces))
        self._rank = {number: rank for rank, (_, number) in enumerate(ids)}
        self._made = 0
        self.used_bytes = 0
        self.stored_bytes = 0
        self.evictions = 0
        self.evicted_bytes = 0

    def run(self, notes: Sequence[int] | None = None) -> Tally:
        """Replay all requests. `notes`: how many leading blocks of each are worth saving; None: all."""
        tokens = [space.block_tokens for space in self._trace.spaces]
        blocks = saved = 0
        for number, request in enumerate(self._trace.requests):
            noted = len(request.chain) if notes is None else notes[number]
            hits = self.serve(request, noted)
            blocks += hits
            saved += hits * tokens[request.space]
        return Tally(blocks, saved, self.stored_bytes, self.evictions, self.evicted_bytes)

    def serve(self, request: Request, noted: int) -> int:
        """One request, of which `noted` leading blocks are worth saving; returns how many blocks it found."""
        chain, minute = request.chain, int(request.at_s // MINUTE_S)
        segments, hits = self._match(chain, 0, len(chain))
        for name in segments:
            self._use(name, minute)
        step = self._rules.segment_blocks[request.space]
        for begin in range(hits, noted, step):
            self._save(request, begin, min(begin + step, noted), minute)
        return hits

    def _match(self, chain: Sequence[int], begin: int, end: int) -> tuple[list[SegmentId], int]:
        """The segments that serve a piece of a chain, and how many of its leading blocks they serve."""
        entries, living = self._entries, self._living

        def lookup(position: int) -> tuple[SegmentId, int] | None:
            name = entries[chain[begin + position]]
            segment = None if name is None else living.get(name)
            if name is None or segment is None:
                return None
            return name, begin + position - segment.depth

        runs = walk(end - begin, lookup, lambda name: _LIVING)
        return [run.segment for run in runs], runs[-1].start + runs[-1].count if runs else 0

    def _save(self, request: Request, begin: int, end: int, minute: int) -> None:
        begin += self._match(request.chain, begin, end)[1]
        if begin == end:
            return
        slots = end - begin
        nbytes = slots * self._trace.spaces[request.space].block_bytes + self._rules.header_bytes(slots)
        name = SegmentId(self._made.to_bytes(8, "big"))
        self._made += 1
        place = (minute, self._rank[request.space], -begin)
        self._living[name] = _Segment(begin, slots, nbytes, place)
        heappush(self._order, (place, name))
        for block in request.chain[begin:end]:
            self._entries[block] = name
        self.used_bytes += nbytes
        self.stored_bytes += nbytes
        if self.used_bytes > self._high:
            self._evict()

    def _use(self, name: SegmentId, minute: int) -> None:
        segment = self._living[name]
        if segment.place[0] < minute:
            segment.place = (minute, *segment.place[1:])
            heappush(self._order, (segment.place, name))

    def _evict(self) -> None:
        while self.used_bytes > self._low:
            place, name = heappop(self._order)
            segment = self._living.get(name)
            if segment is None or segment.place != place:
                continue
            del self._living[name]
            self.used_bytes -= segment.nbytes
            self.evictions += 1
            self.evicted_bytes += segment.nbytes
