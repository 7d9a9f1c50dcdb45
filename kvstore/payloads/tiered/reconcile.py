"""Reconciler: brings the tier's folder and its ledger into agreement, after crashes and from time to time.

    a reservation whose owner is gone     freed, once its temporary file is certainly removed; if the file
                                          has got its name already, it becomes an entry
    a file without an entry               adopted, the oldest first to be evicted; a folder over its
                                          capacity is trimmed at once
    an entry without a file               dropped

Until a ledger has been compared with its folder once (a new ledger, or the first process after all others
have ended), nothing is reserved, because nobody knows what there is. One process at a time compares, in
steps of a thousand files; if it dies another one starts again.

Races, and why they are harmless. A file is listed, evicted, and then adopted: that leaves an entry without a
file, which the second half of the same scan drops. An entry's file is missing, is filled again, and then the
entry would be dropped: it isn't, because the entry's use has changed. A dead owner may have written to its
temporary file until it died. So its reservation is freed two seconds after its death is noticed, after a
removal of temporary files that are one second old (LocalPayloads keeps a lock on those being written).
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from kvstore.payloads.local import remove_temporary
from kvstore.payloads.port import Listed, PayloadStore
from kvstore.payloads.tiered.ledger import Ledger, Reservation, Unlink, make_room, put_entry
from kvstore.payloads.tiered.locks import OWNERS, SCANNING
from kvstore.payloads.tiered.markers import Markers

log = logging.getLogger(__name__)

#: Files, or entries, that one step looks at.
STEP = 1000
#: Age of a temporary file that may go, and how long after its owner's death a reservation is freed, in
#: seconds.
TEMPORARY_S, DEAD_S = 1.0, 2.0
#: How often a running node compares the folder with the ledger, in seconds.
SCAN_EVERY_S = 3600.0
#: Taken from an adopted file's time to make its `used`: adopted files come before all uses, counted from 1.
_ADOPTED = 1 << 40
_END = object()


class Reconciler:
    """Reconciles one ledger. Every method raises KVStoreError if the ledger or the folder can't be used."""

    def __init__(
        self,
        fast: PayloadStore,
        ledger: Ledger,
        markers: Markers,
        unlink: Unlink,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fast = fast
        self._ledger = ledger
        self._markers = markers
        self._unlink = unlink
        self._clock = clock
        self._ready = False
        # The lock guards the fields below it, and is held while this process compares.
        self._lock = threading.Lock()
        self._steps: Iterator[None] | None = None
        self._dead_since: dict[int, float] = {}

    def ready(self, budget_s: float) -> bool:
        """Returns whether the ledger knows what is in the folder. If not, compares for at most `budget_s`."""
        if not self._ready:
            self._ready = self._scanned_s() > 0 or self._advance(budget_s, wait=True)
        return self._ready

    def check_again(self) -> None:
        """Makes `ready` ask again: a reservation was refused, perhaps because the ledger is a new one."""
        self._ready = False

    def housekeeping(self, budget_s: float) -> bool:
        """Writes uses, frees dead owners' reservations, and compares if it is time to. Returns True if it is
        to be called again soon."""
        self._ledger.flush()
        self._free_dead_reservations()
        age_s = time.time() - self._scanned_s()
        if self._steps is not None or not 0 <= age_s < SCAN_EVERY_S:
            self._advance(budget_s)
        return self._steps is not None

    def _scanned_s(self) -> float:
        with self._ledger.file.reading("look up the last scan") as db:
            return float(db.execute("SELECT scanned_s FROM totals").fetchone()[0])

    # Reservations whose owner is gone

    def _free_dead_reservations(self) -> None:
        if not self._lock.acquire(blocking=False):
            return
        try:
            # Also files without a reservation, which was lost with its ledger.
            all_removed = remove_temporary(self._ledger.folder, time.time(), TEMPORARY_S)
            now = self._clock()
            dead = self._dead()
            self._dead_since = {one.token: self._dead_since.get(one.token, now) for one in dead}
            due = [one for one in dead if now - self._dead_since[one.token] >= DEAD_S]
            for one in due if all_removed else ():
                self._take_over(one)
        finally:
            self._lock.release()

    def _dead(self) -> list[Reservation]:
        with self._ledger.file.reading("look for dead owners") as db:
            rows = db.execute("SELECT owner, token, name, nbytes, dirty FROM reservations").fetchall()
        own = self._ledger.own_number()
        alive = {
            owner
            for owner in {row[0] for row in rows}
            if owner == own or self._ledger.locks.taken(OWNERS + owner)
        }
        return [Reservation(row[1], row[2], row[3], bool(row[4])) for row in rows if row[0] not in alive]

    def _take_over(self, dead: Reservation) -> None:
        """Ends a dead owner's write, whose temporary file is gone. If the file has its name, the owner died
        before it could settle."""
        found = next((one for one in self._fast.list(dead.name) if one.name == dead.name), None)
        with self._ledger.file.writing("take over a reservation") as db:
            row = db.execute("SELECT cancelled FROM reservations WHERE token = ?", (dead.token,)).fetchone()
            if row is None:
                return  # another process was faster
            if found is not None and row[0]:
                self._unlink([dead.name])
            db.execute("DELETE FROM reservations WHERE token = ?", (dead.token,))
            if found is not None and not row[0]:
                put_entry(db, dead.name, found.nbytes, dirty=self._markers.find(dead.name) is not None)

    # The comparison

    def _advance(self, budget_s: float, *, wait: bool = False) -> bool:
        """Compares for about `budget_s`, at least one step. Returns True once everything is compared.

        With `wait`, which may take as long again, returns True also if another thread has finished meanwhile.
        """
        if not self._lock.acquire(timeout=budget_s if wait else 0):
            return False
        try:
            if self._steps is None:
                if wait and self._scanned_s() > 0:
                    return True
                if not self._ledger.locks.acquire(SCANNING):
                    return False
                self._steps = self._scan()
            until = self._clock() + budget_s
            finished = False
            try:
                while not finished:
                    finished = next(self._steps, _END) is _END
                    if self._clock() >= until:
                        break
            except BaseException:
                finished = True
                raise
            finally:
                if finished:
                    self._steps = None
                    self._ledger.locks.release(SCANNING)
            return finished
        finally:
            self._lock.release()

    def _scan(self) -> Iterator[None]:
        dirty = {marker.name for marker in self._markers.all()}
        files = self._fast.list()
        while chunk := list(islice(files, STEP)):
            self._adopt(chunk, dirty)
            yield
        last = ""
        while True:
            with self._ledger.file.reading("compare entries") as db:
                page = db.execute(
                    "SELECT name, used FROM entries WHERE name > ? ORDER BY name LIMIT ?", (last, STEP)
                ).fetchall()
            if not page:
                break
            self._drop_missing(page)
            last = page[-1][0]
            yield
        while True:
            with self._ledger.file.writing("finish comparing") as db:
                # A transaction evicts a bounded number; payloads that are dirty or being written stay.
                if self._trim(db) or not db.execute("SELECT 1 FROM entries WHERE dirty = 0").fetchone():
                    db.execute("UPDATE totals SET scanned_s = ?", (time.time(),))
                    return
            yield

    def _adopt(self, files: Sequence[Listed], dirty: set[str]) -> None:
        with self._ledger.file.writing("adopt files") as db:
            for one in files:
                known = db.execute("SELECT nbytes FROM entries WHERE name = ?", (one.name,)).fetchone()
                # A file with a reservation is its owner's business.
                if (
                    known == (one.nbytes,)
                    or db.execute("SELECT 1 FROM reservations WHERE name = ?", (one.name,)).fetchone()
                ):
                    continue
                db.execute(
                    "INSERT INTO entries (name, nbytes, used, dirty) VALUES (?, ?, ?, ?) "
                    "ON CONFLICT (name) DO UPDATE SET nbytes = excluded.nbytes",
                    (one.name, one.nbytes, int(one.modified_s) - _ADOPTED, one.name in dirty),
                )
            self._trim(db)

    def _trim(self, db: sqlite3.Connection) -> bool:
        (total,) = db.execute("SELECT nbytes FROM totals").fetchone()
        return make_room(db, total - self._ledger.capacity_bytes, self._unlink)

    def _drop_missing(self, page: Sequence[tuple[str, int]]) -> None:
        missing = [row for row in page if self._fast.read(row[0], 0, []) is None]
        if not missing:
            return
        with self._ledger.file.writing("drop entries without files") as db:
            db.executemany("DELETE FROM entries WHERE name = ? AND used = ?", missing)
