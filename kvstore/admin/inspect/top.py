"""top: the segments that most loads begin with, and those that would be evicted next."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from kvstore.admin.backends import Cache
from kvstore.admin.described import models
from kvstore.admin.inspect.reports import TopLine, TopReport
from kvstore.index.eviction import shift_s
from kvstore.index.maintenance import Account, FullIndex, Listing
from kvstore.keys import NamespaceId, SegmentId


def top(cache: Cache, prefix: str | None, *, limit: int, now_s: float) -> TopReport:
    """Returns the `limit` hottest and coldest segments of one namespace or of all.

    It looks at no more than `limit` of each namespace. Raises UnknownName and what the index raises.
    """
    chosen = None if prefix is None else cache.namespace(prefix)
    index = cache.index
    if index is None or not limit:
        return TopReport(at_s=now_s, namespace=chosen, limit=limit, hottest=(), coldest=())
    report = top_of(
        index,
        cache.accounts(chosen),
        models(index.namespaces()),
        shifted=cache.settings.eviction.cost_aware,
        limit=limit,
        now_s=now_s,
    )
    return report.model_copy(update={"namespace": chosen})


def top_of(
    index: FullIndex,
    accounts: Sequence[Account],
    models: Mapping[NamespaceId, str],
    *,
    shifted: bool,
    limit: int,
    now_s: float,
    within: Callable[[NamespaceId], AbstractContextManager[object]] = nullcontext,
) -> TopReport:
    """Returns the report of these namespaces; each is read `within(namespace)`. Raises what the index
    raises."""
    hot: list[tuple[float, Account, SegmentId]] = []
    cold: list[tuple[float, NamespaceId, int, Account, SegmentId]] = []
    for account in accounts:
        name = account.namespace
        shift = shift_s(account.kind, account.usage) if shifted else 0.0
        with within(name):
            hot += [(minutes, account, segment) for segment, minutes in index.hottest(name, limit)]
            for place, found in enumerate(index.order(name, limit)):
                # `place` keeps each namespace in its own order; several are merged as eviction merges them.
                cold.append((found.keep_s + shift, name, place, account, found.segment))
    best = heapq.nlargest(limit, hot, key=lambda item: item[0])
    first = heapq.nsmallest(limit, cold, key=lambda item: item[:3])
    return TopReport(
        at_s=now_s,
        namespace=None,
        limit=limit,
        hottest=_lines(index, models, [(of, segment, minutes) for minutes, of, segment in best], within),
        coldest=_lines(index, models, [(of, segment, None) for *_, of, segment in first], within),
    )


def _lines(
    index: FullIndex,
    models: Mapping[NamespaceId, str],
    chosen: Sequence[tuple[Account, SegmentId, float | None]],
    within: Callable[[NamespaceId], AbstractContextManager[object]],
) -> tuple[TopLine, ...]:
    """Returns the lines in the given order, without segments that were evicted meanwhile."""
    wanted: dict[NamespaceId, list[SegmentId]] = {}
    for account, segment, _ in chosen:
        wanted.setdefault(account.namespace, []).append(segment)
    listings: dict[tuple[NamespaceId, SegmentId], Listing] = {}
    for name, segments in wanted.items():
        with within(name):
            listings |= {(name, one.segment): one for one in index.get(name, segments) if one is not None}
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
    return tuple(lines)
