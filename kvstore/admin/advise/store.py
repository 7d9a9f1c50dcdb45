"""A trace replayed under this store's own rules: segments, watermarks, admission (see replay.py).

The replay does what the index and the store do:

    match   the leading blocks whose entries name living segments; these are used, to the quarter of a minute
    save    the rest, from the first missing block on, cut into segments as the connectors cut them; leading
            blocks of a segment that are there already are left out
    evict   after a commit that leaves more than the upper watermark of the capacity: segments in the order of
            kvstore.index.eviction, down to the lower one

It leaves out, because it can: the time that computing and saving takes (a request finds what all those before
it have stored), what engines still have in their own memory (a trace says what was asked of the store), costs
(a trace has none; among the chains of one namespace they change nothing), pins, all quotas but the store's,
and `fresh_s`, which changes nothing if the least recently used goes first anyway.

If it is given the sessions of requests, and what is said of them, it does what the index does with that
(kvstore.index.sessions), but for what bounds salts, of which a trace knows nothing. So it can also be told
the ends of sessions that nobody has told: what only one session has used goes before all else as soon as its
last request is served.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from kvstore.admin.advise.replay import ReplayTotals
from kvstore.admin.advise.sessions import NONE, Heard
from kvstore.admin.advise.traces import Request, Trace
from kvstore.format.segment import ALIGN
from kvstore.index.contract import minute, saved_minute
from kvstore.index.eviction import MINUTE_S, watermarks
from kvstore.index.sessions import HIGH_S, LOW_S, WINDOW_S, Hint, Priority, retained_s
from kvstore.store.sessions import SESSION_SHARE, UNSALTED_SHARE

#: Bytes of the header of a segment of KV blocks: its own part, and that of each slot.
_HEADER_BYTES = 1000
_SLOT_HEADER_BYTES = 345
#: The minute of the last use of what an ended session alone has used.
ENDED = -1


def header_bytes(slots: int) -> int:
    """Returns about how many bytes the header of a segment of `slots` KV blocks has."""
    return -(-(_HEADER_BYTES + slots * _SLOT_HEADER_BYTES) // ALIGN) * ALIGN


@dataclass(frozen=True, slots=True)
class Rules:
    """How the store cuts segments."""

    #: The number of blocks of a segment, for each space of the trace.
    segment_blocks: Sequence[int]
    #: Returns the bytes of a segment's header, given its number of slots.
    header_bytes: Callable[[int], int] = header_bytes
    #: The share of the capacity that sessions may retain.
    retained_share: float = 0.0
    #: How many bytes one GET brings, and the largest gap that it reads through (`s3.range_bytes`,
    #: `s3.gap_bytes`).
    range_bytes: int = 8 << 20
    gap_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class Replayed:
    """One capacity under this store's rules."""

    totals: ReplayTotals
    #: The number of blocks found, for each request.
    hits: Sequence[int]
    #: The number of segments that were saved.
    segments: int
    #: Requests of an object store: a PUT for each part of a segment, GETs by what of it is loaded.
    puts: int
    gets: int


def noted(trace: Trace, window_s: float) -> list[int]:
    """Returns for each request how many of its leading blocks `admission.second_use` saves.

    Those are the ones that had been asked for before, in the same window of time or in the one before it. The
    few that a sketch takes for noted by mistake are left out.
    """
    never = -1 << 62
    last = [never] * trace.blocks
    found = []
    for request in trace.requests:
        window, chain = int(request.at_s // window_s), request.chain
        # A request that notes a block notes those before it, so the noted blocks are a prefix.
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
    """A segment that is stored, or has been evicted."""

    #: Ids rise, so that of two segments that are equal otherwise the older one is evicted first.
    number: int
    #: The range of its blocks in its chain, without `end`.
    begin: int
    end: int
    nbytes: int
    #: The minute of its last use.
    minute: float
    #: The session whose own it is; NONE if there is none.
    session: int
    living: bool = True
    #: Until when it is retained, in seconds; 0: it is not.
    until_s: int = 0

    @property
    def place(self) -> float:
        """The minute that counts as its last use."""
        return self.until_s // MINUTE_S if self.until_s else self.minute


@dataclass(slots=True)
class _Session:
    """What is known of a session in one space."""

    #: What it has saved, and what its last request used.
    saved: list[_Segment] = field(default_factory=list)
    used: list[_Segment] = field(default_factory=list)
    until_s: int = 0
    priority: Priority = "normal"
    #: The window of time in which it was used last.
    window: int = 0

    def retains_until_s(self, now_s: float) -> int:
        """Returns until when it retains what it uses now; 0: it doesn't."""
        until_s = self.until_s if self.until_s > now_s else 0
        return max(until_s, int(now_s) + HIGH_S) if self.priority == "high" else until_s


class StoreReplay:
    """The store at one capacity: what its index holds, request after request."""

    def __init__(self, trace: Trace, rules: Rules, capacity: int) -> None:
        self._trace = trace
        self._rules = rules
        self._high, self._low = watermarks(capacity)
        #: The segment that each block's entry names.
        self._entries: list[_Segment | None] = [None] * trace.blocks
        self._segments: list[_Segment] = []
        #: What is known of sessions, by space and session.
        self._sessions: dict[tuple[int, int], _Session] = {}
        # A trace names no salts.
        retained = int(capacity * rules.retained_share)
        self._most_retained = int(retained * UNSALTED_SHARE)
        self._most_of_session = int(retained * SESSION_SHARE)
        self._retained_bytes = 0
        #: A heap of (until when something is retained, number of the segment, its space).
        self._expiries: list[tuple[int, int, int]] = []
        #: A heap of (minute of the last use, rank of the namespace, minus the depth, number of the segment).
        #: It still has the former places of segments that were used again.
        self._order: list[tuple[float, int, int, int]] = []
        # Namespaces are merged in the order of their ids.
        ids = sorted((space.namespace, number) for number, space in enumerate(trace.spaces))
        self._rank = {number: rank for rank, (_, number) in enumerate(ids)}
        self.used_bytes = 0
        self.stored_bytes = 0
        self.puts = 0
        self.gets = 0
        self.evictions = 0
        self.evicted_bytes = 0

    def run(
        self,
        notes: Sequence[int] | None = None,
        sessions: Sequence[int] | None = None,
        told: Iterable[Heard] = (),
    ) -> Replayed:
        """Replays all requests. `notes` says how many leading blocks of each are worth saving; None: all.
        `sessions` are those of the requests, None if they aren't known; `told` is what is said of them, in
        the order of time.
        """
        tokens = [space.block_tokens for space in self._trace.spaces]
        waiting = deque(told)
        hits, saved = [], 0
        for number, request in enumerate(self._trace.requests):
            while waiting and waiting[0].after < number:
                self.tell(waiting.popleft())
            worth = len(request.chain) if notes is None else notes[number]
            found = self.serve(request, worth, NONE if sessions is None else sessions[number])
            hits.append(found)
            saved += found * tokens[request.space]
        totals = ReplayTotals(sum(hits), saved, self.stored_bytes, self.evictions, self.evicted_bytes)
        return Replayed(totals, hits, len(self._segments), self.puts, self.gets)

    def serve(self, request: Request, worth: int, session: int = NONE) -> int:
        """Serves a request whose first `worth` blocks are worth saving; returns how many blocks it found."""
        chain, now_s = request.chain, request.at_s
        self._expire(now_s)
        segments, ends = self._match(chain, 0, len(chain))
        hits = ends[-1] if ends else 0
        self._count_gets(request, segments, ends)
        known = self._recall(request.space, session, now_s) if session != NONE else None
        self._use(segments, known, session, now_s, request.space)
        if known is not None:
            known.used = segments
            if until_s := known.retains_until_s(now_s):
                self._retain(segments, session, until_s, request.space)
        step = self._rules.segment_blocks[request.space]
        for begin in range(hits, worth, step):
            self._save(request, begin, min(begin + step, worth), known, session)
        return hits

    def tell(self, heard: Heard) -> None:
        """Takes what is said of a session."""
        now_s, session, space = heard.at_s, heard.session, heard.space
        self._expire(now_s)
        if session == NONE:
            return
        known = self._recall(space, session, now_s)
        known.saved = [one for one in known.saved if one.living and one.session == session]
        known.priority = heard.priority or known.priority
        if heard.end:
            known.until_s = 0
        elif heard.retain_s is not None:
            known.until_s = int(now_s) + (retained_s(Hint(retain_s=heard.retain_s)) or 0)
        used = [one for one in known.used if one.living]
        if heard.retain_s is not None and not heard.end:
            # What is told of all that it uses is told of its own as well.
            used += [one for one in known.saved if one not in used]
        self._use(used, known, session, now_s, space)
        if heard.end:
            for segment in known.saved:
                self._release(segment, space)
                segment.minute = ENDED
                self._queue(segment, space)
        elif until_s := known.retains_until_s(now_s):
            self._retain(used, session, until_s, space)

    def _recall(self, space: int, session: int, now_s: float) -> _Session:
        """Returns what is known of a session: nothing of one that was not used in this window or the last."""
        window = int(now_s // WINDOW_S)
        known = self._sessions.get((space, session))
        if known is None or known.window < window - 1:
            known = self._sessions[space, session] = _Session()
        known.window = window
        return known

    def _use(
        self, segments: Sequence[_Segment], known: _Session | None, session: int, now_s: float, space: int
    ) -> None:
        """Notes uses by a session, or by none."""
        used = minute(now_s)
        for segment in segments:
            own = session != NONE and segment.session == session
            if not own:
                segment.session = NONE
            low = known is not None and known.priority == "low" and own
            counts = used - LOW_S // MINUTE_S if low else used
            if segment.until_s:
                # It counts as used later already; this is for when that is over.
                segment.minute = max(segment.minute, min(int(used), segment.place))
            elif segment.minute < counts:
                segment.minute = counts
                self._queue(segment, space)

    def _retain(self, segments: Sequence[_Segment], session: int, until_s: int, space: int) -> None:
        """Retains segments until then, heads first, until one finds no room."""
        full, own = False, self._sessions[space, session].saved
        mine = sum(one.nbytes for one in own if one.living and one.until_s and one.session == session)
        for segment in segments:
            upto_s = until_s
            if not segment.until_s:
                full = full or self._retained_bytes + segment.nbytes > self._most_retained
                full = full or mine + segment.nbytes > self._most_of_session
                if full:
                    continue
                self._retained_bytes += segment.nbytes
                mine += segment.nbytes
                # Of what is retained the last use is known to the minute.
                segment.minute = int(segment.minute)
            elif segment.session != session:
                upto_s = max(until_s, segment.until_s)
            segment.until_s = upto_s
            heappush(self._expiries, (upto_s, segment.number, space))
            self._queue(segment, space)

    def _release(self, segment: _Segment, space: int) -> None:
        """Retains a segment no more: it counts as used when it was."""
        if segment.until_s:
            segment.until_s = 0
            self._retained_bytes -= segment.nbytes
            self._queue(segment, space)

    def _expire(self, now_s: float) -> None:
        while self._expiries and self._expiries[0][0] <= now_s:
            until_s, number, space = heappop(self._expiries)
            segment = self._segments[number]
            if segment.living and segment.until_s == until_s:
                self._release(segment, space)

    def _count_gets(self, request: Request, segments: Sequence[_Segment], ends: Sequence[int]) -> None:
        """Counts the GETs that loads take, of what the engine has not itself (kvstore.store.reading,
        kvstore.payloads.ranged)."""
        space, rules, local = self._trace.spaces[request.space], self._rules, request.local or 0
        first = 0
        for segment, end in zip(segments, ends, strict=True):
            begin, first = max(first, local), end
            if begin >= end:
                continue
            gap = (begin - segment.begin) * space.block_bytes // space.parts
            nbytes = (end - begin) * space.block_bytes // space.parts
            through = gap <= rules.gap_bytes
            nbytes += gap + rules.header_bytes(segment.end - segment.begin) if through else 0
            self.gets += space.parts * (max(1, round(nbytes / rules.range_bytes)) + (not through))

    def _match(self, chain: Sequence[int], begin: int, end: int) -> tuple[list[_Segment], list[int]]:
        """Returns the segments that serve a piece of a chain, and where the blocks end that each serves.

        Each block is found by its own entry. The index's walk over entries finds no more: that would take an
        entry whose segment was evicted while an older one with the same block lives, and the older one is
        never used without the newer one, so it is evicted first.
        """
        entries, found, ends, at = self._entries, list[_Segment](), list[int](), begin
        while at < end:
            segment = entries[chain[at]]
            if segment is None or not segment.living:
                break
            found.append(segment)
            # The segment serves as many blocks as this chain shares with the one that it was saved from.
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
            ends.append(at)
        return found, ends

    def _save(self, request: Request, begin: int, end: int, known: _Session | None, session: int) -> None:
        begin = max(self._match(request.chain, begin, end)[1], default=begin)
        if begin == end:
            return
        slots, space = end - begin, self._trace.spaces[request.space]
        nbytes = slots * space.block_bytes + space.parts * self._rules.header_bytes(slots)
        used, until_s = saved_minute(request.at_s), 0
        if known is not None and known.priority == "low":
            used -= LOW_S // MINUTE_S
        elif known is not None:
            until_s = known.retains_until_s(request.at_s)
        segment = _Segment(len(self._segments), begin, end, nbytes, used, session)
        self._segments.append(segment)
        for block in request.chain[begin:end]:
            self._entries[block] = segment
        self._queue(segment, request.space)
        if known is not None:
            known.saved.append(segment)
        if until_s:
            self._retain([segment], session, until_s, request.space)
        self.used_bytes += nbytes
        self.stored_bytes += nbytes
        self.puts += space.parts
        if self.used_bytes > self._high:
            self._evict()

    def _queue(self, segment: _Segment, space: int) -> None:
        heappush(self._order, (segment.place, self._rank[space], -segment.begin, segment.number))

    def _evict(self) -> None:
        while self.used_bytes > self._low:
            place, _, _, number = heappop(self._order)
            segment = self._segments[number]
            if segment.living and segment.place == place:
                segment.living = False
                if segment.until_s:
                    segment.until_s = 0
                    self._retained_bytes -= segment.nbytes
                self.used_bytes -= segment.nbytes
                self.evictions += 1
                self.evicted_bytes += segment.nbytes
