"""Looks at an index again and again, for `cache-admin serve`: at what its namespaces hold and have
counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvstore.admin.counting import Growth
from kvstore.admin.described import described
from kvstore.admin.serve.highlights import Highlights
from kvstore.admin.serve.history import History
from kvstore.admin.serve.reports import BlockTotals, Held, ServedNamespace, ServedQuota
from kvstore.admin.serve.sessions import SessionRounds
from kvstore.errors import DamagedIndex, DeadlineExceeded
from kvstore.index.eviction import Scope
from kvstore.index.maintenance import Account, FullIndex
from kvstore.keys import NamespaceId
from kvstore.rules.text import readable
from kvstore.store.housekeeping import Quota, quotas
from schemas.settings import Settings

#: Seconds between two readings of what people read and no alert depends on.
HIGHLIGHTS_S = 15.0
#: Seconds after which a look is broken off.
LOOK_MOST_S = 10.0
#: The most namespaces that are told apart. The others are summed, and their totals read some at a time.
NAMED = 48
_OTHERS_AT_ONCE = 32


@dataclass(frozen=True, slots=True)
class Look:
    """The result of one look at the index."""

    at_s: float
    seconds: float
    #: The namespaces that are told apart, the largest first; then the number of the others, and their sum.
    named: tuple[ServedNamespace, ...]
    others: int
    others_held: Held
    #: Totals of the others since this process began: they only grow, whichever namespaces come and go.
    others_blocks: BlockTotals
    others_evicted_bytes: int
    total: Held
    quotas: tuple[ServedQuota, ...]
    capacity_bytes: int
    #: Namespaces in which the index holds something that makes no sense, and what.
    damaged: Mapping[NamespaceId, str]
    #: How many entries of the journal this process has met that it could not read.
    unreadable: int = 0
    #: Bytes of memory that the index uses and may use (0: there is no bound); None: it doesn't tell.
    memory: tuple[int, int] | None = None


class IndexCollector:
    """Looks at the index, and fills `history`, `highlights` and `sessions`. For one thread; any may read
    those."""

    def __init__(
        self,
        settings: Settings,
        history: History,
        highlights: Highlights,
        sessions: SessionRounds,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._history = history
        self._highlights = highlights
        self._sessions = sessions
        self._clock = clock
        self._monotonic = monotonic
        self._growth = Growth()
        self._highlighted_at: float | None = None
        #: Models by namespace. An id stands for the namespace's whole JSON, so its model never changes.
        self._models: dict[NamespaceId, str] = {}
        #: The namespaces that are told apart.
        self._places: set[NamespaceId] = set()
        self._named: Sequence[Account] = ()
        self._capacity = settings.capacity_bytes
        #: Namespaces that existed before this process: what they had counted by then is not added here.
        self._at_start: set[NamespaceId] | None = None
        self._next_other = 0
        self._damaged: dict[NamespaceId, str] = {}
        self._others_counted: dict[str, int] = {}

    def take(self, index: FullIndex) -> Look:
        """Looks at accounts and totals. Raises what the index raises, and DeadlineExceeded if it is slow."""
        began, now = self._monotonic(), self._clock()
        on_time = self._deadline()
        accounts = sorted(index.accounts(), key=lambda account: (-account.usage.nbytes, account.namespace))
        given = index.quotas()
        self._damaged = {account.namespace: account.problem for account in accounts if account.problem}
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
            damaged=self._damaged,
            unreadable=index.unreadable,
            memory=index.memory(),
        )
        self._history.sample(now, total.stored_bytes)
        self._named, self._capacity = named, look.capacity_bytes
        return look

    def highlight(self, index: FullIndex) -> None:
        """Reads the highlights of the namespaces that the last `take` told apart. Raises as `take` does."""
        on_time = self._deadline()
        names = [account.namespace for account in self._named]
        self._highlights.read_events(index, names, on_time)
        now = self._monotonic()
        if self._highlighted_at is None or now - self._highlighted_at >= HIGHLIGHTS_S:
            cost_aware = self._settings.eviction.cost_aware
            self._highlights.read_uses(index, self._named, on_time, cost_aware=cost_aware)
            self._highlights.read_journal(index, names, on_time)
            self._highlighted_at = now
        on_time()
        self._sessions.read(index, names, int(self._settings.sessions.retain_share * self._capacity))

    def _deadline(self) -> Callable[[], None]:
        """Returns a function to call between calls of the index; it raises if the look takes too long."""
        began = self._monotonic()

        def on_time() -> None:
            if self._monotonic() - began > LOOK_MOST_S:
                raise DeadlineExceeded(f"the index is slow: a look at it took more than {LOOK_MOST_S:g} s")

        return on_time

    def _note_places(self, accounts: Sequence[Account]) -> None:
        """Chooses the namespaces that are told apart: the first come, as long as they exist.

        If a larger namespace took the place of a smaller one, counters would jump.
        """
        there = [account.namespace for account in accounts]
        if self._at_start is None:
            self._at_start = set(there)
        self._at_start &= set(there)
        for gone in self._models.keys() - set(there):
            self._models.pop(gone, None)
            self._growth.forget(gone)
        self._highlights.keep_to(there)
        self._places &= set(there)
        for name in there:
            if len(self._places) == NAMED:
                break
            self._places.add(name)

    def _learn_models(self, index: FullIndex, accounts: Sequence[Account]) -> None:
        if all(account.namespace in self._models for account in accounts):
            return
        stored = index.namespaces()
        for account in accounts:
            self._models[account.namespace] = readable(described(stored.get(account.namespace))[1])

    def _turn_of(self, others: Sequence[Account]) -> Sequence[Account]:
        """Returns some of them, and others the next time."""
        if not others:
            return []
        first = self._next_other % len(others)
        self._next_other = first + _OTHERS_AT_ONCE
        by_id = sorted(others, key=lambda account: account.namespace)
        return (by_id[first:] + by_id[:first])[:_OTHERS_AT_ONCE]

    def _count(self, index: FullIndex, name: NamespaceId) -> Mapping[str, int]:
        try:
            seen = index.seen(name)
        except DamagedIndex as exc:
            self._damaged[name] = str(exc)
            return {}
        added = self._growth.advance(name, seen, is_new=name not in (self._at_start or ()))
        self._history.count(added)
        return added

    def _served(self, account: Account, limits: Mapping[str, int]) -> ServedNamespace:
        totals = self._growth.last(account.namespace)
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
        """Returns quotas of the store, of the fullest tenants, and of namespaces that are told apart."""
        own = {Scope.namespace(name) for name in self._places}
        tenants = sorted((row for row in rows if row.rule == "tenant_quota"), key=lambda row: -row.used)
        shown = [row for row in rows if row.rule == "capacity"] + tenants[:NAMED]
        shown += [row for row in rows if row.rule == "namespace_quota" and row.scope in own]
        return tuple(
            ServedQuota(scope=readable(row.scope), quota_bytes=row.nbytes, used_bytes=row.used)
            for row in shown
        )


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


def _blocks(totals: Mapping[str, int]) -> BlockTotals:
    return BlockTotals(
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
