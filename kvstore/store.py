"""The store: the backends, the transfer threads and the counters, and what keeps them in bounds.

Order of an eviction: the record goes first, the payload after `grace_s`, so a match that was given out
can still be read. A segment that fails verification goes the same way, at once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Self

from kvstore.breaker import Breaker
from kvstore.errors import KVStoreError, TransientError
from kvstore.keys import NamespaceId, SegmentId, payload_name
from kvstore.metrics import Counters
from kvstore.ports import Catalogue, Index, PayloadStore
from kvstore.space import Match, Saved, Space, miss_reason
from kvstore.transfers import Crew, Transfers
from schemas.namespace import Namespace
from schemas.records import SegmentRecord
from schemas.settings import Settings

__all__ = ["Match", "Saved", "Space", "Store", "miss_reason"]

log = logging.getLogger(__name__)

#: Segments remembered as bad in this process, for when the index can't be told.
_QUARANTINE = 4096
#: Share of the capacity that culling leaves, so that not every save culls again.
_CULL_TO = 0.95
_CULL_STEP = 256
#: Segments deleted with one call, so that a bucket is asked once for hundreds.
_DELETE_STEP = 256
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
    catalogue: Catalogue
    transfers: Transfers
    counters: Counters
    #: Parts of long reads; None if the payload store has none.
    crew: Crew | None = None
    #: In front of the payloads, if nothing can be read without what is behind it.
    breaker: Breaker | None = None
    #: In front of the index, for those who show its state.
    index_breaker: Breaker | None = None
    clock: Callable[[], float] = time.time
    _quarantined: OrderedDict[SegmentId, None] = field(default_factory=OrderedDict, repr=False)
    _untold: dict[NamespaceId, set[SegmentId]] = field(default_factory=dict, repr=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)
    _unaccounted: dict[NamespaceId, int] = field(default_factory=dict, repr=False)
    _tend_at: float = field(default=0.0, repr=False)
    _probing: bool = field(default=False, repr=False)
    _telling_since: float = field(default=float("-inf"), repr=False)
    _told: int = field(default=0, repr=False)
    #: Said by those who read: the payloads can't be read now. For a half that never reads them itself.
    payloads_down: bool = field(default=False, repr=False)

    def open(self, namespace: Namespace, *, block_bytes: int) -> Space:
        """Open one namespace. No I/O: the index learns of it when it can be reached.

        `block_bytes` is the raw size of a typical block of all ranks, which sizes the index.
        """
        expected = max(1, self.settings.capacity_bytes // max(1, block_bytes))
        return Space(self, namespace, expected)

    def close(self) -> None:
        """Let queued saves finish for `transfers.drain_s`, then release everything. Idempotent."""
        if not self.transfers.close():
            log.warning("closed with saves still queued; they are lost from the cache")
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
            self.index.evict(namespace, segments, delete_after_s=self.clock() + self.settings.grace_s)
        except KVStoreError as exc:
            log.warning("%d bad segments could not be evicted yet: %s", len(segments), exc)
            return
        with self._lock:
            self._untold[namespace].difference_update(segments)

    def committed(self, namespace: NamespaceId, nbytes: int) -> None:
        """Account a commit and, from time to time, keep the namespace within its capacity.

        Runs on the saving thread. Any number of engines may do this at once: the index decides
        what goes, atomically.
        """
        now = self.clock()
        with self._lock:
            pending = self._unaccounted.get(namespace, 0) + nbytes
            due = pending > self.settings.capacity_bytes // 64 or now >= self._tend_at
            self._unaccounted[namespace] = 0 if due else pending
            if due:
                self._tend_at = now + 10.0
        if due:
            try:
                self.tend(namespace)
            except KVStoreError as exc:
                log.warning("could not tidy namespace %s: %s", namespace, exc)

    def tend(self, namespace: NamespaceId) -> int:
        """Evict down to the capacity, delete payloads whose grace has passed. Returns evictions.

        Raises what the backends raise.
        """
        evicted = 0
        capacity = self.settings.capacity_bytes
        if self.catalogue.usage(namespace).nbytes > capacity:
            delete_after = self.clock() + self.settings.grace_s
            while True:
                gone = self.catalogue.cull(
                    namespace,
                    keep_bytes=int(capacity * _CULL_TO),
                    delete_after_s=delete_after,
                    limit=_CULL_STEP,
                )
                evicted += len(gone)
                if len(gone) < _CULL_STEP:
                    break
            self.counters.add("evicted_segments", evicted)
            self.catalogue.sweep(namespace, 4096)
        due = self.catalogue.due(namespace, self.clock(), 1024)
        for at in range(0, len(due), _DELETE_STEP):
            self._bury(namespace, due[at : at + _DELETE_STEP])
        return evicted

    def forget(self, namespace: NamespaceId) -> int:
        """Evict all that a namespace holds and delete it at once, without the grace that a load of another
        engine would need: for one that nobody else knows. Returns evictions. Raises what the backends raise.
        """
        # An index keeps these times to the second.
        evicted, now = 0, self.clock()
        past = now - 2.0
        while True:
            gone = self.catalogue.cull(namespace, keep_bytes=0, delete_after_s=past, limit=_CULL_STEP)
            evicted += len(gone)
            if len(gone) < _CULL_STEP:
                break
        self.counters.add("evicted_segments", evicted)
        while due := self.catalogue.due(namespace, now, _DELETE_STEP):
            self._delete(namespace, due)
        while self.catalogue.sweep(namespace, 4096):
            pass
        return evicted

    def _bury(self, namespace: NamespaceId, due: Sequence[tuple[SegmentId, int]]) -> None:
        """Delete payloads of evicted segments in one call; if that fails, those that can be, one by one.

        What can't be deleted stays in the trash for the next time; the others need not wait for it. Several
        failures in a row are one: nothing can be deleted.
        """
        try:
            self._delete(namespace, due)
            return
        except TransientError as exc:
            log.warning("evicted segments could not be deleted: %s", exc)
            return
        except KVStoreError as exc:
            failure, failures = exc, 0
        for one in due:
            try:
                self._delete(namespace, [one])
                failures = 0
            except KVStoreError as exc:
                failure, failures = exc, failures + 1
                if failures == 3:
                    break
        log.warning("evicted segments could not all be deleted: %s", failure)

    def _delete(self, namespace: NamespaceId, due: Sequence[tuple[SegmentId, int]]) -> None:
        names = [payload_name(namespace, segment, rank) for segment, ranks in due for rank in range(ranks)]
        self.counters.add("deleted_payloads", self.payloads.delete(names))
        self.catalogue.bury(namespace, [segment for segment, _ in due])
