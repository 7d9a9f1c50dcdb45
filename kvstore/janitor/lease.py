"""Election of a leader: of several processes, the one works that has a lease in the index and renews it.

A lease is measured by this process's clock from before it was asked for, so that it ends here no later than
in the index. It is advisory: a process that is stopped in the middle of a call finds out afterwards, so what
is done under a lease must be harmless when it is done twice.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from kvstore.errors import KVStoreError
from kvstore.index.maintenance import Leases

log = logging.getLogger(__name__)

#: The share of a lease after which it is renewed: two failures in a row lose nothing.
RENEW = 1 / 3


class LeaseLost(Exception):
    """This process is not the leader any more and must stop at once. It is not an error of the store."""


class Leadership:
    """One candidate for one lease. One thread campaigns and works; any may read the attributes."""

    def __init__(
        self,
        index: Leases,
        name: str,
        holder: str,
        ttl_s: float,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.holder = holder
        self.elections = 0
        self.losses = 0
        #: The other process that has the lease, as far as is known; "" if none.
        self.other = ""
        #: Why the index didn't answer when it was last asked; "" if it did.
        self.problem = ""
        self._index = index
        self._name = name
        self._ttl_s = ttl_s
        self._monotonic = monotonic
        self._lock = threading.Lock()
        #: Until when this process has the lease; None: it hasn't. Guarded by the lock.
        self._until: float | None = None
        self._renew_at = float("-inf")

    @property
    def leads(self) -> bool:
        """Whether this process has the lease at this moment. Does no I/O."""
        with self._lock:
            return self._until is not None and self._monotonic() < self._until

    def campaign(self) -> bool:
        """Takes or renews the lease, and returns whether this process has it.

        An index that doesn't answer elects nobody. Raises LeaseLost if this process had the lease and has it
        no more.
        """
        self._ask()
        return self._until is not None

    def proceed(self) -> None:
        """Renews the lease if it is time to; to be called between two pieces of work. Raises LeaseLost."""
        if self._until is not None and self._monotonic() >= self._renew_at:
            self._ask()
        if self._until is None:
            raise LeaseLost("the lease was given back")

    def recheck(self) -> None:
        """Makes the next `proceed` ask the index, because something failed."""
        self._renew_at = float("-inf")

    def resign(self) -> None:
        """Gives the lease back, so that another process need not wait for its end. Raises nothing."""
        with self._lock:
            had, self._until = self._until is not None, None
        if had:
            try:
                self._index.release(self._name, self.holder)
            except KVStoreError as exc:
                log.warning("the lease was not given back and ends by itself: %s", exc)

    def _ask(self) -> None:
        asked = self._monotonic()
        other = ""
        try:
            granted = self._index.lease(self._name, self.holder, self._ttl_s)
        except KVStoreError as exc:
            self._unanswered(exc)
            return
        if not granted:
            with suppress(KVStoreError):
                other = self._index.leaseholder(self._name) or ""
        self.problem, self.other = "", other
        self._renew_at = asked + self._ttl_s * RENEW
        with self._lock:
            before, self._until = self._until, asked + self._ttl_s if granted else None
        if granted and before is None:
            self.elections += 1
            log.info("%s is the %s now", self.holder, self._name)
        elif before is not None and not granted:
            self._lost(f"{other or 'another process'} is the {self._name} now")

    def _unanswered(self, exc: KVStoreError) -> None:
        if not self.problem:
            log.warning("no answer about the lease %r: %s", self._name, exc)
        self.problem = str(exc)
        now = self._monotonic()
        self._renew_at = now + self._ttl_s * RENEW / 4
        with self._lock:
            over = self._until is not None and now >= self._until
            if over:
                self._until = None
        if over:
            self._lost("the index did not answer until its lease was over")

    def _lost(self, why: str) -> None:
        self.losses += 1
        log.warning("%s is not the %s any more: %s", self.holder, self._name, why)
        raise LeaseLost(why)
