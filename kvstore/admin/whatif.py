"""whatif: what more capacity would have brought, from what the live index remembers of evicted segments.

A ghost is an evicted segment that the journal remembers. When its blocks are asked for again it counts them
under how many bytes of its namespace have been evicted since, its own included: with so many more they would
still have been there (kvstore.catalogue.Ghosts). That is a stack distance, as in a simulation of LRU, taken
where the requests are, and only beyond the capacity that there is.

Those distances are of one namespace, and a quota is of several. Where the store is full, its namespaces
lose bytes at different rates, and by the time that a block's own namespace has lost d bytes, all of them
together have lost d times the sum of the rates over its own. So of additional capacity a namespace gets a
share that is proportional to what has been evicted from it.

And a store is full between the two watermarks of eviction, so of additional capacity it uses their mean.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from kvstore.admin.cache import Cache
from kvstore.admin.machine import size
from kvstore.catalogue import Account, Ghosts
from kvstore.eviction import GHOST_STEPS, Scope, ghost_bytes
from schemas.base import redact
from schemas.simulation import Gain, WhatIfNamespace, WhatIfReport

#: Asked for if nobody says, of the capacity.
_SHARES = (0.1, 0.25, 0.5, 1.0, 2.0)


def whatif(cache: Cache, more: Sequence[int]) -> WhatIfReport:
    """Estimate what `more` bytes, each by itself, would have brought. Raises what the index raises."""
    index = cache.index
    accounts = index.accounts() if index is not None else []
    capacity = cache.settings.capacity_bytes
    if index is not None:
        capacity = index.quotas().get(Scope.STORE, capacity)
    steps = sorted(set(more)) or [round(share * capacity) for share in _SHARES]
    described = cache.namespaces()
    seen = {a.namespace: index.seen(a.namespace) if index is not None else {} for a in accounts}
    evicted = {name: totals.get("evicted", 0) for name, totals in seen.items()}
    total = sum(evicted.values())
    marks = cache.settings.eviction
    used = (marks.high + marks.low) / 2
    lines = []
    for account in accounts:
        name = account.namespace
        share = evicted[name] / total if total else 0.0
        ghosts = index.ghosts(name) if index is not None else []
        lines.append(
            WhatIfNamespace(
                namespace=name,
                kind=account.kind,
                model=str(json.loads(described.get(name, "{}")).get("model", "")),
                asked_blocks=seen[name].get("asked", 0),
                served_blocks=seen[name].get("served", 0),
                evicted_bytes=evicted[name],
                share=share,
                gains=tuple(
                    _gain(at, kept(ghosts, share * used * at), seen[name].get("asked", 0)) for at in steps
                ),
            )
        )
    asked = sum(line.asked_blocks for line in lines)
    served = sum(line.served_blocks for line in lines)
    return WhatIfReport(
        index=redact(cache.settings.index_url),
        capacity_bytes=capacity,
        used_bytes=sum(account.usage.nbytes for account in accounts),
        asked_blocks=asked,
        served_blocks=served,
        hit_ratio=served / asked if asked else 0.0,
        gains=tuple(
            _gain(at, sum(line.gains[i].blocks for line in lines), asked) for i, at in enumerate(steps)
        ),
        namespaces=tuple(sorted(lines, key=lambda line: -line.evicted_bytes)),
        caveats=tuple(_caveats(cache, accounts, lines, steps)),
    )


def kept(ghosts: Sequence[Ghosts], more: float) -> int:
    """Blocks that `more` bytes of one namespace would have kept; within a step in proportion."""
    blocks, least = 0.0, ghost_bytes(0)
    for ghost in ghosts:
        below = ghost.extra_bytes / 2 ** (1 / GHOST_STEPS) if ghost.extra_bytes > least else 0.0
        blocks += ghost.blocks * min(1.0, max(0.0, (more - below) / (ghost.extra_bytes - below)))
    return round(blocks)


def _gain(more: int, blocks: int, asked: int) -> Gain:
    return Gain(more_bytes=more, blocks=blocks, added_ratio=blocks / asked if asked else 0.0)


def _caveats(
    cache: Cache, accounts: Sequence[Account], lines: Sequence[WhatIfNamespace], steps: Sequence[int]
) -> Iterator[str]:
    remembered = cache.settings.journal.ghosts
    if not any(line.asked_blocks for line in lines):
        yield "no engine has told yet what it asked for"
        return
    if not any(line.evicted_bytes for line in lines):
        yield "no quota has evicted anything: more capacity would have brought nothing so far"
        return
    if not remembered:
        yield "journal.ghosts is 0: nothing is remembered of what is evicted"
        return
    usage = {account.namespace: account.usage for account in accounts}
    for line in lines:
        held = usage[line.namespace]  # type: ignore[index]
        if not held.segments or not line.share:
            continue
        horizon = round(remembered * held.nbytes / held.segments / line.share)
        if horizon < steps[-1]:
            yield (
                f"namespace {line.namespace} remembers the last {remembered:,} segments evicted from it "
                f"(journal.ghosts), about what {size(horizon)} more would keep; of more it knows nothing"
            )
    yield (
        "counted since each namespace was made, also while the store was not full; lately may differ. Of a "
        "request, only the first 256 missing blocks are looked for"
    )
