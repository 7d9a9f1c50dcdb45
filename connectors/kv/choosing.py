"""Decides for each request of an engine how much of its match is loaded, by what loads and steps have taken.

The reading side of the scheduler half asks once per request; everything here is arithmetic on its thread.
A load that is declined because a tier looks slow would never show that the tier is fast again. So while
nothing else measures the tier, a few blocks are read beside a request that computes them (a probe). Probes
repeat while the request computes, and delay no request: the next request profits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from connectors.choice.cost import Prefill, TokenCost
from connectors.choice.decision import WAIT, Decision, Why, choose
from connectors.choice.speeds import Expected
from connectors.engine.guard import bare, otherwise
from connectors.engine.names import BlockNames
from connectors.kv.match import Found
from connectors.kv.messages import GroupLoad, KVStoreWorkerMetadata
from connectors.kv.requests import KVEngine, Tracked
from connectors.planning import external_tokens, slice_runs
from kvstore.keys import SegmentId
from kvstore.rules.tiers import Tier
from schemas.settings import KVSettings

#: A decision about a request that the scheduler has not started is made again after this long, in seconds.
_AGAIN_S: Final = 0.25
#: A tier of which blocks are declined is probed if nothing was read from it for so many seconds.
_UNSEEN_S: Final = 0.5
#: Target duration of every second probe by the present estimate, in seconds and in latencies, and its fewest
#: blocks; a run is the limit. The other probes read one block.
_PROBE_S: Final = 0.1
_LATENCIES: Final = 2.0
_PROBE_BLOCKS: Final = 4
#: Share of a new measurement in the mean of what loads take besides their reads.
_GAIN: Final = 0.2

#: Why nothing is loaded -> the reason of the miss.
DECLINED: Final[Mapping[str, str]] = {
    "too_few": "below_threshold", "never": "switched_off", "computing_is_faster": "computing_is_faster",
    "part": "computing_is_faster",
}  # fmt: skip


class Choosing:
    """Decides for one engine. Belongs to the scheduler's thread."""

    def __init__(
        self,
        settings: KVSettings,
        engine: KVEngine,
        cost: TokenCost,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._groups = engine.groups
        self._hash_tokens = engine.hash_tokens
        self._cost = cost
        self._clock = clock
        self._expected = Expected(engine.ranks)
        #: Seconds that a load takes between the scheduler's steps, besides its reads.
        self._detour_s = 0.0
        #: The load that was declined last: the request's names, its match, the first declined token, and when
        #: computing should have reached the end.
        self._declined: tuple[BlockNames, Found, int, float] | None = None
        #: When a step looks next at whether a probe is due.
        self._look_at = 0.0
        #: Tier -> whether its last probe read a single block.
        self._small: dict[Tier, bool] = {}

    @bare
    def decide(self, tracked: Tracked, found: Found, computed: int, *, comes: bool = False) -> Decision:
        """Returns how much of what was found is to be loaded, and keeps that with the request. `comes`:
        another request is loading it."""
        now, of = self._clock(), tracked.decided_of
        same = not comes and of is not None and of[0] is found and of[1] == computed
        if same and tracked.decision is not None and now - tracked.decided_at < _AGAIN_S:
            return tracked.decision
        decision = self._decision(tracked, found, computed, now, comes)
        tracked.decision, tracked.decided_at = decision, now
        tracked.decided_of = None if comes else (found, computed)
        return decision

    def _decision(self, tracked: Tracked, found: Found, computed: int, now: float, comes: bool) -> Decision:
        new = found.tokens - computed
        if tracked.receiving is not None:
            # A hand-off's partial block alone is worth a load, but not if only the last token is missing,
            # which is computed here anyway.
            missing = min(found.tokens, tracked.request.num_tokens - 1) > computed
            return Decision(new if missing else 0, new, "handed_over")
        least = self._settings.min_load_blocks * self._hash_tokens
        if not external_tokens(found.tokens, computed, least):
            return Decision(0, max(0, new), "too_few")
        mode = self._settings.load
        if comes and mode == "adaptive":
            # It will be a local hit in a moment, whatever loading it once more would take.
            return Decision(new, new, "faster")
        prefill = self._prefill(found)
        if prefill is None or not found.stretches:
            why: Why = "unknown" if mode == "adaptive" else mode
            return Decision(0 if mode == "never" else new, new, why)
        decision = choose(
            found.stretches,
            found.tiers,
            computed,
            tracked.request.num_tokens,
            speed=self._expected.speed,
            ahead=self._expected.ahead,
            prefill=prefill,
            wait=WAIT[self._settings.objective],
            detour_s=self._detour_s,
        )
        if mode != "adaptive":
            # The estimates stay in the decision: they show what a setting without a choice costs.
            return replace(decision, tokens=new if mode == "always" else 0, why=mode, prefill=None)
        if 0 < decision.tokens < least:
            decision = replace(decision, tokens=0, why="computing_is_faster", load_s=0.0)
        if decision.tokens < decision.found:
            until = now + prefill.seconds(computed, tracked.request.num_tokens)
            self._declined = tracked.names, found, computed + decision.tokens, until
            self._look_at = now
        return decision

    @otherwise(bool)
    def pays_near(self, found: Found, prompt: int) -> bool:
        """Returns whether any of what was found of a prompt of so many tokens would be loaded from the
        node's folder. Any thread may ask: estimates that change at that moment are as good."""
        if self._settings.load != "adaptive":
            return self._settings.load == "always"
        prefill = self._prefill(found)
        if prefill is None or not found.stretches:
            return True
        near: dict[SegmentId, Tier] = dict.fromkeys(found.tiers, "folder")
        decision = choose(
            found.stretches,
            near,
            0,
            prompt,
            speed=self._expected.speed,
            ahead=lambda tier: 0,
            prefill=prefill,
            wait=WAIT[self._settings.objective],
            detour_s=self._detour_s,
        )
        return decision.tokens > 0

    def _prefill(self, found: Found) -> Prefill | None:
        return self._cost.prefill() or (Prefill(found.token_us) if found.token_us else None)

    @otherwise(list)
    def take_probes(self) -> list[GroupLoad]:
        """Returns the reads that this step begins for the sake of measuring."""
        if self._declined is None or (now := self._clock()) < self._look_at:
            return []
        names, found, stop, until = self._declined
        if now > until:
            self.forget()  # after this look
        self._look_at = now + _UNSEEN_S / 4
        return self._probe(names.all(), found, stop, now)

    def forget(self) -> None:
        """Probe nothing of what was declined up to now."""
        self._declined = None

    def _probe(self, hashes: Sequence[bytes], found: Found, stop: int, now: float) -> list[GroupLoad]:
        """Returns reads of a few of the declined blocks, from each tier of which nothing is known lately."""
        size, probes = self._groups[0].rule.block_tokens, []
        ratio, nbytes = size // self._hash_tokens, self._groups[0].part_bytes
        lie = {found.tiers.get(one.segment, "bucket") for one in found.stretches if one.stop > stop}
        due = {tier for tier in lie if self._expected.old(tier, now, _UNSEEN_S)}
        for run in found.runs[0] if due else ():
            tier = found.tiers.get(run.segment, "bucket")
            if tier not in due or (run.start + run.count) * size <= stop:
                continue
            due.remove(tier)
            # A small one tells the latency, and one that should take as long for its bytes the bandwidth.
            # Beside another one, which takes long, a small one tells whether that is over.
            speed, most, beside = self._expected.speed(tier), 1, self._expected.asked(tier, now)
            if not beside:
                self._small[tier] = not self._small.get(tier, True)
            if not (beside or self._small[tier]):
                seconds = max(_PROBE_S, _LATENCIES * speed.latency_s)
                most = max(_PROBE_BLOCKS, int(speed.bytes_per_s * seconds / nbytes))
            blocks = range(run.start, run.start + min(run.count, most))
            names = list(hashes[(blocks.start + 1) * ratio - 1 : blocks.stop * ratio : ratio])
            probes.append(
                GroupLoad(0, blocks.start, slice_runs([run], blocks), names, {}, {run.segment: tier}, nbytes)
            )
        return probes

    def planned(self, tracked: Tracked, groups: Sequence[GroupLoad]) -> Prefill | None:
        """Record that a load is sent to the workers. Returns the cost of computing it, by which they see when
        computing is faster, or None if the load is made in any case."""
        tracked.load_began, tracked.load_read_s = self._clock(), 0.0
        for group in groups:
            for run in group.runs:
                tier: Tier | None = group.tiers.get(run.segment)
                if tier is not None:
                    self._expected.plan(tier, run.count * group.block_bytes)
        return tracked.decision.prefill if tracked.decision is not None else None

    def reported(self, meta: KVStoreWorkerMetadata) -> None:
        """Take what the workers have measured."""
        now = self._clock()
        for rank, measured in meta.speeds.items():
            self._expected.take(rank, measured, now)

    def loaded(self, tracked: Tracked) -> None:
        """Record that a request's load is complete."""
        if tracked.load_read_s:
            beside = max(0.0, self._clock() - tracked.load_began - tracked.load_read_s)
            self._detour_s += (min(beside, 4 * self._detour_s + 0.01) - self._detour_s) * _GAIN
