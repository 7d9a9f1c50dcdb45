"""The tier's ledger: what is in the folder, what is being written to it, and what was used last.

Shared by all processes of a node through one SQLite file, `<folder>/.tier/ledger.sqlite`, and an empty file
of locks beside it. The rule that keeps the folder within its capacity at every moment, as seen from outside:

    the bytes of entries and reservations together never exceed the capacity, and no byte is in the folder,
    temporary files included, that no entry or reservation accounts for.

Order of a write, and what a crash after each step leaves:
    1. reserve   one transaction: victims' files are unlinked, then their entries go, then the bytes are
                 reserved. Killed after an unlink: an entry without a file, a miss, the first to go next time.
    2. write     the payload store's put            a reservation whose owner is gone, and a temporary file
    3. settle    the reservation becomes an entry   before it: a file under a dead owner's reservation
A dead owner's reservation counts until its temporary file is certainly gone (kvstore.blobs.upkeep).

Why unlink inside the transaction: rows that go before their files would leave files without rows after a
crash, and the folder over its capacity. The price is that other processes' reservations wait for the unlinks,
1.7 ms per 32 MiB file on ext4; reads of the cache never touch the ledger.

Who is alive? Each ledger object holds a lock on a random number; the kernel drops it with the process.

Uses are noted in memory and written together (flush), so they cost readers a dictionary entry. They are
counted, not timed. What other processes have not flushed yet is not taken into account.
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

from kvstore.blobs.ledger_file import LedgerFile
from kvstore.blobs.rangelocks import OWNERS, RangeLocks
from schemas.settings import BreakerSettings

#: Victims of one transaction: it holds the other processes' up for as long as the unlinks take.
MAX_VICTIMS = 1024
#: Uses kept in memory; the oldest are forgotten.
MAX_USES = 8192
#: Names in one statement.
_CHUNK = 500

#: Unlinks payloads; raises KVStoreError if one may still be there.
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
    """What the folder holds, payloads that are being written included in the bytes."""

    nbytes: int
    payloads: int
    #: Not uploaded yet, of these.
    dirty_bytes: int
    dirty_payloads: int
    capacity_bytes: int


class Ledger:
    """The ledger of the payload folder `folder`. No I/O until it is used; safe for many threads.

    Every method that says nothing else raises KVStoreError (see LedgerFile) when the ledger can't be used.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        capacity_bytes: int,
        *,
        busy_timeout_s: float = 0.5,
        breaker: BreakerSettings | None = None,
    ) -> None:
        #: Absolute once: a later chdir must not move the cache.
        self.folder = str(Path(folder).absolute())
        self.capacity_bytes = capacity_bytes
        self.locks = RangeLocks(f"{self.folder}/.tier/locks")
        self.file = LedgerFile(
            f"{self.folder}/.tier/ledger.sqlite", busy_timeout_s, self.locks, self._opened, breaker
        )
        # The lock guards the fields below it.
        self._lock = threading.Lock()
        self._uses: dict[str, None] = {}
        self._owner: tuple[int, int] | None = None

    def __repr__(self) -> str:
        return f"Ledger({self.folder!r}, capacity_bytes={self.capacity_bytes})"

    def reserve(self, name: str, nbytes: int, unlink: Unlink, *, dirty: bool = False) -> Reservation | None:
        """Make room for a payload by evicting the least recently used ones; None if there can't be any.

        There can't while the folder has not been compared with the ledger, for more bytes than the
        capacity, for more dirty ones than half of it, and where everything else is dirty or being written.
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
            # What can't be evicted leaves too little: then nothing is evicted for it.
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
        """The payload is in the folder: make an entry of its reservation.

        False if it was deleted meanwhile, or the ledger made anew: then the file must go, and after it
        the reservation (release).
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
        """The payload is not in the folder: forget its reservation."""
        with self.file.writing("release") as db:
            db.execute("DELETE FROM reservations WHERE token = ?", (reservation.token,))

    def yield_room(self, nbytes: int, unlink: Unlink) -> None:
        """The disk is full before the capacity is reached: evict so many bytes, for the next write to fit."""
        with self.file.writing("evict") as db:
            make_room(db, nbytes, unlink)

    def forget(self, names: Sequence[str]) -> None:
        """These were deleted: no entries any more, and who is writing one must not settle it."""
        if self.file.is_absent():
            return
        for start in range(0, len(names), _CHUNK):
            chunk = list(names[start : start + _CHUNK])
            some = f"name IN ({','.join('?' * len(chunk))})"
            # Most deletes are of payloads that this node has never had: those need no writer's lock.
            with self.file.reading("look up") as db:
                known = db.execute(
                    f"SELECT 1 FROM entries WHERE {some} UNION ALL SELECT 1 FROM reservations WHERE {some}",
                    chunk * 2,
                ).fetchone()
            if known:
                with self.file.writing("forget") as db:
                    db.execute(f"DELETE FROM entries WHERE {some}", chunk)
                    db.execute(f"UPDATE reservations SET cancelled = 1 WHERE {some}", chunk)

    def uploaded(self, name: str) -> None:
        """The shared store has it: it may be evicted."""
        with self.file.writing("note an upload") as db:
            db.execute("UPDATE entries SET dirty = 0 WHERE name = ?", (name,))

    def state(self, name: str) -> Literal["writing", "kept"] | None:
        """Whether somebody is writing it (or died of it, and was not tidied up after), or it has an entry."""
        with self.file.reading("look up a payload") as db:
            if db.execute("SELECT 1 FROM reservations WHERE name = ?", (name,)).fetchone():
                return "writing"
            return "kept" if db.execute("SELECT 1 FROM entries WHERE name = ?", (name,)).fetchone() else None

    def note(self, name: str) -> None:
        """Note a use, in memory. Never raises."""
        with self._lock:
            self._uses.pop(name, None)
            self._uses[name] = None
            if len(self._uses) > MAX_USES:
                del self._uses[next(iter(self._uses))]

    def flush(self) -> None:
        """Write the uses that were noted; if that fails they are forgotten."""
        uses = self._take_uses()
        if uses:
            with self.file.writing("note uses") as db:
                _apply(db, uses)

    def usage(self) -> TierUsage:
        """What there is now: nothing, where no ledger was made yet."""
        if self.file.is_absent():
            return TierUsage(0, 0, 0, 0, self.capacity_bytes)
        with self.file.reading("usage") as db:
            nbytes, payloads, dirty_bytes, dirty_payloads = db.execute(
                "SELECT nbytes, payloads, dirty_bytes, dirty_payloads FROM totals"
            ).fetchone()
        return TierUsage(nbytes, payloads, dirty_bytes, dirty_payloads, self.capacity_bytes)

    def close(self) -> None:
        """Give up every lock and the connection. Idempotent; later calls raise Closed."""
        self.file.close()
        self.locks.close()

    def _take_uses(self) -> list[str]:
        with self._lock:
            uses, self._uses = self._uses, {}
        return list(uses)

    def own_number(self) -> int:
        """The number of the lock that says that this process is alive; another one after a fork."""
        with self._lock:
            pid = os.getpid()
            if self._owner is None or self._owner[0] != pid:
                self._owner = (pid, secrets.randbits(60))
            number = self._owner[1]
        # Held already, but for the first time and after a fork.
        self.locks.acquire(OWNERS + number)
        return number

    def _opened(self, db: sqlite3.Connection) -> None:
        """First thing on a new connection: if nobody else is alive, the ledger is to be compared again.

        What a power cut has undone, or a person has changed in the folder, is found that way.
        """
        alone = not self.locks.taken(OWNERS, 1 << 60)
        self.own_number()
        if alone:
            db.execute("UPDATE totals SET scanned_s = 0")


def make_room(db: sqlite3.Connection, over: int, unlink: Unlink) -> bool:
    """Evict the least recently used payloads until `over` bytes are gone; False if they can't be.

    Evicts what it can in any case, so a folder that is far over its capacity shrinks with every call.
    """
    victims: list[str] = []
    if over > 0:
        # By dirty, use and size: the index alone answers it.
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
    """A payload is in the folder, used just now."""
    db.execute("UPDATE totals SET uses = uses + 1")
    db.execute(
        "INSERT INTO entries (name, nbytes, used, dirty) VALUES (?, ?, (SELECT uses FROM totals), ?) "
        "ON CONFLICT (name) DO UPDATE SET nbytes = excluded.nbytes, used = excluded.used, "
        "dirty = excluded.dirty",
        (name, nbytes, dirty),
    )


def _apply(db: sqlite3.Connection, uses: Sequence[str]) -> None:
    """Put names that were used at the end of the order of eviction, the last one last."""
    if uses:
        first = int(db.execute("SELECT uses FROM totals").fetchone()[0]) + 1
        db.executemany("UPDATE entries SET used = ? WHERE name = ?", list(enumerate(uses, first)))
        db.execute("UPDATE totals SET uses = uses + ?", (len(uses),))
