"""The most that any order of eviction could serve of a trace: Belady's, which knows what will be asked for.

After each request it keeps, of what it holds and what the request brought, the blocks whose next use comes
soonest, and stores none that it wouldn't keep (Belady, 1966, with bypass). Where all blocks are of one size
no policy finds more of them. With several sizes it is close to the optimum and no bound: the optimum itself
is as hard as packing a knapsack.

A request for a block asks for those before it too. So along a chain the next use comes no sooner the deeper
a block lies; tails go before heads, what is kept of a chain is a prefix of it, and the blocks of one request
are few runs with one next use each. The replay works on those, whatever the number of blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from kvstore.admin.advise.replay import ReplayTotals
from kvstore.admin.advise.traces import Trace

#: (number of the request that uses these blocks next, place of the first in its chain, that behind the last)
_Run = tuple[int, int, int]


def optimum(trace: Trace, capacities: Sequence[int]) -> list[ReplayTotals]:
    """Replays a trace with the best order of eviction, for every capacity. Evictions are of blocks that would
    have been asked for again.
    """
    runs = _runs(trace)
    return [_replayed(trace, runs, capacity) for capacity in capacities]


def _runs(trace: Trace) -> list[list[_Run]]:
    """Returns for each request the runs of its blocks that are asked for again."""
    count, references = len(trace.requests), trace.references
    lengths = np.array([len(request.chain) for request in trace.requests], dtype=np.int64)
    blocks = np.fromiter(
        (block for request in trace.requests for block in request.chain), dtype=np.int64, count=references
    )
    owner = np.repeat(np.arange(count), lengths)
    order = np.argsort(blocks, kind="stable")
    again = np.flatnonzero(blocks[order[1:]] == blocks[order[:-1]])
    later = np.full(references, count, dtype=np.int64)
    later[order[again]] = owner[order[again + 1]]
    first = np.cumsum(lengths) - lengths
    changes = np.flatnonzero((np.diff(later) != 0) | (np.diff(owner) != 0)) + 1
    begins = np.concatenate(([0], changes))
    ends = np.append(changes, references)
    found: list[list[_Run]] = [[] for _ in range(count)]
    start = first[owner[begins]]
    for number, uses, begin, end in zip(
        owner[begins].tolist(),
        later[begins].tolist(),
        (begins - start).tolist(),
        (ends - start).tolist(),
        strict=True,
    ):
        if uses < count:
            found[number].append((uses, begin, end))
    return found


def _replayed(trace: Trace, runs: Sequence[Sequence[_Run]], capacity: int) -> ReplayTotals:
    # By request: how many blocks are held that it will be the next to use. They are the first of its chain.
    held = [0] * len(trace.requests)
    # What is used last goes first, and of that the deepest.
    order: list[tuple[int, int, int, int, int]] = []
    used = blocks = saved = stored = evictions = evicted = 0
    for number, request in enumerate(trace.requests):
        space = trace.spaces[request.space]
        each, hits = space.block_bytes, held[number]
        blocks += hits
        saved += hits * space.block_tokens
        used -= hits * each
        for uses, begin, end in runs[number]:
            held[uses] += end - begin
            used += (end - begin) * each
            stored += max(0, end - max(begin, hits)) * each
            heappush(order, (-uses, -end, begin, number, each))
        while used > capacity:
            uses, end, begin, owner, size = heappop(order)
            uses, end = -uses, -end
            gone = min(end - begin, -((capacity - used) // size))
            if begin < end - gone:
                heappush(order, (-uses, gone - end, begin, owner, size))
            held[uses] -= gone
            used -= gone * size
            # What this request missed, and isn't kept, is never stored.
            passed = max(0, end - max(hits, end - gone)) if owner == number else 0
            stored -= passed * size
            evictions += gone - passed
            evicted += (gone - passed) * size
    return ReplayTotals(blocks, saved, stored, evictions, evicted)
