"""TieredPayloads: a bounded folder on this node's disk in front of a payload store that all nodes share.

    store.py          this file: reads, saves, deletes
    fetcher.py        fetches a payload once for all processes and threads that want it
    flights.py        fetches that are under way, shared by the threads of a process
    folder.py         the fast store, whose failures are only misses
    ledger.py         keeps the folder within its capacity, for all processes of the node
    reconcile.py      brings ledger and folder into agreement after crashes
    writeback.py      saves to the folder, and uploads afterwards
    markers.py        names of payloads that are not uploaded yet
    locks.py          locks between processes

Order of writes, so that a crash after any step is harmless:
    save, through    1. put to the shared store       crash: a payload that nothing names
                     2. reserve, write, settle        the folder lacks it, which is a miss (ledger.py)
    save, back       writeback.py
    fill             1. lock, fetch (fetcher.py)      the kernel drops the lock
                     2. reserve, write, settle        as above
    delete           1. unmark what is dirty          a file that is evicted like any other
                     2. delete it here
                     3. delete from the shared store  copies here that nothing names, evicted in time
                     4. delete the copies here
A copy in the folder is served even if the shared store has lost the payload, or another node has deleted it
there: payloads are immutable and their names are never used again. The index decides what exists.

What write = "back" costs: a save is over when the folder has it. Until it is uploaded other nodes miss it,
although the index names it already, and it is lost if this node's disk is: a payload missing in the shared
store may be one that another node still has to upload.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

from kvstore.errors import KVStoreError, PermissionDenied
from kvstore.keys import NamespaceId, parse_payload_name
from kvstore.payloads.port import Listed, PayloadStore
from kvstore.payloads.tiered.fetcher import Fetcher
from kvstore.payloads.tiered.flights import Buffers
from kvstore.payloads.tiered.folder import BoundedFolder, Count, Later
from kvstore.payloads.tiered.ledger import Ledger, TierUsage
from kvstore.payloads.tiered.markers import Markers
from kvstore.payloads.tiered.writeback import WriteBack
from kvstore.rules.tiers import Tier

#: How often uses are written, dead processes' files removed, and their uploads taken over, in seconds.
HOUSEKEEPING_S = 5.0


class TieredPayloads(PayloadStore):
    """The payload store `slow`, with `fast` in front of it, within the capacity of the same folder's
    `ledger`.

    `later(nbytes, job)` runs `job`, which holds `nbytes` of memory, soon and on another thread, or answers
    False (Transfers.errand). `memory_bytes` bounds the payloads in memory, including those that wait to be
    written. Errors are those of `slow`: failures of the folder raise nothing. While `scarce` says that reads
    of `slow` are, nothing is brought to the folder that no caller waits for.
    """

    def __init__(
        self,
        fast: PayloadStore,
        slow: PayloadStore,
        ledger: Ledger,
        *,
        later: Later,
        write: Literal["through", "back"] = "through",
        count: Count = lambda _name, _amount: None,
        memory_bytes: int = 256 << 20,
        wait_s: float = 3.0,
        scarce: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self._slow = slow
        self._ledger = ledger
        self._later = later
        self._write = write
        self._memory_bytes = memory_bytes
        self._count = count
        self._wait_s = wait_s
        self._clock = clock
        buffers = Buffers(memory_bytes)
        self._folder = BoundedFolder(
            fast,
            ledger,
            Markers(ledger.folder, ledger.access),
            queue_housekeeping=self._queue_housekeeping,
            count=count,
            clock=clock,
        )
        self._fetcher = Fetcher(
            self._folder,
            slow,
            buffers,
            later,
            count=count,
            wait_s=wait_s,
            scarce=scarce,
            clock=clock,
            sleep=sleep,
        )
        self._back = WriteBack(self._folder, slow, buffers, later, count=count, clock=clock, sleep=sleep)
        #: Called with every housekeeping; True: again soon.
        self.chore: Callable[[], bool] = lambda: False
        #: What the folder held at the last housekeeping; None before the first.
        self.seen: TierUsage | None = None
        # A race on it costs one housekeeping too many.
        self._housekeeping_at = float("-inf")

    def __repr__(self) -> str:
        return (
            f"TieredPayloads({self._folder.fast!r}, {self._slow!r}, {self._ledger!r}, write={self._write!r})"
        )

    # Saving

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        _check(name)
        self._housekeeping_if_due()
        self._fetcher.cancel(name)
        nbytes = sum(view.nbytes for view in buffers)
        if self._back.is_dirty(name):
            # This is a second put of the name: the upload of the first must not come after it.
            with self._back.held(name, self._wait_s):
                self._put_through(name, buffers, nbytes)
                self._back.unmark(name)
        elif self._write == "through" or nbytes > self._memory_bytes:
            # A payload that doesn't fit into the memory for uploads would never be uploaded.
            self._put_through(name, buffers, nbytes)
        elif not self._back.add(name, buffers, nbytes):
            self._put_through(name, buffers, nbytes)

    def _put_through(self, name: str, buffers: Sequence[memoryview], nbytes: int) -> None:
        self._slow.put(name, buffers)
        if not self._folder.keep(name, buffers, nbytes) and self._folder.has(name, 0):
            # The folder has another payload of that name.
            self._folder.drop([name])

    # Reading

    def read(
        self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None
    ) -> int | None:
        _check(name)
        if offset < 0:
            raise ValueError(f"negative offset {offset}")
        self._housekeeping_if_due()
        got = self._folder.read(name, offset, into, size)
        if got is not None:
            return got
        want = 0 if size is None else min(sum(view.nbytes for view in into), size - offset)
        if size is None or want <= 0 or not self._folder.may_keep(size):
            return self._fetcher.range(name, offset, into, size)
        if 2 * want < size:
            return self._fetcher.part(name, offset, into, size)
        return self._fetcher.whole(name, offset, into, size)

    def tier(self, name: str, nbytes: int) -> Tier:
        return "folder" if self._folder.has(name, nbytes) else self._slow.tier(name, nbytes)

    # The rest

    def drop_copy(self, name: str) -> bool:
        """Drops the folder's copy of a payload whose bytes failed verification. Does no I/O on a network.

        Returns True if reading again may give other bytes, because there was a copy. A dirty one is dropped
        as well: it is bad, so it must not be uploaded. But it was the original, and there is nothing better
        elsewhere, so this returns False, and the store evicts the payload.
        """
        _check(name)
        cancelled = self._fetcher.cancel(name)
        dropped, dirty = self._folder.discard(name)
        return cancelled or (dropped and not dirty)

    def delete(self, names: Sequence[str]) -> int:
        names = list(dict.fromkeys(names))
        for name in names:
            _check(name)
        dirty = [name for name in names if self._back.unmark(name)]
        if dirty:
            self._folder.drop(dirty)
            self._slow.delete(dirty)
        clean = [name for name in names if name not in set(dirty)]
        removed = len(dirty) + self._slow.delete(clean)
        # From now on no thread can fetch them any more.
        for name in names:
            self._fetcher.cancel(name)
        self._folder.drop(names)
        return removed

    def list(self, prefix: str = "") -> Iterator[Listed]:
        # Dirty payloads first: they may be uploaded while the listing goes on, and then be in one or both.
        dirty = self._back.listed(prefix)
        for one in self._slow.list(prefix):
            dirty.pop(one.name, None)
            yield one
        yield from dirty.values()

    def ping(self) -> None:
        self._slow.ping()

    def close(self) -> None:
        """Closes both stores. Dirty payloads stay dirty, for the next process that opens the folder."""
        self._folder.close()
        self._slow.close()

    def fill(self, name: str, size: int) -> bool:
        """Brings a payload of `size` bytes to the folder, now. Returns whether it is there afterwards.

        Raises what the shared store raises.
        """
        _check(name)
        return self._fetcher.fill(name, size, wait=True)

    def housekeeping(self) -> None:
        """Writes uses, cleans up after dead processes, and queues uploads that are not under way. Never
        raises.

        Reads and saves queue it every HOUSEKEEPING_S; an idle process may call it as often.
        """
        more = self._folder.housekeeping()
        self._back.queue_uploads()
        more |= self.chore()
        with suppress(KVStoreError):
            self.seen = self._ledger.usage()
        if more:
            self._queue_housekeeping()

    @property
    def copies(self) -> PayloadStore:
        """The folder's own payloads, for those who look into them; nothing may be put or deleted there."""
        return self._folder.fast

    def namespaces(self) -> Sequence[NamespaceId]:
        """Returns the namespaces of which the folder may have payloads. Raises PermissionDenied."""
        try:
            found = [path.name for path in Path(self._ledger.folder).iterdir()]
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise PermissionDenied(f"{self._ledger.folder}: {exc.strerror}") from exc
        return sorted(NamespaceId(name) for name in found if re.fullmatch("[0-9a-f]{16}", name))

    def usage(self) -> TierUsage:
        """Returns what the folder holds. Makes no ledger. Raises KVStoreError if there is one and it can't be
        read."""
        return self._ledger.usage()

    def _housekeeping_if_due(self) -> None:
        now = self._clock()
        if now >= self._housekeeping_at:
            self._housekeeping_at = now + HOUSEKEEPING_S
            self._queue_housekeeping()

    def _queue_housekeeping(self) -> None:
        self._later(0, self.housekeeping)


def _check(name: str) -> None:
    if parse_payload_name(name) is None:
        raise ValueError(f"not a payload name: {name!r}")
