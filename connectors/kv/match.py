"""Finds how much of a request the store can serve, usually with one index call per group, on a call thread.

For groups that need the whole prefix, the index returns the longest stored prefix (`Index.match`). The
shortest answer is the limit. Up to there the index is searched for blocks of the other groups (`Index.find`),
in spans from the end. The search ends when kvstore.rules.prefix finds a boundary on which all groups agree. A
request whose blocks were saved together costs one such span per group.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain

from connectors.choice.decision import Stretch, stretches_of
from connectors.engine.layout import Group
from connectors.planning import joined
from kvstore.index.port import Run
from kvstore.keys import NO_SESSION, SegmentId, SessionId, digests
from kvstore.rules.prefix import PrefixRule, longest_boundary, most_tokens
from kvstore.rules.tiers import Tier
from kvstore.store.space import Match, Space

#: Fewest blocks that one call looks up, if there are as many: those that must be there, and some before them.
_SPAN = 128
#: Most such calls per request; past them the rest is a miss. Several are needed only if a store has windows
#: and states of many prompts, of which most are evicted.
_MOST_CALLS = 32


@dataclass(frozen=True, slots=True)
class Found:
    """How much of a request can be loaded: `tokens` leading ones, which end at a boundary of all groups."""

    tokens: int
    #: Per group, runs that follow each other and cover at least what the group needs at the boundary.
    runs: tuple[list[Run], ...]
    #: Per group, leading blocks that are in the store: saving starts after them.
    stored: tuple[int, ...]
    #: Why it ends where it ends: "complete", or a reason of kvstore.rules.reasons.MISS_REASONS.
    reason: str
    #: Most tokens that could have been found.
    limit: int = 0
    #: If blocks are missing: a group that lacks a block, and its first missing block (in a window the last).
    lacks: tuple[int, int] = (0, 0)
    #: Segments of `runs` -> where their payloads lay at the last look. Any thread that brings a payload
    #: nearer overwrites its entry.
    tiers: dict[SegmentId, Tier] = field(default_factory=dict)
    #: Its stretches, by which the time to load it is estimated.
    stretches: tuple[Stretch, ...] = ()
    #: Microseconds in which the engines that saved it computed a token of it; 0: unknown.
    token_us: float = 0.0


class PendingMatch:
    """A match under way on a call thread."""

    def __init__(self, hashes: Sequence[bytes], end: float) -> None:
        """`hashes` are the request's block hashes now; `end` is the `time.monotonic` time of the deadline."""
        self.hashes = len(hashes)
        self._last = hashes[-1] if hashes else b""
        self.end = end
        self.asked_at = time.monotonic()
        #: When the answer was there; 0 before.
        self.answered_at = 0.0
        self._done = threading.Event()
        self._result: Found | None = None

    def is_of(self, hashes: Sequence[bytes]) -> bool:
        """Returns whether it is for these block hashes. They are a chain, so the last one stands for all."""
        return len(hashes) == self.hashes and (not hashes or hashes[-1] == self._last)

    def finish(self, result: Found) -> None:
        """Set the answer, usually on a call thread."""
        self._result = result
        self.answered_at = time.monotonic()
        self._done.set()

    def poll(self, patience_s: float) -> Found | None:
        """Returns the answer, or None if it is still out after `patience_s`."""
        if not self._done.is_set() and patience_s > 0:
            self._done.wait(patience_s)
        return self._result if self._done.is_set() else None


class Matcher:
    """Matches the requests of one engine with what a namespace holds. Any thread may call."""

    def __init__(
        self, space: Space, groups: Sequence[Group], hash_tokens: int, fits: Callable[[int, int], bool]
    ) -> None:
        """`fits(group, parts)` returns whether this engine can read a segment that was cut into `parts`."""
        self._space = space
        self._rules: list[PrefixRule] = [group.rule for group in groups]
        self._bytes = [group.part_bytes for group in groups]
        self._anywhere = [rule.reach for rule in self._rules] == ["prefix"]
        self._ratios = [rule.block_tokens // hash_tokens for rule in self._rules]
        self._hash_tokens = hash_tokens
        self._fits = fits

    def nothing(self, reason: str, limit: int = 0) -> Found:
        """Returns a match that found none of `limit` tokens."""
        return Found(0, tuple([] for _ in self._rules), tuple(0 for _ in self._rules), reason, limit)

    def limit(self, hashes: int, total_tokens: int) -> int:
        """Returns how many tokens of a request with `hashes` block hashes can be found at most."""
        return min(most_tokens(self._rules, total_tokens), hashes * self._hash_tokens)

    def find(
        self,
        hashes: Sequence[bytes],
        total_tokens: int,
        end: float,
        first: bytes | None = None,
        session: SessionId = NO_SESSION,
    ) -> Found:
        """Match a request of `total_tokens` with these block hashes, by the `time.monotonic` time `end`.

        `first` has the packed digests of group 0, if they are known already; `session` is the request's.
        Never raises.
        """
        whole: dict[int, Match] = {}
        limit = most = self.limit(len(hashes), total_tokens)
        reason, lacks = "complete", (0, 0)
        for group, rule in enumerate(self._rules):
            if rule.reach == "prefix":
                packed = first if first is not None and group == 0 else self._digests(hashes, group)
                match = self._fitting(group, self._space.match(packed, session=session))
                whole[group] = match
                if match.blocks * rule.block_tokens < limit:
                    limit, reason = match.blocks * rule.block_tokens, match.reason
                    lacks = (group, match.blocks)
        spans = _Spans(self._space, lambda group: self._digests(hashes, group), self._fits, end)
        tokens = longest_boundary(self._rules, limit, spans.present)
        if len(whole) < len(self._rules):
            sparse = self._count(bool(whole), limit, tokens, spans)
            if sparse is not None:
                reason, lacks = sparse, self._lacking(limit, spans)
        runs = tuple(
            whole[group].runs if group in whole else spans.runs(group, rule.needed(tokens))
            for group, rule in enumerate(self._rules)
        )
        stored = tuple(
            whole[group].blocks if group in whole else tokens // rule.block_tokens
            for group, rule in enumerate(self._rules)
        )
        if not tokens:
            return Found(tokens, runs, stored, reason, most, lacks)
        tiers = self._space.tiers(chain(*runs), end)
        sizes = [rule.block_tokens for rule in self._rules]
        stretches = stretches_of(runs, sizes, self._bytes, tokens, tiers, anywhere=self._anywhere)
        return Found(tokens, runs, stored, reason, most, lacks, tiers, stretches, _token_us(runs, sizes))

    def _digests(self, hashes: Sequence[bytes], group: int) -> bytes:
        ratio = self._ratios[group]
        # Hashes are a chain, so the last hash in a block stands for the whole block.
        return digests(hashes if ratio == 1 else hashes[ratio - 1 :: ratio], group)

    def _fitting(self, group: int, match: Match) -> Match:
        for i, run in enumerate(match.runs):
            if not self._fits(group, len(run.record.parts)):
                self._space.backends.counters.miss("namespace_mismatch", match.blocks - run.start)
                return Match(match.runs[:i], run.start, "namespace_mismatch")
        return match

    def _lacking(self, limit: int, spans: _Spans) -> tuple[int, int]:
        for group, rule in enumerate(self._rules):
            if rule.reach != "prefix":
                for block in reversed(rule.needed(limit)):
                    if not spans.is_there(group, block):
                        return group, block
        return 0, 0

    def _count(self, any_whole: bool, limit: int, tokens: int, spans: _Spans) -> str | None:
        """Count the match as far as windows and states decide it. Returns why it ends at `tokens`, or None if
        they don't limit it."""
        counters = self._space.backends.counters
        size = min(rule.block_tokens for rule in self._rules)
        if not any_whole:
            counters.add("match_calls")
            counters.add("match_blocks_asked", limit // size)
            counters.add("match_blocks_found", tokens // size)
        if tokens == limit:
            return None
        if spans.failure is None:
            counters.miss("window" if any_whole else "absent", (limit - tokens) // size)
        return spans.failure or ("window" if any_whole else "absent")


def _token_us(runs: Sequence[Sequence[Run]], sizes: Sequence[int]) -> float:
    """Returns what the records say that a token took to compute: the groups' costs are shares of the same
    tokens' ones, so they add up."""
    found = 0.0
    for one, size in zip(runs, sizes, strict=True):
        known = [run for run in one if run.record.cost_us]
        if blocks := sum(run.count for run in known):
            cost = sum(run.record.cost_us * run.count / run.record.slots for run in known)
            found += cost / (blocks * size)
    return found


class _Spans:
    """The blocks of one request that the index was asked for so far, by group."""

    def __init__(
        self,
        space: Space,
        packed: Callable[[int], bytes],
        fits: Callable[[int, int], bool],
        end: float,
    ) -> None:
        self._space = space
        self._digests = packed
        self._fits = fits
        self._end = end
        self._packed: dict[int, bytes] = {}
        self._known: defaultdict[int, dict[int, Run | None]] = defaultdict(dict)
        self._calls = 0
        #: Why some call had no answer, or None while all calls had answers.
        self.failure: str | None = None

    def present(self, group: int, blocks: range) -> list[bool]:
        """Returns which of `blocks` are stored. Asks the index for unknown blocks, together with some before
        them."""
        known = self._known[group]
        unknown = [block for block in blocks if block not in known]
        if unknown:
            self._look_up(group, range(max(0, min(blocks.start, blocks.stop - _SPAN)), unknown[-1] + 1))
        return [known.get(block) is not None for block in blocks]

    def _look_up(self, group: int, blocks: range) -> None:
        known = self._known[group]
        wanted = [block for block in blocks if block not in known]
        if self.failure is None and (self._calls >= _MOST_CALLS or time.monotonic() >= self._end):
            self.failure = "deadline"
            self._space.backends.counters.miss("deadline", len(wanted))
        if self.failure is not None:
            return
        self._calls += 1
        packed = self._packed.get(group) or self._packed.setdefault(group, self._digests(group))
        asked = b"".join(packed[16 * block : 16 * block + 16] for block in wanted)
        found = self._space.find(asked, packed)
        if found is None:
            self.failure = "unavailable"
            return
        for block, run in zip(wanted, found, strict=True):
            fits = run is not None and self._fits(group, len(run.record.parts))
            known[block] = run if fits else None

    def is_there(self, group: int, block: int) -> bool:
        """Returns whether a look-up has found a block."""
        return self._known[group].get(block) is not None

    def runs(self, group: int, blocks: range) -> list[Run]:
        """Returns runs of those of `blocks` that are there, with neighbours in one segment joined."""
        known = self._known[group]
        found = [(block, known.get(block)) for block in blocks]
        return joined(Run(at, one.segment, one.slot, 1, one.record) for at, one in found if one is not None)
