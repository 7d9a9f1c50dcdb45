"""The store: the backends, the transfer threads and the counters, and what keeps them in bounds.

Order of an eviction: the record goes first, the payload after `grace_s`, so a match that was given out
can still be read. A segment that fails verification goes the same way, at once.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from secrets import token_hex
from typing import Self

from kvstore.blobs.tiered import TieredPayloads
from kvstore.breaker import Breaker
from kvstore.catalogue import Maintenance
from kvstore.errors import KVStoreError
from kvstore.keys import NamespaceId, SegmentId
from kvstore.metrics import Counters
from kvstore.ports import Index, PayloadStore
from kvstore.space import Match, Saved, Space, miss_reason
from kvstore.tending import Tending
from kvstore.trace import Trace
from kvstore.transfers import Crew, Transfers
from schemas.namespace import Namespace
from schemas.records import SegmentRecord
from schemas.settings import Settings

__all__ = ["Match", "Saved", "Space", "Store", "miss_reason"]

log = logging.getLogger(__name__)

#: Segments remembered as bad in this process, for when the index can't be told.
_QUARANTINE = 4096
#: Who saves looks at the quotas after this share of the room that it knew of.
_WRITERS = 16
#: From one round of tidying to the next.
_TEND_S = 10.0
#: For how long a saving thread deletes what others have evicted.
_REAP_S = 2.0
#: The lease of who deletes payloads and sweeps: a janitor all the time, an engine for a moment.
JANITOR = "janitor"
#: Evictions in the index, within an hour, for segments that this process finds bad.
_TELL_MOST = 256
_HOUR_S = 3600.0
#: With write-back, what is missing for longer than this after its save is lost.
_LATE_S = 600.0


@dataclass
class Store:
    """Use kvstore.build.open_store. Safe for many threads."""

    settings: Settings
    payloads: PayloadStore
    index: Index
    #: The same index for maintenance; not behind the breaker.
    catalogue: Maintenance
    transfers: Transfers
    counters: Counters
    #: Parts of long reads; None if the payload store has none.
    crew: Crew | None = None
    #: In front of the payloads, if nothing can be read without what is behind it.
    breaker: Breaker | None = None
    #: In front of the index, for those who show its state.
    index_breaker: Breaker | None = None
    #: The same payloads, if they are in two tiers, for those who show what the local one holds.
    tier: TieredPayloads | None = None
    clock: Callable[[], float] = time.time
    _quarantined: OrderedDict[SegmentId, None] = field(default_factory=OrderedDict, repr=False)
    _untold: dict[NamespaceId, set[SegmentId]] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    #: Bytes committed since the last look at the quotas, and how many there was room for then.
    _unaccounted: int = field(default=0, repr=False)
    _headroom: int = field(default=0, repr=False)
    _tended_s: float = field(default=float("-inf"), repr=False)
    #: As a holder of leases.
    name: str = field(default_factory=lambda: f"{socket.gethostname()}:{os.getpid()}:{token_hex(4)}")
    _probing: bool = field(default=False, repr=False)
    _telling_since: float = field(default=float("-inf"), repr=False)
    _told: int = field(default=0, repr=False)
    #: Of what requests ask for; None: none is kept.
    trace: Trace | None = None
    #: Said by those who read: the payloads can't be read now. For a half that never reads them itself.
    payloads_down: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        self.tending = Tending(
            self.catalogue, self.payloads, self.settings, self.counters, lambda: self.clock()
        )

    def open(self, namespace: Namespace, *, block_bytes: int) -> Space:
        """Open one namespace. No I/O: the index learns of it when it can be reached.

        `block_bytes` is the raw size of a typical block of all ranks, which sizes the index.
        """
        expected = max(1, self.settings.capacity_bytes // max(1, block_bytes))
        space = Space(self, namespace, expected)
        if self.trace is not None:
            self.trace.describe(space.id, namespace, block_bytes)
        return space

    def close(self) -> None:
        """Let queued saves finish for `transfers.drain_s`, then release everything. Idempotent."""
        if not self.transfers.close():
            log.warning("closed with saves still queued; they are lost from the cache")
        if self.trace is not None:
            self.trace.close()
        if self.crew is not None:
            self.crew.close()
        self.index.close()
        self.payloads.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def payloads_answer(self) -> bool:
        """Whether a payload could be read just now; if not, another thread finds out when it can. No I/O."""
        if self.breaker is None or self.breaker.is_closed:
            return not self.payloads_down
        self.probe_payloads()
        return False

    def probe_payloads(self) -> None:
        """Find out whether the payload store is back, on a thread that nobody waits for."""
        with self._lock:
            if self._probing:
                return
            self._probing = True
        # Not where saves and uploads wait: those may be what hangs.
        if not self.transfers.call(self._probe):
            self._probing = False

    def _probe(self) -> None:
        try:
            self.payloads.ping()
        except KVStoreError as exc:
            log.debug("payloads: %s", exc)
        finally:
            self._probing = False

    def may_be_late(self, record: SegmentRecord) -> bool:
        """Whether a payload that isn't there may be on a node that has not uploaded it yet."""
        tiers = self.settings.tiers
        if tiers is None or tiers.write != "back":
            return False
        # Of a clock that is ahead, too, but not for as long as it is.
        return abs(self.clock() - record.created_s) < _LATE_S

    def is_quarantined(self, segment: SegmentId) -> bool:
        """Whether this process knows the segment to be bad."""
        with self._lock:
            return segment in self._quarantined

    def mark_bad(self, segments: Iterable[SegmentId]) -> None:
        """Never match these segments again in this process. No I/O."""
        with self._lock:
            self._quarantined.update(dict.fromkeys(segments))
            while len(self._quarantined) > _QUARANTINE:
                self._quarantined.popitem(last=False)

    def quarantine(self, namespace: NamespaceId, segment: SegmentId) -> None:
        """A segment failed verification: evict it, here at once, and in the index.

        If the index can't be told now, it is told before the next save, which would otherwise find
        the blocks "present". Never raises.

        The index is told of so many in an hour and no more: who finds everything bad is more likely to have
        a share that isn't mounted, a wrong prefix or bad memory than to be right, and must not empty the
        cache for everybody else.
        """
        if not self.is_quarantined(segment):
            self.counters.add("quarantined_segments")
        self.mark_bad([segment])
        now = self.clock()
        with self._lock:
            if not now - _HOUR_S < self._telling_since <= now:
                self._telling_since, self._told = now, 0
            self._told += 1
            if self._told <= _TELL_MOST:
                self._untold.setdefault(namespace, set()).add(segment)
            elif self._told == _TELL_MOST + 1:
                log.error(
                    "more than %d segments failed verification within an hour: further ones are left "
                    "alone by this process only; `cache-admin doctor` here may say why",
                    _TELL_MOST,
                )
        self.tell_index(namespace)

    def tell_index(self, namespace: NamespaceId) -> None:
        """Evict in the index what is quarantined and could not be evicted before. Never raises."""
        with self._lock:
            segments = list(self._untold.get(namespace, ()))
        if not segments:
            return
        try:
            self.index.evict(
                namespace, segments, delete_after_s=self.clock() + self.settings.grace_s, rule="bad"
            )
        except KVStoreError as exc:
            log.warning("%d bad segments could not be evicted yet: %s", len(segments), exc)
            return
        with self._lock:
            self._untold[namespace].difference_update(segments)

    def committed(self, nbytes: int) -> None:
        """Account a commit and keep the store within its quotas. Runs on the saving thread.

        Looks again after a share of what there was room for: so that a dozen processes that all save, and
        don't know of each other, stay within it together. Where there is no room, after every commit.
        """
        now = self.clock()
        with self._lock:
            self._unaccounted += nbytes
            # As often as evicted payloads come due, so that few more wait than must.
            upkeep = not self._tended_s <= now < self._tended_s + min(_TEND_S, self.settings.grace_s)
            look = upkeep or self._unaccounted > self._headroom // _WRITERS
            if look:
                self._unaccounted = 0
            if upkeep:
                self._tended_s = now
        try:
            if upkeep:
                self.tend()
                if self.tending.unreachable is not None:
                    log.warning("could not tidy all of the store: %s", self.tending.unreachable)
            elif look:
                self._make_room()
        except KVStoreError as exc:
            log.warning("could not tidy the store: %s", exc)

    def tend(self) -> int:
        """Evict down to the quotas, delete payloads whose grace has passed, sweep what dangles; of all
        namespaces. Returns evictions. Raises what the index raises.

        All but the eviction is left to a janitor if there is one, and otherwise done by one engine at a time.
        """
        evicted = self._make_room()
        if not self.catalogue.lease(JANITOR, self.name, self.settings.janitor.lease_s):
            return evicted
        until = time.monotonic() + _REAP_S
        try:
            accounts, _ = self.catalogue.reachable()
            # Each time in another order: neither one that takes all the time nor one that fails may keep the
            # same others from their turn for good.
            for account in random.sample(accounts, len(accounts)):
                if account.bygone:
                    self.tending.drain(account.namespace)
                while (account.trashed or account.bygone) and time.monotonic() < until:
                    if not self.tending.reap(account.namespace):
                        break
                self.tending.sweep(account.namespace)
        finally:
            self.catalogue.release(JANITOR, self.name)
        return evicted

    def _make_room(self) -> int:
        evicted, headroom = self.tending.evict()
        with self._lock:
            self._headroom = headroom
        return evicted

    def forget(self, namespace: NamespaceId) -> int:
        """As Tending.forget."""
        return self.tending.forget(namespace)
