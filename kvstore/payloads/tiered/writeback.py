"""WriteBack: saves payloads to the folder, and uploads them to the shared store afterwards.

Order of a save and its upload, so that a crash after any step is harmless:
    1. reserve   room in the ledger, dirty: at most half of the capacity
    2. mark      markers.py                         crash: a marker without a file, which its upload removes
    3. put       the file                           crash: a whole payload that nothing names; uploaded
    4. settle    the entry, dirty: never evicted    crash: the same; the save returns after this step
    5. put       to the shared store                crash: uploaded once more
    6. unmark                                       crash: an entry that seems dirty, until `queue_uploads`
    7. clean     the entry may be evicted

Any process of the node that finds a marker and gets the lock on its name uploads the payload, so a dead
process's work is taken over, also after a restart. A failed upload is queued again by a later
`queue_uploads`, after a pause that doubles; no payload is given up while the disk lives.

A delete while the upload is under way removes the marker first. The upload finds it gone in step 6 and
deletes what it has just put; killed in between, it leaves an object that nothing names (fsck finds those).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvstore.errors import KVStoreError, TransientError
from kvstore.payloads.port import Listed, PayloadStore
from kvstore.payloads.tiered.flights import Buffers
from kvstore.payloads.tiered.folder import BoundedFolder, Count, Later
from kvstore.payloads.tiered.locks import UPLOADING, number_of
from kvstore.payloads.tiered.markers import Marker

log = logging.getLogger(__name__)

#: Pause after a failed upload, in seconds: the first, doubled with every failure in a row, and the longest.
BACKOFF_S, MAX_BACKOFF_S = 1.0, 60.0


class WriteBack:
    """Saves to one folder, and uploads from it. Safe for any number of threads."""

    def __init__(
        self,
        folder: BoundedFolder,
        slow: PayloadStore,
        buffers: Buffers,
        later: Later,
        *,
        count: Count,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._folder = folder
        self._markers = folder.markers
        self._slow = slow
        self._buffers = buffers
        self._later = later
        self._count = count
        self._clock = clock
        self._sleep = sleep
        # The lock guards the fields below it.
        self._lock = threading.Lock()
        self._queued: set[str] = set()
        self._failures = 0
        self._retry_at = float("-inf")

    def add(self, name: str, buffers: Sequence[memoryview], nbytes: int) -> bool:
        """Saves a payload that isn't here yet. Returns False if it can't: it must be put to the shared store.

        The bytes are as durable as the folder makes them. Raises only what a caller's bad buffer raises.
        """
        saved = False
        try:
            if self._folder.may_keep(nbytes):
                saved = self._folder.write(
                    name, buffers, nbytes, mark=lambda: self._markers.add(name, nbytes)
                )
        except KVStoreError as exc:
            self._folder.failed("write", exc)
        finally:
            if not saved:
                self.unmark(name)
        if saved:
            self._queue(Marker(name, nbytes))
        return saved

    def is_dirty(self, name: str) -> bool:
        """Returns whether the shared store may not have the payload yet."""
        try:
            return self._markers.find(name) is not None
        except KVStoreError as exc:
            self._folder.failed("look for a marker", exc)
            return False

    def unmark(self, name: str) -> bool:
        """Removes the marker: the payload need not be uploaded (any more). Returns whether it had to be."""
        try:
            return self._markers.remove(name)
        except KVStoreError as exc:
            self._folder.failed("unmark", exc)
            return False

    def listed(self, prefix: str) -> dict[str, Listed]:
        """Returns the dirty payloads that are complete, by name."""
        found = {}
        try:
            for marker in self._markers.all():
                if marker.name.startswith(prefix):
                    for one in self._folder.fast.list(marker.name):
                        if one.name == marker.name:
                            found[one.name] = one
        except KVStoreError as exc:
            self._folder.failed("list", exc)
        return found

    @contextmanager
    def held(self, name: str, wait_s: float) -> Iterator[None]:
        """Keeps uploads of `name` from starting. Raises TransientError if one under way takes over
        `wait_s`."""
        number, until = UPLOADING + number_of(name), self._clock() + wait_s
        locks = self._folder.ledger.locks
        while not locks.acquire(number):
            if self._clock() >= until:
                raise TransientError(f"payload {name} is being uploaded")
            self._sleep(0.005)
        try:
            yield
        finally:
            locks.release(number)

    def queue_uploads(self) -> None:
        """Queues uploads of marked payloads, and marks entries as clean whose payloads have been uploaded."""
        with self._lock:
            if self._clock() < self._retry_at:
                return
        try:
            markers = self._markers.all()
            for marker in markers:
                if not self._queue(marker):
                    break
            self._clean({marker.name for marker in markers})
        except KVStoreError as exc:
            self._folder.failed("look for uploads", exc)

    def _clean(self, marked: set[str]) -> None:
        with self._folder.ledger.file.reading("list dirty entries") as db:
            names = [row[0] for row in db.execute("SELECT name FROM entries WHERE dirty = 1")]
        for name in names:
            # It may have been marked since the scan; markers come before entries, so another look tells.
            if name not in marked and self._markers.find(name) is None:
                self._folder.ledger.uploaded(name)

    def _queue(self, marker: Marker) -> bool:
        """Queues an upload, unless it is queued already. Returns False if the queue is full."""
        with self._lock:
            if marker.name in self._queued:
                return True
            self._queued.add(marker.name)

        def run() -> None:
            try:
                self._upload(marker)
            finally:
                with self._lock:
                    self._queued.discard(marker.name)

        queued = self._later(marker.nbytes, run)
        if not queued:
            with self._lock:
                self._queued.discard(marker.name)
        return queued

    def _upload(self, marker: Marker) -> None:
        locks, number = self._folder.ledger.locks, UPLOADING + number_of(marker.name)
        try:
            if not locks.acquire(number):
                return  # another process is at it
            try:
                if self.is_dirty(marker.name):
                    self._upload_locked(marker)
            finally:
                locks.release(number)
        except KVStoreError as exc:
            self._failed(marker.name, exc)

    def _upload_locked(self, marker: Marker) -> None:
        buffer = self._buffers.take(marker.nbytes)
        if buffer is None:
            return  # a later `queue_uploads` tries again
        try:
            data = buffer[: marker.nbytes]
            if not self._load(marker, data):
                return
            self._slow.put(marker.name, [data])
        finally:
            self._buffers.give_back(buffer)
        self._count("uploads", 1)
        with self._lock:
            self._failures = 0
        if not self._markers.remove(marker.name):
            self._slow.delete([marker.name])
            return
        try:
            self._folder.ledger.uploaded(marker.name)
        except KVStoreError as exc:
            log.debug("the entry stays dirty until later: %s", exc)

    def _load(self, marker: Marker, data: memoryview) -> bool:
        """Reads the file into `data`. One that is gone or cut short can't be uploaded: it is dropped, and
        this returns False."""
        got = self._folder.fast.read(marker.name, 0, [data])
        state = None
        if got != marker.nbytes:
            # In this order: a save that is under way at the first look has its file at the second.
            state = self._folder.ledger.state(marker.name)
            if state == "writing":
                return False
            got = self._folder.fast.read(marker.name, 0, [data])
        if got == marker.nbytes:
            return True
        if got is None and state is None:
            log.debug("payload %s was marked, and never saved", marker.name)
        else:
            self._count("upload_failures", 1)
            log.warning(
                "payload %s is lost before its upload: %d of %d bytes are left",
                marker.name,
                got or 0,
                marker.nbytes,
            )
        self._folder.discard(marker.name)
        return False

    def _failed(self, name: str, exc: KVStoreError) -> None:
        self._count("upload_failures", 1)
        with self._lock:
            if self._clock() < self._retry_at:
                return  # this upload was under way when the first one failed, which has set the pause
            first = not self._failures
            pause = min(BACKOFF_S * 2**self._failures, MAX_BACKOFF_S)
            self._failures = min(self._failures + 1, 16)
            self._retry_at = self._clock() + pause
        level = logging.WARNING if first else logging.DEBUG
        log.log(level, "upload of %s failed, tried again in %.0f s or more: %s", name, pause, exc)
