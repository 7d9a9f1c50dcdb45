"""A trace replayed block by block, as caches do that know no segments: what one of some capacity would serve.

This store's own rules, which work on segments, are kvstore.admin.advise.store. Every policy serves the
leading blocks of a request that are there, and stores the others. Blocks of a request count as used from its
last one to its first, so that every policy evicts tails before heads.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from kvstore.admin.advise.traces import Trace


@dataclass(frozen=True, slots=True)
class ReplayTotals:
    """Totals of a replay, over all requests."""

    hit_blocks: int
    hit_tokens: int
    stored_bytes: int
    #: The number of evicted blocks, or of evicted segments if the policy evicts those.
    evictions: int
    evicted_bytes: int


def by_block(trace: Trace, capacity: int, *, by_use: bool) -> ReplayTotals:
    """Replays a trace with eviction of the block that was used longest ago (LRU) or, without `by_use`, of the
    one that was stored longest ago (FIFO)."""
    weights = trace.weights().tolist()
    held: OrderedDict[int, None] = OrderedDict()
    hits = tokens = stored = used = evictions = 0
    for request in trace.requests:
        chain = request.chain
        found = next((at for at, block in enumerate(chain) if block not in held), len(chain))
        hits += found
        tokens += found * trace.spaces[request.space].block_tokens
        for block in reversed(chain):
            if block not in held:
                held[block] = None
                used += weights[block]
                stored += weights[block]
            elif by_use:
                held.move_to_end(block)
        # After the whole request, or its tail would push out its own head before that is used.
        while used > capacity:
            used -= weights[held.popitem(last=False)[0]]
            evictions += 1
    return ReplayTotals(hits, tokens, stored, evictions, stored - used)
