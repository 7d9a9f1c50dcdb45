"""Rounds of housekeeping: when a process that saves does a round, and how much of it in one go."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from kvstore.errors import DamagedIndex, KVStoreError
from kvstore.index.maintenance import Account
from kvstore.jitter import jittered
from kvstore.store.backends import Backends
from kvstore.store.housekeeping import Housekeeping

log = logging.getLogger(__name__)

#: How many processes may share the room that is left: each looks at the quotas again when its part is full.
_WRITERS = 16
#: Seconds from one round to the next, jittered.
_ROUND_S = 10.0
#: Most seconds that a saving thread spends on deleting payloads that other processes have evicted.
_REAP_S = 2.0
#: Most seconds that it spends on segments that are too old, but for its last page.
_AGE_S = 1.0
#: Seconds that a look at the quotas may take without a rest after it.
_SHORT_S = 0.1
#: The names among the quotas under which a janitor, or an engine that tidies, says when it began, in unix
#: seconds; and for how long that counts. Engines read the quotas anyway.
AT_WORK = "janitor"
TIDYING = "engine"
SIGNS = frozenset({AT_WORK, TIDYING})
AT_WORK_S = 60.0


def is_at_work(given: Mapping[str, int], now_s: float, sign: str = AT_WORK) -> bool:
    """Tells from the quotas whether a janitor works, or an engine tidies. Clocks that differ by a minute or
    more hide both: then several do what one could."""
    return abs(now_s - given.get(sign, 0)) < AT_WORK_S


class Rounds:
    """Keeps a store within its quotas, on the threads that save. Safe for threads."""

    def __init__(self, backends: Backends) -> None:
        self._backends = backends
        self.housekeeping = Housekeeping(
            backends.maintenance, backends.payloads, backends.settings, backends.counters, backends.clock
        )
        self._lock = threading.Lock()
        # The lock guards the fields below it.
        #: Bytes committed since the last look at the quotas, and bytes that there was room for then.
        self._unaccounted = 0
        self._headroom = 0
        #: When the last round began, and how long after it the next one is due.
        self._done_s = float("-inf")
        self._pause_s = 0.0
        #: When a commit may look at the quotas again, by the monotonic clock.
        self._rested_s = float("-inf")

    def committed(self, nbytes: int) -> None:
        """Accounts a commit and keeps the store within its quotas. Runs on the saving thread. Never raises.

        Looks at the quotas again when a part of the room is filled. So a dozen processes that save without
        knowing of each other stay within the room together. Where there is no room, it looks after every
        commit. A look at thousands of namespaces takes long, so as long a rest follows it. During the rest,
        other threads save no more than they save during the look.
        """
        now = self._backends.clock()
        with self._lock:
            self._unaccounted += nbytes
            # About as often as evicted payloads become reapable, so that few wait for longer than they must.
            due = not self._done_s <= now < self._done_s + self._pause_s
            full = self._unaccounted > self._headroom // _WRITERS
            look = due or (full and time.monotonic() >= self._rested_s)
            if look:
                self._unaccounted = 0
            if due:
                self._done_s = now
                self._pause_s = jittered(min(_ROUND_S, self._backends.settings.grace_s))
        try:
            if due:
                self.housekeep()
                if self.housekeeping.unreachable is not None:
                    log.warning("housekeeping left out some namespaces: %s", self.housekeeping.unreachable)
                for namespace, problem in self.housekeeping.damaged.items():
                    log.warning(
                        "housekeeping left out namespace %s, which is damaged: %s", namespace, problem
                    )
            elif look:
                self._make_room()
        except KVStoreError as exc:
            log.warning("housekeeping failed: %s", exc)

    def housekeep(self) -> int:
        """Does one round in all namespaces: evicts down to the quotas and what is too old, deletes payloads
        whose grace time is over, sweeps dangling entries. Returns how many segments it evicted. Raises what
        the index raises.

        All but the eviction is left to a janitor if there is one, and to one engine at a time if there is
        none: a thousand that sweep at once would take the index all its time.
        """
        evicted = self._make_room()
        maintenance, now = self._backends.maintenance, self._backends.clock()
        given = maintenance.quotas()
        if any(is_at_work(given, now, sign) for sign in SIGNS):
            return evicted
        # Where it can't be said, all the same: what is damaged is mended by tidying.
        with suppress(KVStoreError):
            maintenance.set_quota(TIDYING, int(now))
        try:
            return evicted + self._tidy_all()
        finally:
            with suppress(KVStoreError):
                maintenance.set_quota(TIDYING, None)

    def _tidy_all(self) -> int:
        """Returns how many segments it evicted because they are too old."""
        housekeeping, until = self.housekeeping, time.monotonic() + _REAP_S
        accounts, _ = self._backends.maintenance.reachable()
        # Each time in another order: neither a namespace that takes all the time nor one that fails may keep
        # the same others from their turn for good.
        for account in random.sample(accounts, len(accounts)):
            try:
                self._tidy(account, until)
            except DamagedIndex as exc:
                housekeeping.damaged[account.namespace] = str(exc)
            if time.monotonic() >= until:
                break
        # Last, since segments that are too old serve no request already.
        until = time.monotonic() + _AGE_S
        return housekeeping.age_out(lambda: time.monotonic() < until)

    def _tidy(self, account: Account, until: float) -> None:
        housekeeping = self.housekeeping
        if account.bygone:
            housekeeping.drain(account.namespace)
        while (account.trashed or account.bygone) and time.monotonic() < until:
            if not housekeeping.reap(account.namespace):
                break
        housekeeping.sweep(account.namespace)

    def _make_room(self) -> int:
        began = time.monotonic()
        evicted, headroom = self.housekeeping.evict()
        ended = time.monotonic()
        with self._lock:
            self._headroom = headroom
            self._rested_s = ended + max(0.0, ended - began - _SHORT_S)
        return evicted
