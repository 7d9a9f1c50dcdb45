"""One look at an index after another, for `cache-admin serve`: what its namespaces hold and have counted."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.admin.history import History, Tally
from kvstore.admin.noticing import Noticed, readable
from kvstore.catalogue import Account, Maintenance
from kvstore.errors import DeadlineExceeded
from kvstore.eviction import Scope
from kvstore.index.redis import RedisIndex
from kvstore.keys import NamespaceId
from kvstore.tending import Quota, quotas
from schemas.serving import Blocks, Held, ServedNamespace, ServedQuota
from schemas.settings import Settings

#: What a person reads, and what no alert hangs on, is not read with every look.
NOTICE_S = 15.0
LOOK_MOST_S = 10.0
#: Namespaces that are told apart. The others are summed, and their totals read some at a time.
NAMED = 48
_OTHERS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at the index found."""

    at_s: float
    seconds: float
    #: Those that are told apart, the largest first, and all others.
    named: tuple[ServedNamespace, ...]
    others: int
    others_held: Held
    #: Totals of the others since this process began: they only grow, whoever comes and goes.
    others_blocks: Blocks
    others_evicted_bytes: int
    total: Held
    quotas: tuple[ServedQuota, ...]
    capacity_bytes: int
    #: Memory of the index in use, and how much it may use, 0 if there is no bound; None: it doesn't tell.
    memory: tuple[int, int] | None = None


class Survey:
    """Of one thread; what it notes in `history` and `noticed` is for others to read."""

    def __init__(
        self,
        settings: Settings,
        history: History,
        noticed: Noticed,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._history = history
        self._noticed = noticed
        self._clock = clock
        self._monotonic = monotonic
        self._tally = Tally()
        self._noticed_at: float | None = None
        #: A namespace's id stands for its whole JSON, so its model never changes.
        self._models: dict[NamespaceId, str] = {}
        self._places: set[NamespaceId] = set()
        self._named: Sequence[Account] = ()
        #: Namespaces that were there before: what they have counted until then did not happen here.
        self._at_start: set[NamespaceId] | None = None
        self._next_other = 0
        self._others_counted: dict[str, int] = {}

    def take(self, index: Maintenance) -> Look:
        """Look at accounts and totals. Raises what the index raises, and DeadlineExceeded if it is slow."""
        began, now = self._monotonic(), self._clock()
        on_time = self._deadline()
        accounts = sorted(index.accounts(), key=lambda account: (-account.usage.nbytes, account.namespace))
        given = index.quotas()
        self._note_places(accounts)
        self._learn_models(index, accounts)
        named = [account for account in accounts if account.namespace in self._places]
        others = [account for account in accounts if account.namespace not in self._places]
        for account in named:
            on_time()
            self._count(index, account.namespace)
        for account in self._turn_of(others):
            on_time()
            for name, count in self._count(index, account.namespace).items():
                self._others_counted[name] = self._others_counted.get(name, 0) + count
        rows = quotas(accounts, self._settings, given)
        limits = {quota.scope: quota.nbytes for quota in rows}
        total = _held(accounts)
        look = Look(
            at_s=now,
            seconds=self._monotonic() - began,
            named=tuple(self._served(account, limits) for account in named),
            others=len(others),
            others_held=_held(others),
            others_blocks=_blocks(self._others_counted),
            others_evicted_bytes=self._others_counted.get("evicted", 0),
            total=total,
            quotas=self._quota_lines(rows),
            capacity_bytes=limits[Scope.STORE],
            memory=_memory_of(index),
        )
        self._history.sample(now, total.stored_bytes)
        self._named = named
        return look

    def notice(self, index: Maintenance) -> None:
        """Look at what stands out in those that the last `take` told apart. Raises the same."""
        on_time = self._deadline()
        names = [account.namespace for account in self._named]
        self._noticed.read_events(index, names, on_time)
        now = self._monotonic()
        if self._noticed_at is None or now - self._noticed_at >= NOTICE_S:
            cost_aware = self._settings.eviction.cost_aware
            self._noticed.read_uses(index, self._named, on_time, cost_aware=cost_aware)
            self._noticed.read_journal(index, names, on_time)
            self._noticed_at = now

    def _deadline(self) -> Callable[[], None]:
        """What to call between two calls of the index."""
        began = self._monotonic()

        def on_time() -> None:
            if self._monotonic() - began > LOOK_MOST_S:
                raise DeadlineExceeded(f"the index is slow: a look at it took more than {LOOK_MOST_S:g} s")

        return on_time

    def _note_places(self, accounts: Sequence[Account]) -> None:
        """Who is told apart: the first come, as long as they exist. A place that changed hands whenever
        another namespace is larger would make counters jump."""
        there = [account.namespace for account in accounts]
        if self._at_start is None:
            self._at_start = set(there)
        self._at_start &= set(there)
        for gone in self._models.keys() - set(there):
            self._models.pop(gone, None)
            self._tally.forget(gone)
        self._noticed.keep_to(there)
        self._places &= set(there)
        for name in there:
            if len(self._places) == NAMED:
                break
            self._places.add(name)

    def _learn_models(self, index: Maintenance, accounts: Sequence[Account]) -> None:
        if all(account.namespace in self._models for account in accounts):
            return
        stored = index.namespaces()
        for account in accounts:
            self._models[account.namespace] = _model_of(stored.get(account.namespace, ""))

    def _turn_of(self, others: Sequence[Account]) -> Sequence[Account]:
        """Some of them, others the next time."""
        if not others:
            return []
        first = self._next_other % len(others)
        self._next_other = first + _OTHERS_AT_ONCE
        by_id = sorted(others, key=lambda account: account.namespace)
        return (by_id[first:] + by_id[:first])[:_OTHERS_AT_ONCE]

    def _count(self, index: Maintenance, name: NamespaceId) -> Mapping[str, int]:
        added = self._tally.advance(name, index.seen(name), is_new=name not in (self._at_start or ()))
        self._history.count(added)
        return added

    def _served(self, account: Account, limits: Mapping[str, int]) -> ServedNamespace:
        totals = self._tally.last(account.namespace)
        return ServedNamespace(
            id=account.namespace,
            kind=readable(account.kind),
            model=self._models[account.namespace],
            tenant=readable(account.tenant),
            held=_held([account]),
            quota_bytes=limits.get(Scope.namespace(account.namespace)),
            seen_s=account.seen_s,
            blocks=_blocks(totals),
            evicted_bytes=totals.get("evicted", 0),
        )

    def _quota_lines(self, rows: Sequence[Quota]) -> tuple[ServedQuota, ...]:
        """The store's, the fullest tenants', and those of namespaces that are told apart."""
        own = {Scope.namespace(name) for name in self._places}
        tenants = sorted((row for row in rows if row.rule == "tenant_quota"), key=lambda row: -row.used)
        shown = [row for row in rows if row.rule == "capacity"] + tenants[:NAMED]
        shown += [row for row in rows if row.rule == "namespace_quota" and row.scope in own]
        return tuple(
            ServedQuota(scope=readable(row.scope), quota_bytes=row.nbytes, used_bytes=row.used)
            for row in shown
        )


def _memory_of(index: Maintenance) -> tuple[int, int] | None:
    return index.memory() if isinstance(index, RedisIndex) else None


def _model_of(stored: str) -> str:
    """The model's name in a namespace's JSON, which another version may have written."""
    try:
        fields = json.loads(stored)
    except ValueError:
        return ""
    return readable(fields.get("model", "")) if isinstance(fields, dict) else ""


def _held(accounts: Sequence[Account]) -> Held:
    usages = [account.usage for account in accounts]
    return Held(
        segments=sum(usage.segments for usage in usages),
        blocks=sum(usage.blocks for usage in usages),
        stored_bytes=sum(usage.nbytes for usage in usages),
        pinned_bytes=sum(usage.pinned_bytes for usage in usages),
        cost_us=sum(usage.cost_us for usage in usages),
        trashed_segments=sum(account.trashed for account in accounts),
        bygone_segments=sum(account.bygone for account in accounts),
    )


def _blocks(totals: Mapping[str, int]) -> Blocks:
    return Blocks(
        requests=totals.get("requests", 0),
        asked=totals.get("asked", 0),
        served=totals.get("served", 0),
        missed=_below("miss:", totals),
        offered=totals.get("offered", 0),
        stored=totals.get("stored", 0),
        unsaved=_below("unsaved:", totals),
    )


def _below(prefix: str, totals: Mapping[str, int]) -> dict[str, int]:
    found = {name.removeprefix(prefix): count for name, count in totals.items() if name.startswith(prefix)}
    return {readable(name): found[name] for name in sorted(found)}
