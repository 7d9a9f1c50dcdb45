"""What blocks that a store finds are worth: replays of a recording at one capacity, and the bill of it.

A request gains the blocks that the store has and its engine has not. They are worth the time that computing
them takes, which depends on how many tokens precede them, on all GPUs of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import median_low

from kvstore.admin.advise.reports import CapacityAdvice, Policy, PriceList
from kvstore.admin.advise.sessions import ends, sessions, told
from kvstore.admin.advise.store import Replayed, Rules, StoreReplay, noted
from kvstore.admin.advise.traces import TokenCosts, Trace
from kvstore.rules.segments import segment_blocks
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
class Question:
    """The questions to a recording, with the prices and limits of the person who asks."""

    settings: Settings
    prices: PriceList
    #: URLs for the settings to paste.
    index: str
    payloads: str
    #: GPUs of an engine; None: as it was recorded or, of older recordings, as many as its blocks have parts.
    gpus: int | None = None
    #: Tokens that an engine computes of prompts in a second; None: as it was recorded.
    prefill_tokens_s: float | None = None
    #: What encoding an item takes, in seconds; None: unknown.
    encode_s: float | None = None
    #: Bytes that a node reads in a second; None: unknown.
    bandwidth: int | None = None
    #: In bytes; if there are none, a dozen from a hundredth of all blocks' bytes to all of them.
    capacities: Sequence[int] = ()
    #: Policies beside this store's own.
    compare: Sequence[Policy] = ("lru", "optimum")


def cuts(trace: Trace, settings: Settings) -> list[int]:
    """Returns for each space how many blocks its engines put into a segment."""
    return [
        1 if space.kind == "ec" else segment_blocks(settings, space.block_bytes, space.parts)
        for space in trace.spaces
    ]


class Worth:
    """What the hits of one recording are worth."""

    def __init__(self, trace: Trace, question: Question) -> None:
        self.trace = trace
        self.question = question
        settings = question.settings
        self._notes = noted(trace, settings.admission.window_s)
        self.segment_blocks = cuts(trace, settings)
        self._rules = Rules(
            self.segment_blocks,
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
        space, given = self.trace.spaces[number], self.question
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
        return self.question.gpus or about.gpus or about.parts

    def replay(self, capacity: int, policy: Policy) -> Replayed:
        """Replays the recording under this store's own rules."""
        replay = StoreReplay(self.trace, self._rules, capacity)
        if policy in ("told", "told-ends"):
            owners = sessions(self.trace)
            return replay.run(None, owners, (told if policy == "told" else ends)(self.trace, owners))
        return replay.run(self._notes if policy == "second-use" else None)

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
        return gpu_seconds * self.question.prices.gpu_hour / 3600

    def advice(self, capacity: int, one: Replayed, *, second_use: bool) -> CapacityAdvice:
        """Returns what a capacity brings and costs in a month."""
        prices, months, trace = self.question.prices, self.months, self.trace
        gained = self.gained(one.hits)
        loaded = sum(
            gain * trace.spaces[request.space].block_bytes
            for gain, request in zip(gained, trace.requests, strict=True)
        )
        storage = capacity / GB * prices.gb_month
        requests = months * (one.puts * prices.put_1000 + one.gets * prices.get_1000) / 1000
        transfer = months * (one.totals.stored_bytes * prices.upload_gb + loaded * prices.download_gb) / GB
        gpu = months * sum(self.seconds_of(one.hits)) if self.known else None
        saved = None if gpu is None else self.money(gpu)
        cost = storage + requests + transfer
        return CapacityAdvice(
            capacity_bytes=capacity,
            second_use=second_use,
            hit_ratio=one.totals.hit_blocks / trace.references,
            gained_ratio=sum(gained) / trace.references,
            gpu_seconds_month=gpu,
            saved_month=saved,
            storage_month=storage,
            requests_month=requests,
            transfer_month=transfer,
            cost_month=cost,
            net_month=None if saved is None else saved - cost,
        )
