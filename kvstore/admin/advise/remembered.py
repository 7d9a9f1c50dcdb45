"""advise of the index: what more capacity would have brought, as it remembers evicted segments.

A ghost is an evicted segment that the journal remembers. When its blocks are asked for again, they are
counted by how many bytes of their namespace have been evicted since, their own segment included: with so much
more capacity they would still have been there (index.maintenance.Ghosts). That is a stack distance, as in a
replay of LRU, taken from live requests, and only beyond the present capacity.

Those distances are within one namespace, and a quota may bound several. In a full store the namespaces lose
bytes at different rates, and by the time that a block's own namespace has lost d bytes, all of them together
have lost d times the sum of the rates over its own. So a namespace gets a share of additional capacity that
is proportional to what has been evicted from it.

And a full store is between its two watermarks, so of additional capacity it uses what their mean rises by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvstore import __version__
from kvstore.admin.advise.advise import NOTHING
from kvstore.admin.advise.reports import AdviceReport, CapacityPoint, Curve, NamespaceGain, Verdict
from kvstore.admin.backends import Cache
from kvstore.admin.described import models
from kvstore.errors import ConfigError
from kvstore.index.eviction import GHOST_STEPS, Scope, ghost_bytes, watermarks
from kvstore.index.maintenance import Account, Ghosts
from kvstore.rules.units import size
from schemas.base import redact

#: Capacities that are estimated by default, as shares of the present one.
_SHARES = (1.1, 1.25, 1.5, 2.0, 3.0)


def remembered(cache: Cache, capacities: Sequence[int]) -> AdviceReport:
    """Estimates for each capacity, none of which may be smaller than the present one, what it would have
    served. Raises ConfigError and what the index raises.
    """
    index = cache.index
    accounts = cache.accounts()
    present = cache.quotas().get(Scope.STORE, cache.settings.capacity_bytes)
    larger = sorted(set(capacities) - {present}) or [round(share * present) for share in _SHARES]
    if larger[0] < present:
        raise ConfigError(f"{size(larger[0])} is less than the present {size(present)}: give a recording")
    known = models(cache.namespaces())
    seen = {a.namespace: index.seen(a.namespace) if index is not None else {} for a in accounts}
    evicted = {name: totals.get("evicted", 0) for name, totals in seen.items()}
    total = sum(evicted.values())
    lines = []
    for account in accounts:
        name = account.namespace
        share = evicted[name] / total if total else 0.0
        ghosts = index.ghosts(name) if index is not None else []
        lines.append(
            NamespaceGain(
                namespace=name,
                kind=account.kind,
                model=known.get(name, ""),
                asked_blocks=seen[name].get("asked", 0),
                served_blocks=seen[name].get("served", 0),
                evicted_bytes=evicted[name],
                share=share,
                gained_blocks=tuple(kept(ghosts, share * (_held(at) - _held(present))) for at in larger),
            )
        )
    asked = sum(line.asked_blocks for line in lines)
    served = sum(line.served_blocks for line in lines)
    gained = [0, *(sum(line.gained_blocks[i] for line in lines) for i in range(len(larger)))]
    points = tuple(
        CapacityPoint(
            capacity_bytes=at,
            hit_ratio=(served + blocks) / asked if asked else 0.0,
            hit_blocks=served + blocks,
        )
        for at, blocks in zip([present, *larger], gained, strict=True)
    )
    verdict, because = _verdict(cache, lines, points)
    return AdviceReport(
        version=__version__,
        sources=(redact(cache.settings.index_url),),
        verdict=verdict,
        because=(because,),
        asked_blocks=asked,
        curves=(Curve(policy="kvstore", points=points),),
        caveats=tuple(_caveats(cache, accounts, lines, larger[-1] - present)),
        used_bytes=sum(account.usage.nbytes for account in accounts),
        namespaces=tuple(sorted(lines, key=lambda line: -line.evicted_bytes)),
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


def _verdict(
    cache: Cache, lines: Sequence[NamespaceGain], points: Sequence[CapacityPoint]
) -> tuple[Verdict, str]:
    if not any(line.asked_blocks for line in lines):
        return "unclear", "no engine has told yet what it asked for"
    if not any(line.evicted_bytes for line in lines):
        return "no", "no quota has evicted anything: more capacity would have brought nothing so far"
    if not cache.settings.journal.ghosts:
        return "unclear", "journal.ghosts is 0: nothing is remembered of what is evicted"
    now, most = points[0].hit_ratio, points[-1].hit_ratio
    found = f"{most:.1%} of the blocks asked for, instead of {now:.1%}, would have come with "
    found += size(points[-1].capacity_bytes)
    if most - now < NOTHING:
        return "no", f"only {found}"
    return "unclear", f"{found}; a recording says what they are worth"


def _caveats(
    cache: Cache, accounts: Sequence[Account], lines: Sequence[NamespaceGain], more: int
) -> Iterator[str]:
    remembers = cache.settings.journal.ghosts
    usage = {account.namespace: account.usage for account in accounts}
    for line in lines:
        held = usage[line.namespace]  # type: ignore[index]
        if not (remembers and held.segments and line.share):
            continue
        horizon = round(remembers * held.nbytes / held.segments / line.share)
        if horizon < more:
            yield (
                f"namespace {line.namespace} remembers the last {remembers:,} segments evicted from it "
                f"(journal.ghosts), about what {size(horizon)} more would keep; of more it knows nothing"
            )
    yield (
        "counted since each namespace was made, also while the store was not full; lately may differ. Of a "
        "request, only the first 256 missing blocks are looked for"
    )
