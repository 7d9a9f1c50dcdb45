"""top: the segments that most loads begin with, and those that would be evicted next."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

from kvstore.admin.backends import Cache
from kvstore.admin.described import models
from kvstore.admin.inspect.reports import TopLine, TopReport
from kvstore.index.eviction import shift_s
from kvstore.index.maintenance import Account, FullIndex
from kvstore.keys import NamespaceId, SegmentId


def top(cache: Cache, prefix: str | None, *, limit: int, now_s: float) -> TopReport:
    """Returns the `limit` hottest and coldest segments of one namespace or of all.

    It looks at no more than `limit` of each namespace. Raises UnknownName and what the index raises.
    """
    chosen = None if prefix is None else cache.namespace(prefix)
    index = cache.index
    if index is None or not limit:
        return TopReport(at_s=now_s, namespace=chosen, limit=limit, hottest=(), coldest=())
    accounts = cache.accounts(chosen)
    known = models(index.namespaces())
    shifted = cache.settings.eviction.cost_aware
    return TopReport(
        at_s=now_s,
        namespace=chosen,
        limit=limit,
        hottest=tuple(_hottest(index, accounts, known, limit)),
        coldest=tuple(_coldest(index, accounts, known, limit, shifted=shifted)),
    )


def _hottest(
    index: FullIndex, accounts: Sequence[Account], models: Mapping[NamespaceId, str], limit: int
) -> list[TopLine]:
    found = [
        (minutes, account, segment)
        for account in accounts
        for segment, minutes in index.hottest(account.namespace, limit)
    ]
    best = heapq.nlargest(limit, found, key=lambda item: item[0])
    return _lines(index, models, [(account, segment, minutes) for minutes, account, segment in best])


def _coldest(
    index: FullIndex,
    accounts: Sequence[Account],
    models: Mapping[NamespaceId, str],
    limit: int,
    *,
    shifted: bool,
) -> list[TopLine]:
    found = []
    for account in accounts:
        shift = shift_s(account.kind, account.usage) if shifted else 0.0
        for place, candidate in enumerate(index.order(account.namespace, limit)):
            # `place` keeps each namespace in its own order; several are merged as eviction merges them.
            found.append((candidate.keep_s + shift, account.namespace, place, account, candidate.segment))
    first = heapq.nsmallest(limit, found, key=lambda item: item[:3])
    return _lines(index, models, [(account, segment, None) for *_, account, segment in first])


def _lines(
    index: FullIndex,
    models: Mapping[NamespaceId, str],
    chosen: Iterable[tuple[Account, SegmentId, float | None]],
) -> list[TopLine]:
    """Returns the lines in the given order, without segments that were evicted meanwhile."""
    chosen = list(chosen)
    wanted: dict[NamespaceId, list[SegmentId]] = {}
    for account, segment, _ in chosen:
        wanted.setdefault(account.namespace, []).append(segment)
    listings = {
        (name, listing.segment): listing
        for name, segments in wanted.items()
        for listing in index.get(name, segments)
        if listing is not None
    }
    lines = []
    for account, segment, minutes in chosen:
        listing = listings.get((account.namespace, segment))
        if listing is None:
            continue
        lines.append(
            TopLine(
                namespace=account.namespace,
                model=models.get(account.namespace, ""),
                kind=account.kind,
                segment=segment.hex(),
                depth=listing.record.depth,
                blocks=listing.record.slots,
                stored_bytes=listing.record.nbytes,
                last_use_s=listing.last_use_s,
                pinned=listing.pinned,
                cost_us=listing.record.cost_us,
                minutes=minutes,
            )
        )
    return lines
