"""Chooses how much of a match is loaded: as much as pays, by present estimates. Pure.

vLLM computes the rest of a prompt when its load has ended, not meanwhile. So of the tokens from `computed`
to `prompt`, of which those up to k are loaded,

    time(k) = load(k) + compute(k .. prompt)           time(computed) = compute(computed .. prompt)

and the k with the least is taken. Attention makes deep tokens dearer, so that the first blocks of a match pay
least. If the whole match lies in one tier, the best k is all or nothing. If a prefix lies nearer than the
rest, the best k may be that prefix.

With `kv.objective: throughput` load(k) counts by `WAIT`: while a request waits for bytes the engine computes
other requests, so that a second of waiting costs less than a second of the accelerator.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from connectors.choice.cost import Prefill
from connectors.choice.speeds import Speed
from kvstore.index.port import Run
from kvstore.keys import SegmentId
from kvstore.rules.tiers import Tier
from kvstore.rules.weighed import PATIENCE, Weighed

Objective = Literal["ttft", "throughput"]
#: Weight of a second of waiting for a load, in seconds of the accelerator. With `throughput` a request waits
#: at most PATIENCE times as long as it would take to compute what is loaded.
WAIT: Final[Mapping[Objective, float]] = {"ttft": 1.0, "throughput": 1 / PATIENCE}

#: Reasons for how much is loaded: loading is faster; computing is faster; the load is tried all the same, to
#: measure it; only a part is faster to load; the cost of computing is unknown; kv.load says so; another
#: engine has handed the prompt over; too few blocks.
Why = Literal[
    "faster", "computing_is_faster", "tried", "part", "unknown", "always", "never", "handed_over", "too_few"
]

#: A larger gap than this between a segment's beginning and the blocks to read is not read through
#: (s3.gap_bytes): the header is a request of its own then.
_GAP_BYTES: Final = 1 << 20
#: Most stretches of a match that are weighed one by one: choosing must not take longer for a long prompt.
MOST_STRETCHES: Final = 64


@dataclass(frozen=True, slots=True)
class Stretch:
    """A run of a match, or several that follow each other in one tier, and what it takes to load."""

    #: A segment of it, which says where it lies.
    segment: SegmentId
    #: Its tokens, counted from the prompt's start.
    start: int
    stop: int
    #: Bytes that a rank reads for it, in so many reads or more.
    nbytes: int
    reads: int
    #: Whether a request can be resumed at its end, once all stretches up to this one are there.
    boundary: bool


@dataclass(frozen=True, slots=True)
class Decision:
    """How much of what was found is loaded, with the estimates that led to it."""

    #: Tokens to load, beyond those computed already.
    tokens: int
    #: Tokens that were found beyond those.
    found: int
    why: Why
    #: Estimated seconds of loading `tokens`.
    load_s: float = 0.0
    #: Estimated seconds of loading all that was found.
    load_all_s: float = 0.0
    #: Estimated seconds of computing all that was found, and the cost line of a token. Each is None if it is
    #: unknown, or if it makes no difference.
    compute_s: float | None = None
    prefill: Prefill | None = None

    @property
    def weighed(self) -> Weighed | None:
        """Returns the weighed times of all that was found, or None if nothing was weighed."""
        if self.compute_s is None or not self.found:
            return None
        return Weighed(self.load_all_s, self.compute_s, self.found)


def choose(
    stretches: Sequence[Stretch],
    tiers: Mapping[SegmentId, Tier],
    computed: int,
    prompt: int,
    *,
    speed: Callable[[Tier], Speed],
    ahead: Callable[[Tier], int],
    prefill: Prefill,
    wait: float = 1.0,
    detour_s: float = 0.0,
) -> Decision:
    """Returns what to load of `stretches`, which are in order; the last one ends where the match does.

    `ahead` returns how many bytes of a tier are queued before a new load. `detour_s` is the time that any
    load takes besides its bytes. `wait` is one of WAIT.
    """
    best, best_at, best_load_s = prefill.seconds(computed, prompt), computed, 0.0
    load_s, found = detour_s, computed
    #: Tier -> its speed; bytes and reads of a load so far, with the bytes before it; whether it begins far
    #: inside a segment; and what it takes.
    loads: dict[Tier, tuple[Speed, float, float, bool, float]] = {}
    for stretch in stretches:
        if stretch.stop <= computed:
            continue
        place = tiers.get(stretch.segment, "bucket")
        share = (stretch.stop - max(stretch.start, computed)) / (stretch.stop - stretch.start)
        if place not in loads:
            inside = stretch.reads == 1 and stretch.nbytes * (1 - share) > _GAP_BYTES
            loads[place] = speed(place), ahead(place), 0.0, inside, 0.0
        tier, nbytes, reads, inside, before_s = loads[place]
        found = stretch.stop
        nbytes, reads = nbytes + stretch.nbytes * share, reads + stretch.reads * share
        seconds = tier.seconds(nbytes, reads, inside=inside)
        loads[place], load_s = (tier, nbytes, reads, inside, seconds), load_s + seconds - before_s
        if stretch.boundary:
            total = wait * load_s + prefill.seconds(stretch.stop, prompt)
            if total < best:
                best, best_at, best_load_s = total, stretch.stop, load_s
    why: Why = "computing_is_faster" if best_at == computed else "faster" if best_at == found else "part"
    return Decision(
        best_at - computed,
        found - computed,
        why,
        best_load_s,
        load_s,
        prefill.seconds(computed, found),
        prefill,
    )


def stretches_of(
    runs: Sequence[Sequence[Run]],
    block_tokens: Sequence[int],
    block_bytes: Sequence[int],
    tokens: int,
    tiers: Mapping[SegmentId, Tier],
    *,
    anywhere: bool,
) -> tuple[Stretch, ...]:
    """Returns the stretches of a match of `tokens` tokens, in their order: `runs` of each group, of whose
    blocks each has so many tokens and so many bytes per rank.

    `anywhere`: a request can be resumed after any block of any group, which is so for one group with full
    attention. Other models have runs for the end of their match only, so there it is all or nothing.
    """
    made: list[Stretch] = []
    for group, (size, nbytes) in enumerate(zip(block_tokens, block_bytes, strict=True)):
        for run in runs[group]:
            start, stop = run.start * size, min((run.start + run.count) * size, tokens)
            if start < stop:
                blocks = -(-(stop - start) // size)
                made.append(Stretch(run.segment, start, stop, blocks * nbytes, 1, anywhere))
    if len(runs) > 1:
        made.sort(key=lambda stretch: stretch.stop)
    merged: list[Stretch] = []
    most = max(1, -(-len(made) // MOST_STRETCHES))
    for at, stretch in enumerate(made):
        last = merged[-1] if merged else None
        joins = last is not None and at % most and last.stop == stretch.start
        if last is not None and joins and tiers.get(last.segment) == tiers.get(stretch.segment):
            merged[-1] = replace(
                stretch, start=last.start, nbytes=last.nbytes + stretch.nbytes, reads=last.reads + 1
            )
        else:
            merged.append(stretch)
    if merged:
        merged[-1] = replace(merged[-1], boundary=True)
    return tuple(merged)
