"""BoundedFolder: the fast payload store together with its ledger. Every failure here is only a miss.

Nothing here but `write` raises KVStoreError: a damaged or locked ledger, a full disk, a folder that can't be
written or read cost hits and fills, are counted as `fast_errors`, and stop further attempts to write for a
moment. If the disk is full before the capacity is reached, each attempt to write evicts old payloads for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from kvstore.errors import BreakerOpen, CapacityExceeded, KVStoreError
from kvstore.payloads.port import PayloadStore
from kvstore.payloads.tiered.ledger import Ledger, Reservation
from kvstore.payloads.tiered.markers import Markers
from kvstore.payloads.tiered.reconcile import Reconciler

log = logging.getLogger(__name__)

#: Adds an amount to the counter of a name; kvstore.metrics explains each, as `tier_<name>`.
Count = Callable[[str, int], object]
#: Queues a job that holds so many bytes of memory; False: it will not run.
Later = Callable[[int, Callable[[], None]], bool]

#: Seconds after a failure without a write: the next attempt would most likely fail as well.
PAUSE_S = 2.0
#: How long a write, and a round of housekeeping, may compare the folder with its ledger, in seconds.
_SCAN_S, _HOUSEKEEPING_S = 0.25, 0.05


class BoundedFolder:
    """Uses at most `ledger.capacity_bytes` of `fast`, whatever happens. Safe for many threads."""

    def __init__(
        self,
        fast: PayloadStore,
        ledger: Ledger,
        markers: Markers,
        *,
        queue_housekeeping: Callable[[], object],
        count: Count,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fast = fast
        self.ledger = ledger
        self.markers = markers
        self._queue_housekeeping = queue_housekeeping
        self._count = count
        self._clock = clock
        self._reconciler = Reconciler(fast, ledger, markers, self._evict, clock)
        self._paused_until = float("-inf")
        # The lock guards the field below it.
        self._lock = threading.Lock()
        self._unfinished: list[Reservation] = []

    def read(self, name: str, offset: int, into: Sequence[memoryview], size: int | None) -> int | None:
        """Reads as PayloadStore.read does. Returns None also if the file is too short or can't be read."""
        try:
            got = self.fast.read(name, offset, into)
        except KVStoreError as exc:
            self.failed("read", exc)
            return None
        if got is None:
            return None
        want = sum(view.nbytes for view in into)
        if size is not None and got < min(want, size - offset):
            # A power cut can leave a file short.
            log.warning("payload %s is cut short in the folder; dropped", name)
            self._count("fast_errors", 1)
            self.discard(name)
            return None
        self._count("hits_fast", 1)
        self.ledger.note(name)
        return got

    def has(self, name: str, size: int) -> bool:
        """Returns whether all of the payload is here."""
        try:
            last = memoryview(bytearray(1 if size else 0))
            return self.fast.read(name, max(0, size - 1), [last]) == last.nbytes
        except KVStoreError as exc:
            self.failed("read", exc)
            return False

    def may_keep(self, nbytes: int) -> bool:
        """Returns whether an attempt makes sense: the payload might fit, and nothing has failed just now."""
        return nbytes <= self.ledger.capacity_bytes and self._clock() >= self._paused_until

    def keep(self, name: str, buffers: Sequence[memoryview], nbytes: int) -> bool:
        """Writes a clean payload, whose other copy is in the shared store. Returns whether it is kept, and
        counts it as skipped otherwise."""
        kept = False
        try:
            kept = self.may_keep(nbytes) and self.write(name, buffers, nbytes)
        except KVStoreError as exc:
            self.failed("write", exc)
        if not kept:
            self._count("fills_skipped", 1)
        return kept

    def write(
        self,
        name: str,
        buffers: Sequence[memoryview],
        nbytes: int,
        *,
        mark: Callable[[], None] | None = None,
    ) -> bool:
        """Reserves room, writes and settles. Returns False if there is no room. With `mark`, which is called
        before the write, the payload is dirty. Raises what the folder and the ledger raise; then the payload
        is not there.
        """
        if not self._reconciler.ready(_SCAN_S):
            self._queue_housekeeping()
            return False
        reservation = self.ledger.reserve(name, nbytes, self._evict, dirty=mark is not None)
        if reservation is None:
            self._reconciler.check_again()
            return False
        settled = False
        try:
            if mark is not None:
                mark()
            self.fast.put(name, buffers)
            settled = self.ledger.settle(reservation)
        except CapacityExceeded:
            # The disk is smaller than the capacity, or fills up with other things: the cache gives way.
            self.ledger.yield_room(nbytes, self._evict)
            raise
        finally:
            if not settled:
                with self._lock:
                    self._unfinished.append(reservation)
                self._undo_unfinished()
        return settled

    def drop(self, names: Sequence[str]) -> int:
        """Deletes copies. Returns how many there were."""
        try:
            return self.ledger.delete(names, self.fast.delete)
        except KVStoreError as exc:
            self.failed("delete", exc)
        # Without its ledger the folder is still rid of a bad copy; an entry without a file is only a miss.
        with suppress(KVStoreError):
            self.fast.delete(names)
        return 0

    def discard(self, name: str) -> tuple[bool, bool]:
        """Drops a bad copy, clean or dirty. Returns whether there was one, and whether it was dirty."""
        dirty = False
        try:
            dirty = self.markers.remove(name)
        except KVStoreError as exc:
            self.failed("unmark", exc)
        return self.drop([name]) > 0, dirty

    def housekeeping(self) -> bool:
        """Undoes unfinished writes, and keeps ledger and folder in agreement; seldom takes more than
        milliseconds.

        Returns True if it is to be called again soon.
        """
        try:
            self._undo_unfinished()
            return self._reconciler.housekeeping(_HOUSEKEEPING_S)
        except KVStoreError as exc:
            self.failed("keep house", exc)
            return False

    def failed(self, what: str, exc: KVStoreError) -> None:
        """Counts a failure, and stops writes for a moment."""
        now = self._clock()
        quiet = isinstance(exc, BreakerOpen) or now < self._paused_until
        log.log(logging.DEBUG if quiet else logging.WARNING, "tier folder: can't %s: %s", what, exc)
        self._count("fast_errors", 1)
        self._paused_until = now + PAUSE_S

    def close(self) -> None:
        """Writes the noted uses, and closes the ledger and the folder. Idempotent."""
        try:
            self.ledger.flush()
        except KVStoreError as exc:
            log.debug("tier folder: uses are lost: %s", exc)
        self.ledger.close()
        self.fast.close()

    def _evict(self, names: Sequence[str]) -> None:
        self.fast.delete(names)
        self._count("evictions", len(names))

    def _undo_unfinished(self) -> None:
        """Undoes writes that could not be finished: the file first, then its reservation.

        `housekeeping` tries again what can't be undone now, and so do others once this process has ended.
        """
        with self._lock:
            owed, self._unfinished = self._unfinished, []
        for number, reservation in enumerate(owed):
            try:
                self.fast.delete([reservation.name])
                self.ledger.release(reservation)
            except KVStoreError as exc:
                with self._lock:
                    self._unfinished += owed[number:]
                self.failed("undo a write", exc)
                return
