"""BoundedFolder: the fast payload store and its ledger as one, for which every failure is only a miss.

Nothing here raises KVStoreError: a damaged or locked ledger, a full disk, a folder that can't be written or
read cost hits and fills, are counted as `fast_errors`, and stop further attempts to write for a moment. A
disk that is full before the capacity is reached gives up one old payload per such attempt.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvstore.blobs.ledger import Ledger, Reservation
from kvstore.blobs.markers import Markers
from kvstore.blobs.upkeep import Upkeep
from kvstore.errors import BreakerOpen, CapacityExceeded, KVStoreError
from kvstore.ports import PayloadStore

log = logging.getLogger(__name__)

#: Counts so many more of a name; kvstore.metrics lists them, as `tier_<name>`, with what they mean.
Count = Callable[[str, int], object]
#: Queues a job that holds so many bytes of memory; False: it will not run.
Later = Callable[[int, Callable[[], None]], bool]

#: After a failure nothing is written for so long: the next attempt would most likely fail as well.
PAUSE_S = 2.0
#: How long a write may compare the folder with its ledger before it gives up, and a tending job.
_SCAN_S, _TEND_S = 0.25, 0.05


class BoundedFolder:
    """Of `fast` at most `ledger.capacity_bytes` are used, whatever happens. Safe for many threads."""

    def __init__(
        self,
        fast: PayloadStore,
        ledger: Ledger,
        markers: Markers,
        *,
        tend_soon: Callable[[], object],
        count: Count,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fast = fast
        self.ledger = ledger
        self.markers = markers
        self._tend_soon = tend_soon
        self._count = count
        self._clock = clock
        self._upkeep = Upkeep(fast, ledger, markers, self._evict, clock)
        self._paused_until = float("-inf")
        # The lock guards the field below it.
        self._lock = threading.Lock()
        self._owed: list[Reservation] = []

    def read(self, name: str, offset: int, into: Sequence[memoryview], size: int | None) -> int | None:
        """As PayloadStore.read; None also if the file is shorter than it should be, or can't be read."""
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
        """Whether all of the payload is here."""
        try:
            last = memoryview(bytearray(1 if size else 0))
            return self.fast.read(name, max(0, size - 1), [last]) == last.nbytes
        except KVStoreError as exc:
            self.failed("read", exc)
            return False

    def may_keep(self, nbytes: int) -> bool:
        """Whether it makes sense to try: it might fit, and nothing has failed just now."""
        return nbytes <= self.ledger.capacity_bytes and self._clock() >= self._paused_until

    def keep(self, name: str, buffers: Sequence[memoryview], nbytes: int) -> bool:
        """Write a clean payload, whose other copy is in the shared store. Counts it if it isn't kept."""
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
        """Reserve, write, settle. False if there is no room. With `mark`, which is called before the write,
        the payload is dirty. Raises what the folder and the ledger raise; then the payload is not there.
        """
        if not self._upkeep.ready(_SCAN_S):
            self._tend_soon()
            return False
        reservation = self.ledger.reserve(name, nbytes, self._evict, dirty=mark is not None)
        if reservation is None:
            self._upkeep.doubt()
            return False
        settled = False
        try:
            if mark is not None:
                mark()
            self.fast.put(name, buffers)
            settled = self.ledger.settle(reservation)
        except CapacityExceeded:
            # A disk that is smaller than the capacity, or fills up with other things: the cache gives way.
            self.ledger.yield_room(nbytes, self._evict)
            raise
        finally:
            if not settled:
                with self._lock:
                    self._owed.append(reservation)
                self._pay()
        return settled

    def drop(self, names: Sequence[str]) -> int:
        """Delete copies; returns how many there were."""
        try:
            dropped = self.fast.delete(names)
            self.ledger.forget(names)
        except KVStoreError as exc:
            self.failed("delete", exc)
            return 0
        return dropped

    def discard(self, name: str) -> tuple[bool, bool]:
        """Drop a copy that is bad, dirty or not. Returns whether there was one, and whether it was dirty."""
        dirty = False
        try:
            dirty = self.markers.remove(name)
        except KVStoreError as exc:
            self.failed("unmark", exc)
        return self.drop([name]) > 0, dirty

    def tend(self) -> bool:
        """What is due from time to time; takes milliseconds, and seldom more. True: call again soon."""
        try:
            self._pay()
            return self._upkeep.tend(_TEND_S)
        except KVStoreError as exc:
            self.failed("tend", exc)
            return False

    def failed(self, what: str, exc: KVStoreError) -> None:
        """Count a failure and leave the folder alone for a moment."""
        now = self._clock()
        quiet = isinstance(exc, BreakerOpen) or now < self._paused_until
        log.log(logging.DEBUG if quiet else logging.WARNING, "tier folder: can't %s: %s", what, exc)
        self._count("fast_errors", 1)
        self._paused_until = now + PAUSE_S

    def close(self) -> None:
        """Write the noted uses and let go of the ledger and the folder. Idempotent."""
        try:
            self.ledger.flush()
        except KVStoreError as exc:
            log.debug("tier folder: uses are lost: %s", exc)
        self.ledger.close()
        self.fast.close()

    def _evict(self, names: Sequence[str]) -> None:
        self.fast.delete(names)
        self._count("evictions", len(names))

    def _pay(self) -> None:
        """Undo writes that could not be finished: the file first, then its reservation.

        What can't be undone now is tried again by `tend`, and by others once this process has ended.
        """
        with self._lock:
            owed, self._owed = self._owed, []
        for number, reservation in enumerate(owed):
            try:
                self.fast.delete([reservation.name])
                self.ledger.release(reservation)
            except KVStoreError as exc:
                with self._lock:
                    self._owed += owed[number:]
                self.failed("undo a write", exc)
                return
