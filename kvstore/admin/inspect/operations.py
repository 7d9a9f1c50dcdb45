"""events --operators: what operators did to the cache, and who it was."""

from __future__ import annotations

from kvstore.admin.backends import Cache
from kvstore.admin.inspect.reports import OperationLine, OperationsReport
from kvstore.admin.operators import written


def operations(cache: Cache, *, limit: int, now_s: float) -> OperationsReport:
    """Returns the newest `limit` operations, the oldest first. Raises what the index raises."""
    found = [] if cache.index is None else cache.index.operations(limit)
    lines = [
        OperationLine(at_s=one.at_s, by=written(one.by), verb=written(one.verb), what=written(one.what))
        for one in reversed(found)
    ]
    return OperationsReport(at_s=now_s, operations=tuple(lines))
