"""TieredPayloads: a bounded folder on this node's disk in front of a payload store that all nodes share.

    tiered.py         this file: reads, saves, deletes
    fetcher.py        a payload is fetched once for all processes and threads that want it
    flights.py        of those, what is shared by the threads
    folder.py         the fast store, whose failures are only misses
    ledger.py         what is in the folder, within its capacity, for all processes of the node
    upkeep.py         the ledger and the folder after crashes
    writeback.py      saves that are uploaded afterwards
    markers.py        what is not uploaded yet
    rangelocks.py     locks between processes

Order of writes, so that a crash after any step is harmless:
    save, through    1. put to the shared store       crash: a payload that nothing names
                     2. reserve, write, settle        the folder is behind, which is a miss (ledger.py)
    save, back       writeback.py
    fill             1. lock, fetch (fetcher.py)      the kernel drops the lock
                     2. reserve, write, settle        as above
    delete           1. unmark what is dirty          a file that is evicted as any other
                     2. delete it here
                     3. delete from the shared store  copies here that nothing names, evicted in time
                     4. delete the copies here
A copy in the folder that the shared store has lost, or has deleted for another node, is served: payloads are
immutable and their names are never used again. The index decides what exists.

What write = "back" costs: a save is over when the folder has it. Until it is uploaded other nodes miss it,
with the index naming it already, and if this node's disk is lost it is lost: a payload missing in the shared
store may be one that another node still has to upload.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Literal

from kvstore.blobs.fetcher import Fetcher
from kvstore.blobs.flights import Buffers
from kvstore.blobs.folder import BoundedFolder, Count, Later
from kvstore.blobs.ledger import Ledger, TierUsage
from kvstore.blobs.markers import Markers
from kvstore.blobs.writeback import WriteBack
from kvstore.errors import KVStoreError
from kvstore.keys import parse_payload_name
from kvstore.ports import Listed, PayloadStore

#: Uses are written, dead processes' leavings looked for, and uploads taken over this often.
TEND_S = 5.0


class TieredPayloads(PayloadStore):
    """`fast` within the capacity of `ledger`, which is of the same folder, in front of `slow`.

    `later(nbytes, job)` runs `job`, which holds `nbytes` of memory, soon and on another thread, or answers
    False (kvstore.transfers.Transfers.errand). `memory_bytes` bounds the payloads in memory, those that wait
    to be written included. Errors are those of `slow`: nothing that happens to the folder is one.
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
            fast, ledger, Markers(ledger.folder), tend_soon=self._tend_soon, count=count, clock=clock
        )
        self._fetcher = Fetcher(
            self._folder, slow, buffers, later, count=count, wait_s=wait_s, clock=clock, sleep=sleep
        )
        self._back = WriteBack(self._folder, slow, buffers, later, count=count, clock=clock, sleep=sleep)
        #: What the folder held when it was tended last; None: not yet.
        self.seen: TierUsage | None = None
        # A race on it costs a tending too many.
        self._tend_at = float("-inf")

    def __repr__(self) -> str:
        return (
            f"TieredPayloads({self._folder.fast!r}, {self._slow!r}, {self._ledger!r}, write={self._write!r})"
        )

    @property
    def gap_bytes(self) -> int:
        return self._slow.gap_bytes

    # Saving

    def put(self, name: str, buffers: Sequence[memoryview]) -> None:
        _check(name)
        self._tend_if_due()
        self._fetcher.cancel(name)
        nbytes = sum(view.nbytes for view in buffers)
        if self._back.is_dirty(name):
            # A second put of the name: the first one's upload must not come after it.
            with self._back.held(name, self._wait_s):
                self._put_through(name, buffers, nbytes)
                self._back.unmark(name)
        elif self._write == "through" or nbytes > self._memory_bytes:
            # What doesn't fit into the memory for uploads would never be uploaded.
            self._put_through(name, buffers, nbytes)
        elif not self._back.add(name, buffers, nbytes):
            self._put_through(name, buffers, nbytes)

    def _put_through(self, name: str, buffers: Sequence[memoryview], nbytes: int) -> None:
        self._slow.put(name, buffers)
        if not self._folder.keep(name, buffers, nbytes) and self._folder.has(name, 0):
            # What the folder has of that name is not this.
            self._folder.drop([name])

    # Reading

    def read(
        self, name: str, offset: int, into: Sequence[memoryview], *, size: int | None = None
    ) -> int | None:
        _check(name)
        if offset < 0:
            raise ValueError(f"negative offset {offset}")
        self._tend_if_due()
        got = self._folder.read(name, offset, into, size)
        if got is not None:
            return got
        want = 0 if size is None else min(sum(view.nbytes for view in into), size - offset)
        if size is None or want <= 0 or not self._folder.may_keep(size):
            return self._fetcher.range(name, offset, into, size)
        if 2 * want < size:
            return self._fetcher.part(name, offset, into, size)
        return self._fetcher.whole(name, offset, into, size)

    # The rest

    def distrust(self, name: str) -> bool:
        """As the port says. A dirty copy is dropped as well: it is bad, so it must not be uploaded.

        It was the original, though, and nothing better is elsewhere: False, for the store to evict it.
        """
        _check(name)
        flew = self._fetcher.cancel(name)
        dropped, dirty = self._folder.discard(name)
        return flew or (dropped and not dirty)

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
        # After this moment nobody can fetch them any more.
        for name in names:
            self._fetcher.cancel(name)
        self._folder.drop(names)
        return removed

    def list(self, prefix: str = "") -> Iterator[Listed]:
        # First what may be uploaded, and so be in both or in one of them, while the listing goes on.
        dirty = self._back.listed(prefix)
        for one in self._slow.list(prefix):
            dirty.pop(one.name, None)
            yield one
        yield from dirty.values()

    def ping(self) -> None:
        self._slow.ping()

    def close(self) -> None:
        """What is dirty stays so, for the next process that opens the folder."""
        self._folder.close()
        self._slow.close()

    def fill(self, name: str, size: int) -> bool:
        """Bring a payload of `size` bytes to the folder, now; whether it is there afterwards.

        Raises what the shared store raises.
        """
        _check(name)
        return self._fetcher.fill(name, size, wait=True)

    def tend(self) -> None:
        """Write uses, tidy up after dead processes, queue uploads that nobody is at. Never raises.

        Reads and saves have it done every TEND_S; whoever is idle for long may call it as often.
        """
        more = self._folder.tend()
        self._back.sweep()
        with suppress(KVStoreError):
            self.seen = self._ledger.usage()
        if more:
            self._tend_soon()

    def usage(self) -> TierUsage:
        """What the folder holds; makes nothing. Raises KVStoreError if its ledger can't be read."""
        return self._ledger.usage()

    def _tend_if_due(self) -> None:
        now = self._clock()
        if now >= self._tend_at:
            self._tend_at = now + TEND_S
            self._tend_soon()

    def _tend_soon(self) -> None:
        self._later(0, self.tend)


def _check(name: str) -> None:
    if parse_payload_name(name) is None:
        raise ValueError(f"not a payload name: {name!r}")
