"""Passes on what happens to an engine's requests; the other modules tell it each thing once.

    the journal   gets what became of matches, loads and saves (connectors.telemetry.outcomes)
    events        tell routers what the store has and what it lacks (connectors.kv.events)
    statistics    are counts and durations, for vLLM's log and Prometheus (connectors.kv.metrics)
    spans         say where the time of each request went, if vLLM traces (connectors.telemetry.spans)

Positions and numbers in the journal are in blocks of the namespace, of `hash_tokens` tokens; numbers of saves
are in blocks of their group. Everything but `asked` belongs to the scheduler's thread, and only appends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Final

from connectors.choice.decision import Decision
from connectors.engine.guard import Followers, otherwise
from connectors.engine.layout import Group
from connectors.engine.step import RequestView
from connectors.kv.events import NoEvents
from connectors.kv.match import Found, PendingMatch
from connectors.kv.messages import CUT, GroupLoad, Save, Wrong
from connectors.kv.metrics import RENAMED, KVStoreStats
from connectors.kv.save import Progress
from connectors.telemetry.metrics import Tally
from connectors.telemetry.outcomes import Missing, Outcomes, SaveOutcomes
from connectors.telemetry.spans import LoadTimes, OpenSpans
from connectors.telemetry.ways import FARTHEST, Way
from kvstore.index.port import MISSING_DIGESTS
from kvstore.keys import SegmentId, digests
from kvstore.rules.tiers import Tier
from kvstore.rules.weighed import Weighed
from kvstore.store.space import Space
from kvstore.store.store import Store

#: Reasons of a match that mean that the next block is not in the store, or is of no use.
_GONE: Final = ("absent", "quarantined")


class Observer:
    """Passes on what happens to the requests of one engine. Call `entered` before anything else."""

    def __init__(
        self,
        store: Store,
        groups: Sequence[Group],
        hash_tokens: int,
        events: NoEvents,
        open_spans: OpenSpans,
        followers: Followers,
    ) -> None:
        """Each event goes to all `followers`, each guarded by itself."""
        self._groups = groups
        self._hash_tokens = hash_tokens
        self._events = followers.guard(events, methodcaller("forget"))
        self._tally = tally = Tally(store.counters, RENAMED)
        self._spans = followers.guard(
            open_spans(lambda count: tally.add("events{spans_lost}", count)), methodcaller("restart")
        )
        self._outcomes = followers.guard(Outcomes(store))
        #: Outcomes.tick and NoEvents.take themselves: they run in every step, so a call in between is spared.
        self.tick = self._outcomes.tick
        self.take_events = self._events.take
        self._saves = followers.guard(SaveOutcomes(self._outcomes), SaveOutcomes.restart)

    def entered(self, space: Space | None) -> None:
        """Report about this namespace from now on, or with None about no namespace.

        Saves under way to the former one are not reported any more, and its announced blocks are taken back.
        """
        self._tally.state(f"namespace{{{'' if space is None else space.id}}}", 1)
        if space is not None:
            self._space = space
            self._saves.restart()
            self._spans.use(space.id)
        self._events.restart(self._space.id)

    def arrived(self, request: RequestView) -> None:
        """Record that a request has arrived."""
        self._spans.arrived(request.request_id, request.trace_headers)

    def begun(self, request: RequestView, way: Way) -> None:
        """Count where a request's tokens come from: it gets its turn to compute what is missing."""
        tokens = way.runs(request.num_computed_tokens, request.num_prompt_tokens)
        for source, count in tokens.items():
            self._tally.add(f"prompt_tokens{{{source}}}", count)
        self._spans.begun(request.request_id, tokens)

    def finished(self, request: RequestView) -> None:
        """Record that a request has ended."""
        self._spans.finished(request.request_id)

    def close(self) -> None:
        """Send what is left of the spans, if that is quick."""
        self._spans.close()

    # ---- matches --------------------------------------------------------------------------------

    def asked(self, hashes: int, found: Found, seconds: float) -> None:
        """Count the index's answer for a request with `hashes` block hashes. Runs on a call thread."""
        self._tally.add("matches")
        self._tally.add("asked_tokens", hashes * self._hash_tokens)
        self._tally.add("matched_tokens", found.tokens)
        self._tally.timed("match_seconds", seconds)

    def matched(
        self,
        request: RequestView,
        names: Sequence[bytes],
        found: Found,
        limit: int,
        computed: int,
        tokens: int,
        declined: str,
        weighed: Weighed | None,
    ) -> None:
        """Write a match to the journal, once per request, whose blocks have these `names`: `limit` tokens
        could have been found, the engine has `computed` itself, and `tokens` beyond those are promised.
        `declined` is why no more are, as one of kvstore.rules.reasons.MISS_REASONS; "" if all that was found
        is. `weighed` is what was, if anything."""
        if declined == "audited":
            self._tally.add("audits{declined}")
        size = self._hash_tokens
        # Rounded up, because a prompt that was handed over may have a partial block.
        blocks = -(-max(limit, found.tokens) // size)
        have, served = computed // size, -(-tokens // size)
        reason, (group, block) = found.reason, found.lacks
        declined = declined if found.tokens > computed + tokens else ""
        if declined or found.tokens < computed:
            # Blocks that the engine has itself aren't asked of the store, whether that has them or not.
            reason = declined or reason
            group, block = 0, (computed + tokens) // self._size(0)
        self._outcomes.note(
            self._space,
            request.request_id,
            "match",
            asked=blocks - have,
            served=served,
            reason=reason,
            position=have + served,
            missing=self._missing(names, group, block),
            chain=self._missing(names, group, 0, 1),
            detail=_detail(reason, weighed),
        )

    def answered(self, request: RequestView, found: Found, pending: PendingMatch, decision: Decision) -> None:
        """Record what the index has answered a request's first question, and what was decided upon it."""
        self._spans.matched(
            request.request_id, pending.asked_at, pending.answered_at, found.tokens, found.reason
        )
        self._spans.decided(request.request_id, decision)

    def missing(self, hashes: Sequence[bytes], found: Found, asked_at: float) -> None:
        """Announce which of a request's blocks the index lacked at `asked_at` (`time.monotonic`)."""
        if found.reason in _GONE:
            self._events.missing(hashes, found.stored, asked_at)

    def bad(self, segments: set[SegmentId]) -> None:
        """Announce the loss of segments that failed verification and are evicted."""
        self._events.bad(segments)

    # ---- loads ----------------------------------------------------------------------------------

    @property
    @otherwise(bool)
    def wants_times(self) -> bool:
        """Returns whether the workers are to report the times of loads."""
        return self._spans.on

    def load_planned(self, request: RequestView, way: Way, groups: Sequence[GroupLoad], tokens: int) -> None:
        """Record that a load of `tokens` tokens is planned, and on the request's `way` from where."""
        self._tally.add("promised_tokens", tokens)
        self._events.loading(request, groups)
        way.loads = self._loads(groups, way.hit + tokens)
        self._spans.load_planned(request.request_id, tokens, way.loading())

    def _loads(self, groups: Sequence[GroupLoad], stop: int) -> list[tuple[int, Tier]]:
        """Returns where the parts of a load up to the token `stop` end, and the tier of each."""
        # A load without blocks fails, whatever its tier.
        parts: list[tuple[int, Tier]] = []
        last = FARTHEST
        if groups:
            widest = max(groups, key=lambda one: len(one.hashes) * self._size(one.group))
            size, tiers = self._size(widest.group), widest.tiers
            last = next(iter(tiers.values()), FARTHEST)
            # A long prompt has hundreds of runs, mostly in one tier.
            for run in widest.runs if len(set(tiers.values())) > 1 else ():
                if (tier := tiers.get(run.segment, FARTHEST)) != last:
                    parts.append((run.start * size, last))
                    last = tier
        return [*parts, (stop, last)]

    def load_times(self, times: Mapping[str, LoadTimes]) -> None:
        """Record what some ranks did for the loads of these requests."""
        for request_id, one in times.items():
            self._spans.load_times(request_id, one)

    def load_failed(
        self,
        request: RequestView,
        names: Sequence[bytes],
        first_token: int,
        tokens: int,
        groups: Mapping[int, int],
        reason: str,
    ) -> None:
        """Report a failed load of `tokens` tokens from `first_token` on; `groups` has the first block that it
        did not bring, by group."""
        self._tally.add("loads{failed}")
        self._spans.load_failed(request.request_id, reason)
        size = self._hash_tokens
        missing, group = min((block * self._size(number), number) for number, block in groups.items())
        self._outcomes.note(
            self._space,
            request.request_id,
            "load",
            asked=-(-tokens // size),
            served=max(0, missing - first_token) // size,
            reason=reason,
            position=max(missing, first_token) // size,
            missing=self._missing(names, group, groups[group]),
        )

    def load_cut(
        self,
        request: RequestView,
        names: Sequence[bytes],
        first_token: int,
        tokens: int,
        brought: int,
        cost_us: float,
        weighed: Weighed | None,
    ) -> None:
        """Report a cut load of `tokens` tokens from `first_token` on. It brought `brought` of them, which
        would have taken `cost_us` to compute. `weighed` are the weighed times of its plan."""
        self._tally.add("loads{cut}")
        self._spans.load_failed(request.request_id, CUT)
        self._tally.add("loaded_tokens", brought)
        self._tally.add("saved_compute_seconds", cost_us / 1e6)
        size = self._hash_tokens
        self._outcomes.note(
            self._space,
            request.request_id,
            "load",
            asked=-(-tokens // size),
            served=brought // size,
            reason=CUT,
            position=(first_token + brought) // size,
            missing=self._missing(names, 0, (first_token + brought) // self._size(0)),
            detail=_detail(CUT, weighed),
        )

    def loaded(self, tokens: int, cost_us: float) -> None:
        """Count a load that has brought `tokens` tokens, which would have taken `cost_us` to compute."""
        self._tally.add("loads{complete}")
        self._tally.add("loaded_tokens", tokens)
        self._tally.add("saved_compute_seconds", cost_us / 1e6)

    def regretted(self, seconds: float, compute_s: float, measured: bool) -> None:
        """Observe a regret (connectors.choice.regret) of a request that takes `compute_s` to compute."""
        share = seconds / compute_s if compute_s else 0.0
        if measured:
            self._tally.timed("measured_regret_ratio", share)
        else:
            self._tally.timed("regret_seconds", seconds)
            self._tally.timed("regret_ratio", share)

    def load_ended(self, request_id: str) -> None:
        """Record that a load has ended, one way or the other."""
        self._events.load_ended(request_id)
        self._spans.load_ended(request_id)

    def wrong(self, wrong: Wrong) -> None:
        """Write to the journal that stored blocks differ from what the engine has computed."""
        self._outcomes.note(
            self._space,
            wrong.request_id,
            # It was not promised to the request, so that it is no load that failed.
            "save",
            asked=len(wrong.hashes),
            served=0,
            reason="wrong",
            position=wrong.first * self._size(wrong.group) // self._hash_tokens,
            missing=partial(digests, wrong.hashes[:MISSING_DIGESTS], wrong.group),
        )

    # ---- saves ----------------------------------------------------------------------------------

    def saves_planned(self, request: RequestView, saves: Sequence[Save]) -> None:
        """Record that these saves of a request are on their way to the workers."""
        self._events.planned(request, saves)
        for save in saves:
            first = (save.first + save.joins.blocks) * self._size(save.group) // self._hash_tokens
            missing = partial(digests, save.added[:MISSING_DIGESTS], save.group)
            self._saves.planned(save.segment, request.request_id, len(save.added), first, missing)
            self._spans.save_planned(save.segment, request.request_id, save.group, len(save.hashes))

    def not_saved(self, segment: SegmentId, reason: str) -> None:
        """Record why some rank has not stored its part."""
        self._saves.because(segment, reason)

    def save_ended(self, segment: SegmentId, blocks: Sequence[tuple[int, bytes]]) -> None:
        """Report a segment that all ranks have ended. `blocks` are all of its blocks, by group and hash, if
        they are stored, else none."""
        if blocks and blocks[0][0] == 0:
            self._tally.add("saved_tokens", len(blocks) * self._size(0))
        self._events.ended(segment, written=bool(blocks))
        reason = self._saves.ended(self._space, segment, stored=bool(blocks))
        self._spans.save_ended(segment, "stored" if blocks else reason)

    def save_dropped(self, save: Save) -> None:
        """Report a planned save that is given up before any rank gets it."""
        self.not_saved(save.segment, "dropped")
        self.save_ended(save.segment, ())

    def refused(self, request: RequestView, names: Sequence[bytes], progress: Progress, reason: str) -> None:
        """Write to the journal that some blocks of a request that has ended were not worth saving."""
        first = progress.refused_from // self._hash_tokens
        self._outcomes.note(
            self._space,
            request.request_id,
            "save",
            asked=progress.refused,
            served=0,
            reason=reason,
            position=first,
            missing=self._missing(names, 0, progress.refused_from // self._size(0)),
        )

    # ---- the rest -------------------------------------------------------------------------------

    def reset(self, *, renamed: bool) -> None:
        """Count a reset; `renamed`: the engine goes on under another name of its weights."""
        self._tally.add("resets{renamed}" if renamed else "resets{left_alone}")

    def named(self, *, taken: bool) -> None:
        """Count a name for the weights; `taken`: it was believed."""
        self._tally.add("resets{named}" if taken else "resets{refused_name}")

    def take_stats(self, busy: bool, gauges: Callable[[], dict[str, float]]) -> KVStoreStats | None:
        """Returns what Tally.take does, as vLLM's statistics."""
        report = self._tally.take(busy, gauges)
        return None if report is None else KVStoreStats(report)

    def _size(self, group: int) -> int:
        return self._groups[group].rule.block_tokens

    def _missing(
        self, names: Sequence[bytes], group: int, block: int, most: int = MISSING_DIGESTS
    ) -> Missing:
        ratio = self._size(group) // self._hash_tokens
        some = names[(block + 1) * ratio - 1 : (block + most) * ratio : ratio]
        return lambda: digests(some, group)


def _detail(reason: str, weighed: Weighed | None) -> str:
    """Returns what goes with a reason in the journal."""
    return weighed.told() if weighed is not None and reason == CUT else ""
