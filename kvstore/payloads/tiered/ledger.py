"""The tier's ledger: it records what is in the folder, what is being written to it, and what was used last.

Shared by all processes of a node through one SQLite file, `<folder>/.tier/ledger.sqlite`, and an empty file
of locks beside it. The rule that keeps the folder within its capacity at every moment, as seen from outside:

    the bytes of entries and reservations together never exceed the capacity, and no byte is in the folder,
    temporary files included, that no entry or reservation accounts for.

Order of a write, and what a crash after each step leaves:
    1. reserve   one transaction: victims' files are unlinked, then their entries go, then the bytes are
                 reserved. Killed after an unlink: an entry without a file, a miss, the first to go next time.
    2. write     the payload store's put            a reservation whose owner is gone, and a temporary file
    3. settle    the reservation becomes an entry   before it: a file under a dead owner's reservation
A dead owner's reservation counts until its temporary file is certainly gone (reconcile.py).

Why unlink inside the transaction: rows that go before their files would leave files without rows after a
crash, and the folder over its capacity. The price is that other processes' reservations wait for the unlinks,
1.7 ms per 32 MiB file on ext4; reads of the cache never touch the ledger.

How a dead owner is told: each ledger object holds a lock on a random number, and the kernel drops it with the
process.

Uses are noted in memory and written together (flush), so they cost readers a dictionary entry. They are
counted, not timed. Uses that other processes have not flushed yet are not taken into account.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal

from kvstore.files import OWNER, Access
from kvstore.payloads.tiered.locks import OWNERS, RangeLocks
from kvstore.payloads.tiered.schema import LedgerFile
from schemas.settings import BreakerSettings

#: Most payloads that one transaction evicts: other processes' transactions wait for the unlinks.
MAX_VICTIMS = 1024
#: Most uses kept in memory; the oldest are forgotten.
MAX_USES = 8192
#: Names in one statement.
_CHUNK = 500

#: Unlinks payloads, and raises KVStoreError if one may still be there.
Unlink = Callable[[Sequence[str]], object]


@dataclass(frozen=True, slots=True)
class Reservation:
    """Room for one payload that is about to be written."""

    token: int
    name: str
    nbytes: int
    dirty: bool


@dataclass(frozen=True, slots=True)
class TierUsage:
    """What the folder holds. `nbytes` and `dirty_bytes` include payloads that are being written."""

    nbytes: int
    payloads: int
    #: The share of these that is not uploaded yet.
    dirty_bytes: int
    dirty_payloads: int
    capacity_bytes: int


class Ledger:
    """The ledger of the payload folder `folder`. No I/O until it is used; safe for many threads.

    Unless it says otherwise, a method raises KVStoreError (see LedgerFile) if the ledger can't be used.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        busy_timeout_s: float = 0.5,
        breaker: BreakerSettings | None = None,
        access: Access = OWNER,
    ) -> None:
        #: Absolute once: a later chdir must not move the cache.
        self.folder = str(Path(folder).absolute())
        self.capacity_bytes = capacity_bytes
        self.access = access
        self.locks = RangeLocks(f"{self.folder}/.tier/locks", access)
        self.file = LedgerFile(
            f"{self.folder}/.tier/ledger.sqlite", busy_timeout_s, self.locks, self._opened, breaker, access
        )
        # The lock guards the fields below it.
        self._lock = threading.Lock()
        self._uses: dict[str, None] = {}
        self._owner: tuple[int, int] | None = None

    def __repr__(self) -> str:
        return f"Ledger({self.folder!r}, capacity_bytes={self.capacity_bytes})"

    def reserve(self, name: str, nbytes: int, unlink: Unlink, *, dirty: bool = False) -> Reservation | None:
        """Makes room for a payload by evicting the least recently used ones. Returns None if it can't be
        made.

        It can't be made while the folder has not been compared with the ledger, for more bytes than the
        capacity, if dirty bytes would exceed half of it, and if everything else is dirty or being written.
        """
        if nbytes > self.capacity_bytes:
            return None
        uses = self._take_uses()
        with self.file.writing("reserve") as db:
            _apply(db, uses)
            total, dirty_bytes, scanned_s, writing = db.execute(
                "SELECT nbytes, dirty_bytes, scanned_s, "
                "(SELECT coalesce(sum(nbytes), 0) FROM reservations WHERE dirty = 0) FROM totals"
            ).fetchone()
            if not scanned_s or (dirty and dirty_bytes + nbytes > self.capacity_bytes // 2):
                return None
            # If what can't be evicted leaves too little room, nothing is evicted for it.
            if dirty_bytes + writing + nbytes > self.capacity_bytes:
                return None
            if not make_room(db, total + nbytes - self.capacity_bytes, unlink):
                return None
            made = Reservation(secrets.randbits(62), name, nbytes, dirty)
            db.execute(
                "INSERT INTO reservations (token, name, nbytes, dirty, owner) VALUES (?, ?, ?, ?, ?)",
                (made.token, name, nbytes, dirty, self.own_number()),
            )
        return made

    def settle(self, reservation: Reservation) -> bool:
        """Makes an entry of a reservation: its payload is in the folder.

        Returns False if the payload was deleted meanwhile, or the ledger made anew: then the file must go,
        and after it the reservation (release).
        """
        with self.file.writing("settle") as db:
            row = db.execute(
                "SELECT cancelled FROM reservations WHERE token = ?", (reservation.token,)
            ).fetchone()
            if row is None or row[0]:
                return False
            db.execute("DELETE FROM reservations WHERE token = ?", (reservation.token,))
            put_entry(db, reservation.name, reservation.nbytes, dirty=reservation.dirty)
        return True

    def release(self, reservation: Reservation) -> None:
        """Forgets a reservation: its payload is not in the folder."""
        with self.file.writing("release") as db:
            db.execute("DELETE FROM reservations WHERE token = ?", (reservation.token,))

    def yield_room(self, nbytes: int, unlink: Unlink) -> None:
        """Evicts `nbytes` so that the next write fits: the disk is full before the capacity is reached."""
        with self.file.writing("evict") as db:
            make_room(db, nbytes, unlink)

    def delete(self, names: Sequence[str], unlink: Callable[[Sequence[str]], int]) -> int:
        """Deletes payloads, and returns how many `unlink` found. A write of one that is under way can't be
        settled any more.

        The files go within the transaction that drops their entries: a process that wrote one again in
        between would have a file that nobody counts.
        """
        if self.file.is_absent():
            return unlink(names)
        deleted = 0
        for start in range(0, len(names), _CHUNK):
            chunk = list(names[start : start + _CHUNK])
            some = f"name IN ({','.join('?' * len(chunk))})"
            # Most deletes are of payloads that this node has never had: those need no writer's lock.
            with self.file.reading("look up") as db:
                known = db.execute(
                    f"SELECT 1 FROM entries WHERE {some} UNION ALL SELECT 1 FROM reservations WHERE {some}",
                    chunk * 2,
                ).fetchone()
            if not known:
                deleted += unlink(chunk)
                continue
            with self.file.writing("delete") as db:
                deleted += unlink(chunk)
                db.execute(f"DELETE FROM entries WHERE {some}", chunk)
                db.execute(f"UPDATE reservations SET cancelled = 1 WHERE {some}", chunk)
        return deleted

    def uploaded(self, name: str) -> None:
        """Notes that the shared store has a payload, so that it may be evicted."""
        with self.file.writing("note an upload") as db:
            db.execute("UPDATE entries SET dirty = 0 WHERE name = ?", (name,))

    def state(self, name: str) -> Literal["writing", "kept"] | None:
        """Tells whether a payload is reserved, by a writer or by one that has died, or has an entry."""
        with self.file.reading("look up a payload") as db:
            if db.execute("SELECT 1 FROM reservations WHERE name = ?", (name,)).fetchone():
                return "writing"
            return "kept" if db.execute("SELECT 1 FROM entries WHERE name = ?", (name,)).fetchone() else None

    def note(self, name: str) -> None:
        """Notes a use, in memory. Never raises."""
        with self._lock:
            self._uses.pop(name, None)
            self._uses[name] = None
            if len(self._uses) > MAX_USES:
                del self._uses[next(iter(self._uses))]

    def flush(self) -> None:
        """Writes the uses that were noted; if that fails they are forgotten."""
        uses = self._take_uses()
        if uses:
            with self.file.writing("note uses") as db:
                _apply(db, uses)

    def usage(self) -> TierUsage:
        """Returns what the folder holds now; zeros if no ledger was made yet."""
        if self.file.is_absent():
            return TierUsage(0, 0, 0, 0, self.capacity_bytes)
        with self.file.reading("usage") as db:
            nbytes, payloads, dirty_bytes, dirty_payloads = db.execute(
                "SELECT nbytes, payloads, dirty_bytes, dirty_payloads FROM totals"
            ).fetchone()
        return TierUsage(nbytes, payloads, dirty_bytes, dirty_payloads, self.capacity_bytes)

    def close(self) -> None:
        """Gives up every lock and the connection. Idempotent; later calls raise StoreClosed."""
        self.file.close()
        self.locks.close()

    def _take_uses(self) -> list[str]:
        with self._lock:
            uses, self._uses = self._uses, {}
        return list(uses)

    def own_number(self) -> int:
        """Returns the number of the lock that says that this process is alive; another one after a fork."""
        with self._lock:
            pid = os.getpid()
            if self._owner is None or self._owner[0] != pid:
                self._owner = (pid, secrets.randbits(60))
            number = self._owner[1]
        # Held already, except the first time and after a fork.
        self.locks.acquire(OWNERS + number)
        return number

    def _opened(self, db: sqlite3.Connection) -> None:
        """Begins a new connection: if no other owner is alive, the ledger must be compared with the folder
        again.

        That finds what a power cut has undone, or a person has changed in the folder.
        """
        alone = not self.locks.taken(OWNERS, 1 << 60)
        self.own_number()
        if alone:
            db.execute("UPDATE totals SET scanned_s = 0")


def make_room(db: sqlite3.Connection, over: int, unlink: Unlink) -> bool:
    """Evicts the least recently used payloads until `over` bytes are gone. Returns whether they are.

    Evicts what it can in any case, so a folder that is far over its capacity shrinks with every call.
    """
    victims: list[str] = []
    if over > 0:
        # The index entries_by_use answers this alone.
        rows = db.execute("SELECT name, nbytes FROM entries WHERE dirty = 0 ORDER BY used")
        for name, nbytes in islice(rows, MAX_VICTIMS):
            victims.append(name)
            over -= nbytes
            if over <= 0:
                break
        rows.close()
    if victims:
        unlink(victims)
        db.executemany("DELETE FROM entries WHERE name = ?", [(name,) for name in victims])
    return over <= 0


def put_entry(db: sqlite3.Connection, name: str, nbytes: int, *, dirty: bool) -> None:
    """Enters a payload that is in the folder, as used just now."""
    db.execute("UPDATE totals SET uses = uses + 1")
    db.execute(
        "INSERT INTO entries (name, nbytes, used, dirty) VALUES (?, ?, (SELECT uses FROM totals), ?) "
        "ON CONFLICT (name) DO UPDATE SET nbytes = excluded.nbytes, used = excluded.used, "
        "dirty = excluded.dirty",
        (name, nbytes, dirty),
    )


def _apply(db: sqlite3.Connection, uses: Sequence[str]) -> None:
    """Moves used names to the end of the order of eviction, the one used last behind all."""
    if uses:
        first = int(db.execute("SELECT uses FROM totals").fetchone()[0]) + 1
        db.executemany("UPDATE entries SET used = ? WHERE name = ?", list(enumerate(uses, first)))
        db.execute("UPDATE totals SET uses = uses + ?", (len(uses),))
