"""whatif: estimates what more capacity would have brought, from what the index remembers of evicted segments.

A ghost is an evicted segment that the journal remembers. When its blocks are asked for again, they are
counted by how many bytes of their namespace have been evicted since, their own segment included: with so much
more capacity they would still have been there (index.maintenance.Ghosts). That is a stack distance, as in a
simulation of LRU, taken from live requests, and only beyond the present capacity.

Those distances are within one namespace, and a quota may bound several. In a full store the namespaces lose
bytes at different rates, and by the time that a block's own namespace has lost d bytes, all of them together
have lost d times the sum of the rates over its own. So a namespace gets a share of additional capacity that
is proportional to what has been evicted from it.

And a full store is between its two watermarks, so of additional capacity it uses what their mean rises by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore.admin.backends import Cache
from kvstore.admin.described import models
from kvstore.admin.simulate.reports import Gain, WhatIfNamespace, WhatIfReport
from kvstore.index.eviction import GHOST_STEPS, Scope, ghost_bytes, watermarks
from kvstore.index.maintenance import Account, Ghosts
from kvstore.rules.units import size
from schemas.base import redact

#: Additional capacities that are estimated by default, as shares of the present one.
_SHARES = (0.1, 0.25, 0.5, 1.0, 2.0)


def whatif(cache: Cache, more: Sequence[int]) -> WhatIfReport:
    """Estimates for each of `more` bytes what so much more capacity would have brought.

    Raises what the index raises.
    """
    index = cache.index
    accounts = cache.accounts()
    capacity = cache.quotas().get(Scope.STORE, cache.settings.capacity_bytes)
    steps = sorted(set(more)) or [round(share * capacity) for share in _SHARES]
    known = models(cache.namespaces())
    seen = {a.namespace: index.seen(a.namespace) if index is not None else {} for a in accounts}
    evicted = {name: totals.get("evicted", 0) for name, totals in seen.items()}
    total = sum(evicted.values())
    used = [_held(capacity + at) - _held(capacity) for at in steps]
    lines = []
    for account in accounts:
        name = account.namespace
        share = evicted[name] / total if total else 0.0
        ghosts = index.ghosts(name) if index is not None else []
        lines.append(
            WhatIfNamespace(
                namespace=name,
                kind=account.kind,
                model=known.get(name, ""),
                asked_blocks=seen[name].get("asked", 0),
                served_blocks=seen[name].get("served", 0),
                evicted_bytes=evicted[name],
                share=share,
                gains=tuple(
                    _gain(at, kept(ghosts, share * more), seen[name].get("asked", 0))
                    for at, more in zip(steps, used, strict=True)
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
    """Returns how many blocks `more` bytes for one namespace would have kept; interpolated within a step."""
    blocks, least = 0.0, ghost_bytes(0)
    for ghost in ghosts:
        below = ghost.extra_bytes / 2 ** (1 / GHOST_STEPS) if ghost.extra_bytes > least else 0.0
        blocks += ghost.blocks * min(1.0, max(0.0, (more - below) / (ghost.extra_bytes - below)))
    return round(blocks)


def _held(capacity: int) -> float:
    return sum(watermarks(capacity)) / 2


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
