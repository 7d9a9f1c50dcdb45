"""What this engine knows of encoder outputs: which are staged on this node, which can't be had, and why.

An item is one identifier, and its outcome is

    None       it is being looked up and fetched
    ready      staged and verified: it can be promised
    stored     (producer only) in the store; nothing to encode and nothing to load
    saving     encoded here and handed to the workers to be saved
    absent     or another reason (kvstore.metrics.MISS_REASONS): it can't be had now

All state belongs to the scheduler's thread, except that a fetch finishes on a transfer thread by setting
its item's `outcome` once.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from connectors.ec_staging import StagingFolder
from connectors.ec_types import StagedItem
from connectors.stats import Tally
from kvstore.errors import CorruptPayload, KVStoreError
from kvstore.keys import digest, item_key
from kvstore.ports import Run
from kvstore.reader import PayloadLate
from kvstore.store import Space, Store, miss_reason

log = logging.getLogger(__name__)

#: Items remembered; the oldest are forgotten first.
_REMEMBERED = 4096
#: The least time between two look-ups of one item.
_AGAIN_S = 0.02


@dataclass(slots=True)
class Item:
    """One identifier."""

    asked_at: float
    outcome: str | None = None
    staged: StagedItem | None = None
    #: In the staging folder.
    name: str = ""
    #: Who had it looked up, and whether others asked for it before; the latter is known with the outcome.
    asked_by: str = ""
    asked_before: bool = False
    #: Whether it was used since it was fetched.
    used: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    abandoned: bool = False


class Items:
    """The items of one engine: bounded in number here, in bytes by the staging folder."""

    def __init__(
        self, store: Store, space: Space, staging: StagingFolder, tally: Tally, *, dtype: str, consumer: bool
    ) -> None:
        self._store = store
        self._space = space
        self._staging = staging
        self._tally = tally
        self._settings = store.settings.ec
        # What is sent to a producer is meant for others: it is saved at its first use.
        self._notes = store.settings.admission.second_use and consumer
        self._dtype = dtype
        self._consumer = consumer
        self._items: OrderedDict[str, Item] = OrderedDict()

    def get(self, identifier: str) -> Item | None:
        """What is known, without asking."""
        return self._items.get(identifier)

    def forget(self, identifier: str) -> None:
        """Ask anew when the item is wanted next."""
        self._items.pop(identifier, None)

    def forget_all(self) -> None:
        """Nothing that is known, or being fetched, is of use any more."""
        self._items.clear()

    def saving(self, identifier: str) -> None:
        """The workers save the item."""
        self._items[identifier] = Item(time.monotonic(), "saving")
        self._items.move_to_end(identifier)

    def look(self, identifier: str, request_id: str, *, not_before: float | None = None) -> Item:
        """The item, asked for unless it is known; past the deadline it is known not to be had.

        That it can't be had must have been found out by asking at `not_before` or later.
        """
        now = time.monotonic()
        item = self._items.get(identifier)
        if item is None or (item.outcome is not None and self._outdated(item, request_id, now, not_before)):
            item = self._fetch(identifier, now, request_id)
        if item.outcome is None and now - item.asked_at >= self._settings.fetch_deadline_s:
            self._abandon(item)
        return item

    def look_again(self, identifier: str, request_id: str, *, waited_s: float) -> None:
        """Ask once more for an item that could not be had a moment ago, the longer waited for the rarer."""
        now = time.monotonic()
        if now - self._items[identifier].asked_at > max(_AGAIN_S, waited_s / 4):
            self._fetch(identifier, now, request_id)

    def _outdated(self, item: Item, request_id: str, now: float, not_before: float | None) -> bool:
        if item.outcome == "ready":
            return False
        if not_before is not None and item.asked_at < not_before:
            return True
        age = now - item.asked_at
        if self._consumer:
            # "absent" may have been stored since, what is being saved is soon.
            return item.outcome == "saving" or age > self._settings.absent_ttl_s
        # A producer's word is what others rely on: each request has it checked.
        return age > self._settings.absent_ttl_s or (item.asked_by != request_id and age > _AGAIN_S)

    def _abandon(self, item: Item) -> None:
        if not item.lock.acquire(blocking=False):
            return  # being written to the staging folder at this moment
        try:
            if item.outcome is None:
                item.abandoned = True
                item.outcome = "deadline"
                self._store.counters.miss("deadline", 1)
        finally:
            item.lock.release()

    def _fetch(self, identifier: str, now: float, request_id: str) -> Item:
        last = self._items.pop(identifier, None)
        item = self._items[identifier] = Item(now, asked_by=request_id)
        noted = last is not None and last.asked_by == request_id
        if last is not None and noted:
            # The same request, still waiting: noted again it would be its own first use.
            item.asked_before = last.asked_before
        while len(self._items) > _REMEMBERED:
            self._items.popitem(last=False)
        note = self._notes and not noted
        if not self._store.transfers.call(lambda: self._look_up(identifier, item, note=note)):
            item.outcome = "capacity"
            self._store.counters.miss("capacity", 1)
        return item

    def _look_up(self, identifier: str, item: Item, *, note: bool) -> None:
        """Call thread: ask the index; if it has the item, queue the read."""
        key = item_key(identifier)
        match = self._space.match(digest(key))
        if not match.runs:
            # Before the outcome, which lets the engine encode it: whether to save it is asked then.
            if note:
                item.asked_before = self._space.note(digest(key)) > 0
            item.outcome = match.reason
            return
        item.asked_before = True  # or it wouldn't be stored; should it turn out damaged, it is saved anew
        if not self._consumer:
            item.outcome = "stored"
            self._space.touch([match.runs[0].segment])
        elif not self._store.transfers.read(lambda: self._read(identifier, item, match.runs[0])):
            self._store.counters.miss("capacity", 1)
            item.outcome = "capacity"
        if note:
            self._space.note(digest(key))

    def _read(self, identifier: str, item: Item, run: Run) -> None:
        """Transfer thread: read, verify, check, stage."""
        outcome = "error"
        try:
            data = memoryview(bytearray(run.record.raw_bytes))
            key = item_key(identifier)
            (slot,) = self._space.load(run, [key], [data], deadline_s=self._settings.fetch_deadline_s)
            if len(slot.shape) != 2 or slot.dtype != self._dtype:
                self._store.quarantine(self._space.id, run.segment)
                raise CorruptPayload(
                    f"encoder output is {slot.dtype}{list(slot.shape)}, expected {self._dtype}[rows, width]"
                )
            # With the segment: a name that is reused for other content is another file.
            name = hashlib.sha256(key + run.segment).hexdigest()
            with item.lock:
                if item.abandoned:
                    return
                path = self._staging.put(name, data)
                item.name = name
                item.staged = StagedItem(path, slot.dtype, *slot.shape, data.nbytes, run.record.cost_us)
                outcome = "ready"
            self._tally.timed("fetch_seconds", time.monotonic() - item.asked_at)
            self._store.transfers.call(lambda: self._space.touch([run.segment]))
        except KVStoreError as exc:
            # Not uploaded yet is as good as not stored yet.
            outcome = "absent" if isinstance(exc, PayloadLate) else miss_reason(exc)
            log.warning("an encoder output can't be loaded: %s", exc)
        finally:
            with item.lock:
                if item.outcome is None:
                    item.outcome = outcome
            if outcome == "ready":
                self._staging.unpin(item.name)
