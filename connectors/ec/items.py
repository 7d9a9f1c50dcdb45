"""This engine's knowledge of encoder outputs: which are staged on this node, which can't be had, and why.

An item is identified by its content key, whatever clients call it. Its outcome is

    None       it is being looked up and fetched
    ready      staged and verified: it can be promised
    stored     (producer only) in the store; nothing to encode and nothing to load
    saving     encoded here and handed to the workers to be saved
    absent     or another reason (kvstore.rules.reasons.MISS_REASONS): it is unavailable now

After an erasure in its namespace (`cache-admin erase`) the whole staging folder is emptied, which costs other
items a fetch. That repeats until a look begins after the last forbidden moment, when no forbidden item can be
computed any more.

All state belongs to the scheduler's thread, except that a fetch finishes on a transfer thread by setting
its item's `outcome` once, and that a call thread looks for erasures.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field

from connectors.ec.engine import ECEngine
from connectors.ec.messages import NOBODY, StagedItem, User
from connectors.ec.staging import StagingFolder
from connectors.engine.guard import guarded
from connectors.engine.sessions.telling import tell
from connectors.telemetry.metrics import Tally
from connectors.telemetry.ways import FARTHEST
from kvstore.errors import CorruptPayload, KVStoreError
from kvstore.index.port import Run
from kvstore.index.sessions import USE
from kvstore.keys import ContentKey, SaltId, SegmentId, digest
from kvstore.store.reading import PayloadLate
from kvstore.store.space import Space
from kvstore.store.store import Store

log = logging.getLogger(__name__)

#: Largest number of items remembered; the oldest are forgotten first.
_REMEMBERED = 4096
#: Shortest time between two look-ups of one item, in seconds.
_AGAIN_S = 0.02
#: Time from one look for erasures to the next, in seconds.
_ERASED_S = 1.0


@dataclass(slots=True)
class Item:
    """The state of one item."""

    #: Monotonic time of its last look-up, or of the decision to save it.
    asked_at: float
    outcome: str | None = None
    staged: StagedItem | None = None
    #: Its name in the staging folder.
    name: str = ""
    #: The request that had it looked up.
    asked_by: str = ""
    #: Its last user, as the index knows it, and its segment, which is known by the time it is staged.
    user: User = NOBODY
    segment: SegmentId | None = None
    #: Where it was found, if its writer was unproven then.
    doubted: Run | None = None
    #: Whether other requests have asked for it before; known by the time the outcome is.
    asked_before: bool = False
    #: Whether the index has it, so that what its request waits for are its bytes.
    reading: bool = False
    #: Whether the workers have loaded it since it was fetched.
    used: bool = False
    #: Held for a moment by the thread that sets the outcome: its fetch's, or the scheduler's at its deadline.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def is_over(self) -> bool:
        """Returns whether its outcome is known."""
        return self.outcome is not None


class Items:
    """Looks up, fetches and remembers the items of one engine.

    Their number is bounded here, their bytes by the staging folder.
    """

    def __init__(
        self, store: Store, space: Space, staging: StagingFolder, tally: Tally, engine: ECEngine
    ) -> None:
        self._store = store
        self._space = space
        self._staging = staging
        self._tally = tally
        self._settings = store.settings.ec
        # An item that is sent to an encoder-only producer is meant for others: it is saved at its first use.
        self._notes_uses = store.settings.admission.second_use and engine.consumer
        self._dtype = engine.dtype
        self._consumer = engine.consumer
        self._encodes = engine.consumer and engine.producer
        self._items: OrderedDict[ContentKey, Item] = OrderedDict()
        #: Monotonic time from which the next look for erasures is due.
        self._due = time.monotonic()
        #: Forbidden times for which the staging folder was emptied last; belongs to the call thread.
        self._done: dict[SaltId, float] = {}

    @guarded(None)
    def tick(self) -> None:
        """Look for erasures if it is time to."""
        now = time.monotonic()
        if now >= self._due and self._staging.used_bytes and not self._store.health.index_down:
            self._due = now + _ERASED_S
            self._store.transfers.call(self._give_up_erased)

    def _give_up_erased(self) -> None:
        """Empties the staging folder if something was erased. Runs on a call thread."""
        index = self._store.maintenance
        try:
            # The index's own clock made the times of what is forbidden.
            began = index.now(self._space.id)
            forbidden = index.forbidden(self._space.id)
        except KVStoreError as exc:
            log.debug("the look for erasures is put off: %s", exc)
            return
        if forbidden and forbidden != self._done:
            self._staging.clear()
            if began > max(forbidden.values()):
                self._done = forbidden

    def get(self, key: ContentKey) -> Item | None:
        """Returns what is known about the item, without asking the store."""
        return self._items.get(key)

    def is_staged(self, key: ContentKey) -> bool:
        """Returns whether the item is on this node, or is being looked up and fetched."""
        item = self._items.get(key)
        if item is None or item.outcome not in (None, "ready"):
            return False
        return item.outcome is None or self._staging.holds(item.name)

    def forget(self, key: ContentKey) -> None:
        """Forget the item: its next request asks the store anew."""
        self._items.pop(key, None)

    def forget_all(self) -> None:
        """Forget all items, those that are being fetched too: none is of use any more."""
        self._items.clear()

    def admits(self, item: Item | None) -> bool:
        """Returns whether an item that is encoded now is worth saving."""
        return not self._notes_uses or (item is not None and item.asked_before)

    def saving(self, key: ContentKey) -> None:
        """Remember that the workers are saving the item."""
        self._items[key] = Item(time.monotonic(), "saving")
        self._items.move_to_end(key)

    def look(self, key: ContentKey, request_id: str, user: User, *, not_before: float | None = None) -> Item:
        """Returns the item; looks it up unless the answer is known, and gives it up at its deadline.

        An answer "unavailable" counts only if the question was asked at or after `not_before`.
        """
        now = time.monotonic()
        item = self._items.get(key)
        if item is None or (item.outcome is not None and self._outdated(item, request_id, now, not_before)):
            item = self._fetch(key, now, request_id, user)
        if item.outcome is None and now - item.asked_at >= self._settings.fetch_deadline_s:
            self._abandon(item)
        return item

    def look_again(self, key: ContentKey, request_id: str, user: User, *, waited_s: float) -> None:
        """Look an item up once more that was unavailable a moment ago, with growing pauses."""
        now = time.monotonic()
        if now - self._items[key].asked_at > max(_AGAIN_S, waited_s / 4):
            self._fetch(key, now, request_id, user)

    def _outdated(self, item: Item, request_id: str, now: float, not_before: float | None) -> bool:
        if item.outcome == "ready":
            return not self._staging.holds(item.name)
        if not_before is not None and item.asked_at < not_before:
            return True
        age = now - item.asked_at
        if self._consumer:
            # An absent item may be stored by now, and an item that was being saved soon is.
            return item.outcome == "saving" or age > self._settings.absent_ttl_s
        # Consumers rely on a producer's answer, so each request has it checked.
        return age > self._settings.absent_ttl_s or (item.asked_by != request_id and age > _AGAIN_S)

    def _abandon(self, item: Item) -> None:
        """Give an item up, whatever its fetch hangs in: a read, or a write to the staging folder."""
        with item.lock:
            if item.outcome is not None:
                return
            item.outcome = "deadline"
        self._store.counters.miss("deadline", 1)
        if item.reading:
            self._store.health.read_hangs()

    def _fetch(self, key: ContentKey, now: float, request_id: str, user: User) -> Item:
        last = self._items.pop(key, None)
        item = self._items[key] = Item(now, asked_by=request_id, user=user)
        noted = last is not None and last.asked_by == request_id
        if last is not None and noted:
            # The same request is still waiting: noted again, it would be its own first use.
            item.asked_before = last.asked_before
        while len(self._items) > _REMEMBERED:
            self._items.popitem(last=False)
        note = self._notes_uses and not noted
        if not self._store.transfers.call(lambda: self._look_up(key, item, note=note)):
            item.outcome = "capacity"
            self._store.counters.miss("capacity", 1)
        return item

    def _look_up(self, key: ContentKey, item: Item, *, note: bool) -> None:
        """Asks the index and, if it has the item, queues the read. Runs on a call thread."""
        user = item.user
        match = self._space.match(digest(key), session=user.session)
        if not match.runs:
            # Set before the outcome, which lets the engine encode the item and ask whether to save it.
            if note:
                item.asked_before = self._space.note(digest(key)) > 0
            item.outcome = match.reason
            return
        item.reading, item.segment = self._consumer, match.runs[0].segment
        if self._encodes and self._space.writers.unproven(match.runs[:1]):
            item.doubted = match.runs[0]
        item.asked_before = True  # else it would not be stored; if it is damaged, it is saved anew
        if not self._consumer:
            item.outcome = "stored"
            if user.session:
                self._space.session(user.session, [item.segment], salt=user.salt)
            else:
                self._space.touch([item.segment])
        elif not self._store.transfers.read(lambda: self._read(key, item, user, match.runs[0])):
            self._store.counters.miss("capacity", 1)
            item.outcome = "capacity"
        if note:
            self._space.note(digest(key))

    def _read(self, key: ContentKey, item: Item, user: User, run: Run) -> None:
        """Reads, verifies and stages the item. Runs on a transfer thread."""
        outcome = "error"
        try:
            tier = self._space.tiers([run]).get(run.segment, FARTHEST)
            most = self._settings.staging_bytes
            slot, data = self._space.load_item(
                run, key, most=most, deadline_s=self._settings.fetch_deadline_s
            )
            if len(slot.shape) != 2 or slot.dtype != self._dtype:
                self._store.quarantine.add(self._space.id, run.segment)
                raise CorruptPayload(
                    f"encoder output is {slot.dtype}{list(slot.shape)}, expected {self._dtype}[rows, width]"
                )
            if item.is_over():
                return  # it was given up
            # The segment is part of the name: what was damaged and is saved anew has another file.
            staged_as = hashlib.sha256(key + run.segment).hexdigest()
            path = self._staging.put(staged_as, data)
            with item.lock:
                # Before the outcome: a pass that sees the item ready finds the pins of passes alone.
                self._staging.unpin(staged_as)
                if item.is_over():
                    return  # while it was written: the folder keeps it as long as it has room
                item.name = staged_as
                item.staged = StagedItem(key, path, slot.dtype, *slot.shape, data.nbytes, run.record.cost_us)
                item.outcome = outcome = "ready"
            self._tally.timed("fetch_seconds", time.monotonic() - item.asked_at)
            self._tally.add(f"fetched_items{{{tier}}}")
            if user.session:
                tell(self._store, self._space, user.session, user.salt, [run.segment], USE)
            else:
                self._store.transfers.call(lambda: self._space.touch([run.segment]))
        except KVStoreError as exc:
            # A payload that is not uploaded yet is as good as not stored yet.
            reason = self._space.not_loaded.note(1, exc, run.segment)
            outcome = "absent" if isinstance(exc, PayloadLate) else reason
        finally:
            with item.lock:
                if item.outcome is None:
                    item.outcome = outcome
