"""What blocks that a store finds are worth: replays of a recording at one capacity, and the bill of it.

A request gains the blocks that the store has and its engine has not. They are worth the time that computing
them takes, which depends on how many tokens precede them, on all GPUs of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median_low

from kvstore.admin.advise.reports import CapacityAdvice, PriceList
from kvstore.admin.simulate.replay import ReplayTotals
from kvstore.admin.simulate.simulate import cuts
from kvstore.admin.simulate.store import Rules, StoreReplay, noted
from kvstore.admin.simulate.traces import TokenCosts, Trace
from schemas.settings import Settings

MONTH_S = 730 * 3600.0
GB = 1 << 30
#: A recording that is shorter counts as so long: from less nothing can be said of a month.
_LEAST_S = 60.0
#: The depth, in tokens, at which costs that differ are compared.
_DEPTH = 2048


@dataclass(frozen=True, slots=True)
class Cost:
    """What computing takes: a token, and how much more for each before it; in seconds."""

    token_s: float
    depth_s: float = 0.0

    def seconds(self, first: int, stop: int) -> float:
        """Returns what the tokens from `first` up to `stop` take."""
        return (stop - first) * (self.token_s + self.depth_s * (first + stop) / 2)


@dataclass(frozen=True, slots=True)
class Given:
    """What the person knows that asks for advice."""

    prices: PriceList
    #: GPUs of an engine; None: as it was recorded or, of older recordings, as many as its blocks have parts.
    gpus: int | None = None
    #: Tokens that an engine computes of prompts in a second; None: as it was recorded.
    prefill_tokens_s: float | None = None
    #: What encoding an item takes, in seconds; None: unknown.
    encode_s: float | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """One capacity under one way to admit."""

    capacity: int
    second_use: bool
    totals: ReplayTotals
    #: The number of blocks found, for each request.
    hits: Sequence[int]
    segments: int
    #: Requests of an object store.
    puts: int
    gets: int


class Worth:
    """What the hits of one recording are worth."""

    def __init__(self, trace: Trace, settings: Settings, given: Given) -> None:
        self.trace = trace
        self.given = given
        self._notes = noted(trace, settings.admission.window_s)
        self._rules = Rules(
            cuts(trace, settings),
            retained_share=settings.sessions.retain_share,
            range_bytes=settings.s3.range_bytes,
            gap_bytes=settings.s3.gap_bytes,
        )
        self.costs = [self._cost_of(number) for number in range(len(trace.spaces))]
        span = trace.requests[-1].at_s - trace.requests[0].at_s
        self.seconds = max(_LEAST_S, span)
        #: How many recordings a month has.
        self.months = MONTH_S / self.seconds

    def _cost_of(self, number: int) -> Cost | None:
        space, given = self.trace.spaces[number], self.given
        if space.kind == "ec":
            return Cost(given.encode_s) if given.encode_s is not None else None
        if given.prefill_tokens_s is not None:
            return Cost(1 / given.prefill_tokens_s)
        # After a reset an engine's namespace is another one, of the same model.
        told = [
            cost
            for cost in self.trace.costs
            if cost.space == number or (space.model and self.trace.spaces[cost.space].model == space.model)
        ]
        if not told:
            return None

        def at_depth(cost: TokenCosts) -> float:
            return cost.token_us + cost.depth_us * _DEPTH

        middle = median_low(map(at_depth, told))
        one = next(cost for cost in told if at_depth(cost) == middle)
        return Cost(one.token_us / 1e6, one.depth_us / 1e6)

    @cached_property
    def known(self) -> bool:
        """Whether it is known what computing costs, of some namespace."""
        return any(cost is not None for cost in self.costs)

    @cached_property
    def unpriced(self) -> dict[str, list[int]]:
        """The numbers of the spaces that are asked for and have no known cost, by kind."""
        found: dict[str, list[int]] = {}
        for number in sorted({request.space for request in self.trace.requests}):
            if self.costs[number] is None:
                found.setdefault(self.trace.spaces[number].kind, []).append(number)
        return found

    @property
    def uneven(self) -> bool:
        """Returns whether some engines were recorded for more than twice as long as others, or at other
        times, so that all of them together tell of no time that was."""
        spans = self.trace.spans.values()
        lengths = [last - first for first, last in spans]
        apart = max(first for first, _ in spans) > min(last for _, last in spans)
        return apart or max(lengths) > 2 * min(lengths)

    def gpus(self, space: int) -> int:
        """Returns how many GPUs an engine of this space has."""
        about = self.trace.spaces[space]
        return self.given.gpus or about.gpus or about.parts

    def replay(self, capacity: int, *, second_use: bool) -> Replayed:
        """Replays the recording under this store's own rules."""
        replay = StoreReplay(self.trace, self._rules, capacity)
        tokens = [space.block_tokens for space in self.trace.spaces]
        hits = []
        for number, request in enumerate(self.trace.requests):
            worth = self._notes[number] if second_use else len(request.chain)
            hits.append(replay.serve(request, worth))
        saved = sum(
            found * tokens[request.space] for found, request in zip(hits, self.trace.requests, strict=True)
        )
        totals = ReplayTotals(sum(hits), saved, replay.stored_bytes, replay.evictions, replay.evicted_bytes)
        return Replayed(capacity, second_use, totals, hits, replay.segments, replay.puts, replay.gets)

    def gained(self, hits: Sequence[int]) -> list[int]:
        """Returns for each request how many of the blocks found its engine had not."""
        return [
            max(0, found - (request.local or 0))
            for found, request in zip(hits, self.trace.requests, strict=True)
        ]

    def seconds_of(self, hits: Sequence[int]) -> list[float]:
        """Returns for each request the GPU seconds that computing what it gains would have taken, as far as
        that is known."""
        found = []
        for blocks, gain, request in zip(hits, self.gained(hits), self.trace.requests, strict=True):
            cost, space = self.costs[request.space], self.trace.spaces[request.space]
            # Of items the unit is the item.
            each = space.block_tokens or 1
            takes = cost.seconds((blocks - gain) * each, blocks * each) if cost is not None else 0.0
            found.append(takes * self.gpus(request.space))
        return found

    def money(self, gpu_seconds: float) -> float:
        """Returns what so many seconds of a GPU cost."""
        return gpu_seconds * self.given.prices.gpu_hour / 3600

    def advice(self, one: Replayed) -> CapacityAdvice:
        """Returns what a capacity brings and costs in a month."""
        prices, months, trace = self.given.prices, self.months, self.trace
        gained = self.gained(one.hits)
        loaded = [
            gain * trace.spaces[request.space].block_bytes
            for gain, request in zip(gained, trace.requests, strict=True)
        ]
        storage = one.capacity / GB * prices.gb_month
        requests = months * (one.puts * prices.put_1000 + one.gets * prices.get_1000) / 1000
        moved = one.totals.stored_bytes * prices.upload_gb + sum(loaded) * prices.download_gb
        transfer = months * moved / GB
        gpu = months * sum(self.seconds_of(one.hits)) if self.known else None
        saved = None if gpu is None else self.money(gpu)
        return CapacityAdvice(
            capacity_bytes=one.capacity,
            second_use=one.second_use,
            hit_ratio=one.totals.hit_blocks / trace.references,
            gained_ratio=sum(gained) / trace.references,
            gained_tokens_month=round(
                months
                * sum(
                    gain * trace.spaces[request.space].block_tokens
                    for gain, request in zip(gained, trace.requests, strict=True)
                )
            ),
            gpu_seconds_month=gpu,
            saved_month=saved,
            storage_month=storage,
            requests_month=requests,
            transfer_month=transfer,
            net_month=None if saved is None else saved - storage - requests - transfer,
        )
