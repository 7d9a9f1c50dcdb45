"""Going by age: each namespace holds to the time to live that is in force, and what is older is evicted.

Segments don't lie in the order of their age, so all of a namespace are looked at, a page at a time, and one
page of each namespace in turn. When all were looked at the namespace rests: for a hundredth of its time to
live, an hour at most. What becomes too old meanwhile serves nobody (kvstore.index.maintenance.Ages), and goes
that much later.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvstore.errors import DamagedIndex, KVStoreError
from kvstore.index.eviction import Lifetimes
from kvstore.index.maintenance import Account, FullIndex
from kvstore.keys import NamespaceId
from schemas.settings import Settings

#: Pages that one round looks at, of all namespaces together: in Redis each takes about a millisecond.
_PAGES = 256
_LONGEST_REST_S = 3600.0


@dataclass(slots=True)
class _Pass:
    """How far one namespace was gone through."""

    ttl_s: int | None
    #: Where it goes on, and when all had been looked at, by the clock; None: there is more to look at.
    after: str = ""
    done_s: float | None = None

    def rests(self, now_s: float) -> bool:
        rest_s = min(_LONGEST_REST_S, (self.ttl_s or 0) / 100)
        return self.done_s is not None and 0 <= now_s - self.done_s < rest_s


class Ageing:
    """Goes through the namespaces that have a time to live. Belongs to one thread at a time."""

    def __init__(self, index: FullIndex, settings: Settings, clock: Callable[[], float]) -> None:
        self._index = index
        self._settings = settings
        self._clock = clock
        self._passes: dict[NamespaceId, _Pass] = {}
        #: Namespaces that the last round left out: what makes no sense there, and the last failure of others.
        self.damaged: dict[NamespaceId, str] = {}
        self.failure: KVStoreError | None = None

    def round(
        self, accounts: Sequence[Account], in_time: Callable[[], bool], proceed: Callable[[], None]
    ) -> int:
        """Looks at the next pages, as long as `in_time` says so; returns how many segments it evicted.

        A namespace that fails is left out until the next round. Raises what the index raises when it is asked
        what operators have set, and what `proceed` raises, which is called before every page.
        """
        self.damaged, self.failure = {}, None
        evicted, lifetimes = 0, self._lifetimes()
        known = {account.namespace for account in accounts}
        self._passes = {name: one for name, one in self._passes.items() if name in known}

        def is_told(account: Account) -> bool:
            return (account.ttl_s or None) == lifetimes.of_account(account)

        # First those where something else holds than should; the others in another order each time, or those
        # that the pages don't suffice for would always be the same.
        some = [one for one in accounts if not one.problem and not (is_told(one) and not one.ttl_s)]
        left = deque(sorted(random.sample(some, len(some)), key=is_told))
        for _ in range(_PAGES):
            if not left or not in_time():
                break
            proceed()
            account = left.popleft()
            try:
                gone, more = self._page(account)
            except DamagedIndex as exc:
                self.damaged[account.namespace] = str(exc)
                continue
            except KVStoreError as exc:
                self.failure = exc
                continue
            evicted += gone
            if more:
                left.append(account)
        return evicted

    def _lifetimes(self) -> Lifetimes:
        return Lifetimes.of(self._settings.eviction.ttl_s, self._index.quotas())

    def _page(self, account: Account) -> tuple[int, bool]:
        """Returns how many segments of the next page it evicted, and whether there is another page."""
        # What operators have set is read right before it is told: it may be another since the round began.
        name, now_s, ttl_s = account.namespace, self._clock(), self._lifetimes().of_account(account)
        known = self._passes.get(name)
        if known is None or known.ttl_s != ttl_s:
            known = self._passes[name] = _Pass(ttl_s)
        elif known.rests(now_s) and (account.ttl_s or None) == ttl_s:
            return 0, False
        after_s = now_s + self._settings.grace_s
        try:
            gone, known.after = self._index.age_out(name, ttl_s, delete_after_s=after_s, after=known.after)
        except DamagedIndex:
            # It may be the place to go on from that makes no sense.
            known.after = ""
            raise
        known.done_s = None if known.after else now_s
        return gone, bool(known.after)
