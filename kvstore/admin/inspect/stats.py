"""stats: what engines have reported of their requests, in total or while watching."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from kvstore.admin.backends import Cache
from kvstore.admin.counting import Growth
from kvstore.admin.described import models
from kvstore.admin.inspect.reports import NamespaceTraffic, StatsReport, Traffic
from kvstore.errors import KVStoreError
from kvstore.index.maintenance import Account
from kvstore.keys import NamespaceId

_MISS = "miss:"
_UNSAVED = "unsaved:"


def stats(cache: Cache, prefix: str | None, now_s: float) -> StatsReport:
    """Returns totals since the index was made, for one namespace or for all.

    Raises UnknownName and what the index raises.
    """
    look = _Look.at(cache, prefix)
    return stats_of(look.accounts, look.models, look.seen, None, now_s)


def watch(
    cache: Cache,
    prefix: str | None,
    *,
    every_s: float,
    trouble: Callable[[KVStoreError], None],
    rounds: int | None = None,
    clock: Callable[[], float] = time.time,
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[StatsReport]:
    """Yields what was added, every `every_s`, for `rounds` rounds or (None) for ever.

    In a round in which the index fails `trouble` is called, and nothing is yielded; the next round covers its
    time as well. Raises what the first look raises.
    """
    growth = Growth()
    since = clock()
    for name, totals in _Look.at(cache, prefix).seen.items():
        growth.advance(name, totals)
    for _ in count() if rounds is None else range(rounds):
        sleep(every_s)
        try:
            look = _Look.at(cache, prefix)
        except KVStoreError as exc:
            trouble(exc)
            continue
        now = clock()
        # A namespace that is seen for the first time was registered after the first look.
        added = {name: growth.advance(name, totals, is_new=True) for name, totals in look.seen.items()}
        yield stats_of(look.accounts, look.models, added, now - since, now)
        since = now


class _Look:
    """What the index says at one moment."""

    def __init__(
        self,
        accounts: Sequence[Account],
        models: Mapping[NamespaceId, str],
        seen: Mapping[NamespaceId, Mapping[str, int]],
    ) -> None:
        self.accounts = accounts
        self.models = models
        self.seen = seen

    @classmethod
    def at(cls, cache: Cache, prefix: str | None) -> _Look:
        chosen = None if prefix is None else cache.namespace(prefix)
        index = cache.index
        if index is None:
            return cls((), {}, {})
        accounts = cache.accounts(chosen)
        return cls(
            accounts,
            models(index.namespaces()),
            {each.namespace: index.seen(each.namespace) for each in accounts},
        )


def stats_of(
    accounts: Sequence[Account],
    models: Mapping[NamespaceId, str],
    counted: Mapping[NamespaceId, Mapping[str, int]],
    seconds: float | None,
    now_s: float,
) -> StatsReport:
    """Returns the report of what was counted in each namespace, in all or in `seconds`. Does no I/O."""
    lines = []
    everything: Counter[str] = Counter()
    for account in accounts:
        numbers = counted.get(account.namespace, {})
        everything.update(numbers)
        lines.append(
            NamespaceTraffic(
                **traffic(numbers),
                id=account.namespace,
                kind=account.kind,
                model=models.get(account.namespace, ""),
                tenant=account.tenant,
            )
        )
    lines.sort(key=lambda line: (-line.asked, -line.offered, line.id))
    return StatsReport(
        at_s=now_s, seconds=seconds, total=Traffic(**traffic(everything)), namespaces=tuple(lines)
    )


def traffic(numbers: Mapping[str, int]) -> dict[str, Any]:
    """Returns the fields of a Traffic, from totals of the index or what was added to them."""
    asked, served = numbers.get("asked", 0), numbers.get("served", 0)
    return {
        "requests": numbers.get("requests", 0),
        "asked": asked,
        "served": served,
        "misses": _by_reason(numbers, _MISS),
        "offered": numbers.get("offered", 0),
        "stored": numbers.get("stored", 0),
        "unsaved": _by_reason(numbers, _UNSAVED),
        "evicted_bytes": numbers.get("evicted", 0),
        "hit_ratio": served / asked if asked else None,
    }


def _by_reason(numbers: Mapping[str, int], prefix: str) -> dict[str, int]:
    found = {name.removeprefix(prefix): n for name, n in numbers.items() if name.startswith(prefix) and n}
    return dict(sorted(found.items(), key=lambda item: (-item[1], item[0])))
