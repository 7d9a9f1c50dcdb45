"""Looks at an index again and again, for `cache-admin serve`: at what its namespaces hold and have
counted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from kvstore.admin.counting import Growth
from kvstore.admin.described import models
from kvstore.admin.inspect.namespaces import Overview
from kvstore.admin.inspect.reports import StatsReport, StatusReport
from kvstore.admin.inspect.stats import stats_of
from kvstore.admin.inspect.status import status_of
from kvstore.admin.inspect.top import top_of
from kvstore.admin.reports import BackendState, QuotaLine
from kvstore.admin.serve.highlights import LINES, Highlights
from kvstore.admin.serve.history import History
from kvstore.admin.serve.sessions import SessionRounds
from kvstore.errors import DamagedIndex, DeadlineExceeded
from kvstore.index.eviction import Scope
from kvstore.index.maintenance import Account, FullIndex
from kvstore.keys import NamespaceId
from kvstore.rules.text import readable
from schemas.base import StrictModel
from schemas.settings import Settings

_M = TypeVar("_M", bound=StrictModel)

#: Seconds between two readings of what people read and no alert depends on.
HIGHLIGHTS_S = 15.0
#: Seconds after which a look is broken off.
LOOK_MOST_S = 10.0
#: The most namespaces that are told apart. The others are summed, and their totals read some at a time.
NAMED = 48
_OTHERS_AT_ONCE = 32
#: How many of them are asked for their hottest and coldest segments.
_ASKED = 16


@dataclass(frozen=True, slots=True)
class Look:
    """The result of one look at the index."""

    at_s: float
    seconds: float
    #: Reports on the namespaces that are told apart, and totals of all. The backends' states are left open.
    status: StatusReport
    stats: StatsReport
    #: The accounts of the namespaces that are told apart, the largest first; and those of the others.
    named: Sequence[Account]
    others: Sequence[Account]
    models: Mapping[NamespaceId, str]
    #: What each of `named` has counted since it was made.
    totals: Mapping[NamespaceId, Mapping[str, int]]
    #: What the others have counted since this process began: it only grows, whichever namespaces come and go.
    others_counted: Mapping[str, int]
    #: Namespaces in which the index holds something that makes no sense, and what.
    damaged: Mapping[NamespaceId, str]
    #: How many entries of the journal this process has met that it could not read.
    unreadable: int = 0
    #: Bytes of memory that the index uses and may use (0: there is no bound); None: it doesn't tell.
    memory: tuple[int, int] | None = None


class IndexCollector:
    """Looks at the index. For one thread; any may read the public attributes."""

    def __init__(
        self,
        settings: Settings,
        *,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._monotonic = monotonic
        self.history = History(clock())
        self.highlights = Highlights(clock())
        self.sessions = SessionRounds(clock, monotonic)
        self._growth = Growth()
        self._highlighted_at: float | None = None
        #: Each namespace's JSON. An id stands for all of it, so it never changes.
        self._texts: Mapping[NamespaceId, str] = {}
        #: The namespaces that are told apart.
        self._places: set[NamespaceId] = set()
        #: Namespaces that existed before this process: what they had counted by then is not added here.
        self._at_start: set[NamespaceId] | None = None
        self._next_other = 0
        self._others_counted: Counter[str] = Counter()
        #: Namespaces in which the highlights met something that makes no sense, and what.
        self.damaged: dict[NamespaceId, str] = {}

    def take(self, index: FullIndex) -> Look:
        """Looks at accounts and totals. Raises what the index raises, and DeadlineExceeded if it is slow."""
        began, now = self._monotonic(), self._clock()
        on_time = self._deadline()
        held = self._overview(index)
        self._note_places([account.namespace for account in held.accounts])
        damaged = {account.namespace: account.problem for account in held.accounts if account.problem}
        named = [account for account in held.accounts if account.namespace in self._places]
        others = [account for account in held.accounts if account.namespace not in self._places]
        for account in [*named, *self._turn_of(others)]:
            on_time()
            name = account.namespace
            try:
                seen = index.seen(name)
            except DamagedIndex as exc:
                damaged[name] = str(exc)
                continue
            added = self._growth.advance(name, seen, is_new=name not in (self._at_start or ()))
            self.history.count(added)
            if name not in self._places:
                self._others_counted.update(added)
        nowhere = BackendState(url="", state="ok")
        status = status_of(held, named, self._settings, index=nowhere, payloads=nowhere, fast=None, now_s=now)
        shown = {"quotas": self._told_apart(status.quotas), "tenants": status.tenants[:NAMED]}
        known = models({account.namespace: self._texts[account.namespace] for account in named})
        totals = {account.namespace: self._growth.last(account.namespace) for account in named}
        look = Look(
            at_s=now,
            seconds=self._monotonic() - began,
            status=_readable(status.model_copy(update=shown)),
            stats=_readable(stats_of(named, known, totals, None, now)),
            named=named,
            others=others,
            models=known,
            totals=totals,
            others_counted=Counter(self._others_counted),
            damaged=damaged,
            unreadable=index.unreadable,
            memory=index.memory(),
        )
        self.history.sample(now, sum(account.usage.nbytes for account in held.accounts))
        return look

    def highlight(self, index: FullIndex, look: Look) -> None:
        """Reads the highlights of the namespaces that a look told apart. Raises as `take` does."""
        on_time = self._deadline()
        names = [account.namespace for account in look.named]
        damaged = {name: problem for name, problem in self.damaged.items() if name in names}

        @contextmanager
        def within(name: NamespaceId) -> Iterator[None]:
            on_time()
            try:
                yield
                damaged.pop(name, None)
            except DamagedIndex as exc:
                damaged[name] = str(exc)
            self.damaged = dict(damaged)

        self.highlights.keep_to(names)
        self.highlights.read_events(index, names, look.at_s, within)
        now = self._monotonic()
        if self._highlighted_at is None or now - self._highlighted_at >= HIGHLIGHTS_S:
            top = top_of(
                index,
                look.named[:_ASKED],
                look.models,
                shifted=self._settings.eviction.cost_aware,
                limit=LINES,
                now_s=look.at_s,
                within=within,
            )
            self.highlights.top = _readable(top)
            self.highlights.read_faults(index, names, within)
            self._highlighted_at = now
        on_time()
        self.sessions.read(index, names)

    def _deadline(self) -> Callable[[], None]:
        """Returns a function to call between calls of the index; it raises if the look takes too long."""
        began = self._monotonic()

        def on_time() -> None:
            if self._monotonic() - began > LOOK_MOST_S:
                raise DeadlineExceeded(f"the index is slow: a look at it took more than {LOOK_MOST_S:g} s")

        return on_time

    def _overview(self, index: FullIndex) -> Overview:
        """Returns what the index says of all namespaces, the largest first."""
        accounts = sorted(index.accounts(), key=lambda account: (-account.usage.nbytes, account.namespace))
        given = index.quotas()
        if any(account.namespace not in self._texts for account in accounts):
            stored = index.namespaces()
            self._texts = {account.namespace: stored.get(account.namespace, "") for account in accounts}
        return Overview(accounts, self._texts, given)

    def _note_places(self, there: Sequence[NamespaceId]) -> None:
        """Chooses the namespaces that are told apart: the first come, as long as they exist.

        If a larger namespace took the place of a smaller one, counters would jump.
        """
        known = set(there)
        self._at_start = known if self._at_start is None else self._at_start & known
        self._growth.keep_to(known)
        self._places &= known
        for name in there:
            if len(self._places) == NAMED:
                break
            self._places.add(name)

    def _turn_of(self, others: Sequence[Account]) -> Sequence[Account]:
        """Returns some of them, and others the next time."""
        if not others:
            return []
        first = self._next_other % len(others)
        self._next_other = first + _OTHERS_AT_ONCE
        by_id = sorted(others, key=lambda account: account.namespace)
        return (by_id[first:] + by_id[:first])[:_OTHERS_AT_ONCE]

    def _told_apart(self, quotas: Sequence[QuotaLine]) -> tuple[QuotaLine, ...]:
        """Returns quotas of the store, of the fullest tenants, and of namespaces that are told apart."""
        own = {Scope.STORE, *map(Scope.namespace, self._places)}
        tenants = [line for line in quotas if line.known and line.scope.startswith(Scope.tenant(""))]
        tenants.sort(key=lambda line: -line.used_bytes)
        return (*tenants[:NAMED], *(line for line in quotas if line.known and line.scope in own))


def _readable(report: _M) -> _M:
    """Returns a report without anything that changes how the rest of a line reads: names are a client's to
    choose."""
    return type(report).model_validate(_fit(report.model_dump()))


def _fit(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isprintable() else readable(value, None)
    if isinstance(value, dict):
        return {_fit(key): _fit(one) for key, one in value.items()}
    return tuple(map(_fit, value)) if isinstance(value, tuple) else value
