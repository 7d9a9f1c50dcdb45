"""A trace replayed under a policy: what a cache of some capacity would have served.

    endless  evicts nothing: no capacity can serve more
    lru      evicts the block that was used longest ago; exact for every capacity in one pass
    fifo     evicts the block that was stored longest ago

This store's own policy, which works on segments, is kvstore.admin.simulate.store. Every policy serves the
leading blocks of a request that are there, and stores the others. Blocks of a request count as used from its
last one to its first, so that every policy evicts tails before heads.

The pass for LRU: a block is served if the blocks used since its last use, and itself, fit; so all that is
needed for a reference is how many bytes those are (Mattson et al., 1970). Let p(j) be the reference to the
same block before reference j. The blocks used since p(i) are those of the references j after p(i) whose p(j)
is less than p(i). Every j up to p(i) has such a p(j), so they are all j < i with p(j) < p(i), less all j up
to p(i). The first are added up by halving the references again and again, in numpy: O(n log n).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvstore.admin.simulate.traces import Trace

_Ints = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class ReplayTotals:
    """Totals of a replay, over all requests."""

    hit_blocks: int
    hit_tokens: int
    stored_bytes: int
    #: The number of evicted blocks, or of evicted segments if the policy evicts those.
    evictions: int
    evicted_bytes: int


def endless(trace: Trace) -> ReplayTotals:
    """Replays a trace without any eviction."""
    tokens = [space.block_tokens for space in trace.spaces]
    seen = bytearray(trace.blocks)
    blocks = saved = 0
    for request in trace.requests:
        hits = _leading(request.chain, seen)
        blocks += hits
        saved += hits * tokens[request.space]
        for block in request.chain[hits:]:
            seen[block] = 1
    return ReplayTotals(blocks, saved, trace.distinct_bytes, 0, 0)


def _leading(chain: Sequence[int], seen: bytearray) -> int:
    # The seen blocks of a chain are a prefix of it: a request for one of them also asked for those before it.
    low, high = 0, len(chain)
    while low < high:
        middle = (low + high) // 2
        if seen[chain[middle]]:
            low = middle + 1
        else:
            high = middle
    return low


def lru(trace: Trace, capacities: Sequence[int]) -> list[ReplayTotals]:
    """Replays a trace with eviction of the least recently used block, for every capacity."""
    weights = trace.weights()
    lengths = np.array([len(request.chain) for request in trace.requests], dtype=np.int64)
    blocks = np.fromiter(
        (block for request in trace.requests for block in reversed(request.chain)),
        dtype=np.int64,
        count=trace.references,
    )
    own = weights[blocks]
    previous = _previous(blocks)
    upto = np.cumsum(own)
    begins = np.repeat(upto[np.cumsum(lengths) - lengths] - own[np.cumsum(lengths) - lengths], lengths)
    again = np.flatnonzero(previous >= 0)
    # The bytes used since, before this request: its own deeper blocks are counted as well, and subtracted.
    since = _preceding(previous, own)[again] - upto[previous[again]] - (upto - own - begins)[again]
    needs = since + own[again]
    order = np.argsort(needs, kind="stable")
    tokens = np.array([space.block_tokens for space in trace.spaces], dtype=np.int64)
    kinds = np.array(trace.space_of, dtype=np.int64)[blocks[again][order]]
    hit_bytes, hit_tokens = np.cumsum(own[again][order]), np.cumsum(tokens[kinds])
    last = np.full(trace.blocks, -1, dtype=np.int64)
    last[blocks] = np.arange(len(blocks))
    resident = np.cumsum(weights[np.argsort(-last, kind="stable")])
    tallies = []
    for capacity in capacities:
        hits = int(np.searchsorted(needs[order], capacity, side="right"))
        served = int(hit_bytes[hits - 1]) if hits else 0
        stored = int(own.sum()) - served
        left = int(np.searchsorted(resident, capacity, side="right"))
        left_bytes = int(resident[left - 1]) if left else 0
        tallies.append(
            ReplayTotals(
                hits,
                int(hit_tokens[hits - 1]) if hits else 0,
                stored,
                trace.references - hits - left,
                stored - left_bytes,
            )
        )
    return tallies


def _previous(blocks: _Ints) -> _Ints:
    """Returns for each reference the previous one to the same block, or -1 if there is none."""
    order = np.argsort(blocks, kind="stable")
    same = blocks[order[1:]] == blocks[order[:-1]]
    previous = np.full(len(blocks), -1, dtype=np.int64)
    previous[order[1:][same]] = order[:-1][same]
    return previous


def _preceding(keys: _Ints, weights: _Ints) -> _Ints:
    """Returns for each place the sum of the weights of all earlier places with a smaller key.

    Sums of places whose key occurs more than once may be wrong.

    Places are halved from the whole down to single ones, each half in the order of keys. Of two halves that
    belong together, every place of the later one gets the weights of the earlier one with smaller keys.
    """
    count = len(keys)
    total = np.zeros(count, dtype=np.int64)
    at = np.argsort(keys, kind="stable")
    for level in reversed(range(max(1, count - 1).bit_length())):
        later = ((at >> level) & 1).astype(bool)
        pair = at >> (level + 1)
        first = np.flatnonzero(np.concatenate(([True], pair[1:] != pair[:-1])))
        sizes = np.diff(np.append(first, count))
        start = np.repeat(first, sizes)
        earlier_weights = np.where(later, 0, weights[at])
        sums = np.cumsum(earlier_weights) - earlier_weights
        total[at[later]] += (sums - sums[start])[later]
        # Moves the halves apart, each still in the order of keys.
        earlier = np.cumsum(~later) - ~later
        before = earlier - earlier[start]
        width = np.repeat(np.add.reduceat((~later).astype(np.int64), first), sizes)
        place = np.where(later, start + width + (np.arange(count) - start - before), start + before)
        moved = np.empty_like(at)
        moved[place] = at
        at = moved
    return total


def fifo(trace: Trace, capacity: int) -> ReplayTotals:
    """Replays a trace with eviction of the block that was stored first."""
    weights = trace.weights().tolist()
    tokens = [space.block_tokens for space in trace.spaces]
    # By block: the bytes stored in all when it was stored last, itself included.
    end = [-1] * trace.blocks
    stored = inserted = blocks = saved = 0
    for request in trace.requests:
        edge, hits, leading = stored - capacity, 0, True
        missing = []
        for block in request.chain:
            if end[block] - weights[block] < edge or end[block] < 0:
                missing.append(block)
                leading = False
            elif leading:
                hits += 1
        blocks += hits
        saved += hits * tokens[request.space]
        inserted += len(missing)
        for block in reversed(missing):
            stored += weights[block]
            end[block] = stored
    edge = stored - capacity
    left = [weight for at, weight in zip(end, weights, strict=True) if at >= 0 and at - weight >= edge]
    return ReplayTotals(blocks, saved, stored, inserted - len(left), stored - sum(left))
