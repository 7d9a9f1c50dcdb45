"""ls: the segments that the index lists."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator

from kvstore.admin.backends import Cache
from kvstore.admin.counting import summary_of_segment
from kvstore.admin.inspect.reports import ListReport, SortKey
from kvstore.admin.reports import SegmentSummary

_ORDER: dict[SortKey, Callable[[SegmentSummary], tuple[float, float]]] = {
    "last-use": lambda line: (line.last_use_s, line.created_s),
    "created": lambda line: (line.created_s, line.last_use_s),
    "bytes": lambda line: (line.stored_bytes, line.last_use_s),
}


def ls(cache: Cache, prefix: str | None, *, limit: int, sort: SortKey, now_s: float) -> ListReport:
    """Returns the `limit` (0: all) most recent or largest segments, of one namespace or of all.

    Holds no more than `limit` of them at once. Raises UnknownName and what the index raises.
    """
    chosen = None if prefix is None else cache.namespace(prefix)
    found = 0

    def counted() -> Iterator[SegmentSummary]:
        nonlocal found
        for name in cache.namespaces() if chosen is None else [chosen]:
            for listing in cache.segments(name):
                found += 1
                yield summary_of_segment(name, listing)

    order = _ORDER[sort]
    if limit:
        segments = heapq.nlargest(limit, counted(), key=order)
    else:
        segments = sorted(counted(), key=order, reverse=True)
    return ListReport(
        at_s=now_s, namespace=chosen, sort=sort, limit=limit, found=found, segments=tuple(segments)
    )
