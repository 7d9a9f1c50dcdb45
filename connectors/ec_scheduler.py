"""The EC connector in the scheduler: promise only what is verified and on this node.

vLLM ends the engine if a promised encoder output does not arrive, so nothing is promised that could
still fail: an item is looked up, read and verified on the store's threads while its request is
deferred (`ensure_cache_available`), and `has_cache_item` says yes only once the bytes lie in the
staging folder, pinned until the workers have taken them.

An item, as this module sees it:

    fetching   under way; requests that need it are deferred until ec.fetch_deadline_s
    ready      staged and verified: it can be promised
    stored     (producer only) in the store; nothing to encode and nothing to load
    absent     not to be had now, for a reason; the engine encodes it, and saves it if it was absent

With `admission.second_use` an absent item is saved only if an earlier request has asked for it. Its use is
noted together with its look-up, once per request, however often that one looks it up while it waits.

All state belongs to the scheduler's thread, except that a fetch finishes on a transfer thread by
setting its `outcome` once.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from connectors.ec_staging import StagingFolder
from connectors.ec_types import ECStoreMetadata, ECStoreWorkerMetadata, StagedItem
from connectors.guard import guarded
from connectors.identity import CONTENT_HASH
from connectors.tensors import SAFETENSORS_DTYPES
from kvstore.errors import CorruptPayload, KVStoreError
from kvstore.keys import canonical_json, digest, item_key
from kvstore.ports import Run
from kvstore.store import Space, Store, miss_reason

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

#: Items remembered; the oldest are forgotten first.
_REMEMBERED = 4096
#: A pin whose release was lost (a step that never reached a worker) ends after this.
_PIN_S = 60.0


@dataclass(slots=True)
class Item:
    """One identifier. `outcome` is None while it is being fetched."""

    asked_at: float
    outcome: str | None = None  # "ready", "stored", or why not (kvstore.metrics.MISS_REASONS)
    staged: StagedItem | None = None
    #: In the staging folder.
    name: str = ""
    #: Who had it looked up, and whether others asked for it before; the latter is known with the outcome.
    asked_by: str = ""
    asked_before: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)
    abandoned: bool = False


class ECScheduler:
    """One per engine."""

    def __init__(
        self,
        store: Store,
        space: Space,
        *,
        dtype: torch.dtype,
        hidden: int,
        widths: Callable[[], Mapping[str, int]],
        consumer: bool,
        producer: bool,
        tower_lora: bool,
    ) -> None:
        self._store = store
        self._space = space
        self._settings = store.settings.ec
        self._second_use = store.settings.admission.second_use
        self._dtype = SAFETENSORS_DTYPES[dtype]
        self._hidden = hidden
        self._widths = widths
        self._consumer = consumer
        self._producer = producer
        self._tower_lora = tower_lora
        self._namespace_json = canonical_json(space.namespace)
        self._staging = StagingFolder(self._settings.staging_dir, self._settings.staging_bytes)
        self._items: OrderedDict[str, Item] = OrderedDict()
        #: Identifiers in the workers' encoder caches.
        self._resident: set[str] = set()
        #: (rows, width if known) that the request being scheduled expects, by identifier.
        self._expected: dict[str, tuple[int, int | None]] = {}
        self._loads: dict[str, StagedItem] = {}
        self._saves: set[str] = set()
        #: Staged items that were promised -> when their pin ends by itself.
        self._promised: dict[str, float] = {}
        #: Loads handed to the workers, by identifier: (name, when its pin ends by itself).
        self._loading: dict[str, deque[tuple[str, float]]] = {}
        space.register_soon()

    # ---- the scheduler's questions --------------------------------------------------------------

    @guarded(True)
    def ensure_cache_available(self, request: Request, computed: int) -> bool:
        """False while an item that the request still needs is being fetched; never for long."""
        ready = True
        for index, feature in enumerate(request.mm_features):
            position = feature.mm_position
            if position.offset + position.length <= computed or not self._cacheable(request, feature):
                continue
            identifier = feature.identifier
            expected = (request.get_num_encoder_embeds(index), self._widths().get(feature.modality))
            if self._expected.setdefault(identifier, expected) != expected:
                # One name for two things within a step: whichever is staged, one of them it is not.
                self._expected[identifier] = (-1, None)
            if identifier not in self._resident and not self._settled(identifier, request.request_id):
                ready = False
        return ready

    @guarded(False)
    def has_cache_item(self, identifier: str) -> bool:
        """Whether the engine need not encode the item: it is staged here, or (producer only) stored."""
        # vLLM asks only for what is not in the encoder cache, so if it was there it has been reset.
        self._resident.discard(identifier)
        item = self._items.get(identifier)
        if item is None:
            return False
        if item.outcome == "stored":
            return not self._consumer
        if item.outcome != "ready" or item.staged is None:
            return False
        if not self._fits(item.staged, *self._expected.get(identifier, (-1, None))):
            # A client's uuid, reused for something else. vLLM would end the engine over it.
            log.warning("a stored encoder output is not of the size that the request expects")
            return False
        if item.name not in self._promised and not self._staging.pin(item.name):
            del self._items[identifier]
            return False
        self._promised[item.name] = time.monotonic() + _PIN_S
        return True

    def _fits(self, staged: StagedItem, rows: int, width: int | None) -> bool:
        if staged.rows != rows:
            return False
        # DeepStack levels are packed side by side, so without vLLM's word a multiple will do.
        return staged.width == width if width else staged.width % self._hidden == 0

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """The scheduler has made room for the item: load it if it was promised, else it is encoded."""
        feature = request.mm_features[index]
        identifier = feature.identifier
        self._resident.add(identifier)
        item = self._items.get(identifier)
        if item is not None and item.staged is not None and item.name in self._promised:
            self._loads[identifier] = item.staged
            # The promise's pin is now the load's, until the workers report it.
            pin = (item.name, self._promised.pop(item.name))
            self._loading.setdefault(identifier, deque()).append(pin)
        elif (
            self._producer
            and (item is None or item.outcome not in ("ready", "stored"))
            and self._cacheable(request, feature)
        ):
            if self._second_use and not (item is not None and item.asked_before):
                self._store.counters.saved("not_admitted", 1)
            else:
                self._saves.add(identifier)

    def build_connector_meta(self, output: SchedulerOutput) -> ECStoreMetadata:
        """This step's work for the workers."""
        self._resident.difference_update(output.free_encoder_mm_hashes)
        loads, self._loads = self._loads, {}
        saves, self._saves = self._saves, set()
        for identifier in saves:
            # Saved soon: the next request asks the store again instead of trusting "absent".
            self._items.pop(identifier, None)
        self._expected.clear()
        self._expire_pins()
        return ECStoreMetadata(self._namespace_json if loads or saves else None, loads, saves)

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        """Workers have taken items: they need not stay."""
        meta = output.ec_connector_worker_meta
        if isinstance(meta, ECStoreWorkerMetadata):
            for identifier in meta.loaded:
                if pins := self._loading.get(identifier):
                    self._staging.unpin(pins.popleft()[0])
                    if not pins:
                        del self._loading[identifier]

    def shutdown(self) -> None:
        """Close the store of this half and remove the staging folder."""
        self._store.close()
        self._staging.close()

    # ---- items ----------------------------------------------------------------------------------

    def _cacheable(self, request: Request, feature: Any) -> bool:
        if feature.modality == "prompt_embeds":
            return False  # not an encoder's output
        if self._tower_lora and request.lora_request is not None:
            return False  # the identifier names the adapter, not its weights
        trusted = self._store.settings.identity.client_uuids == "trust"
        return trusted or bool(CONTENT_HASH.fullmatch(feature.identifier))

    def _settled(self, identifier: str, request_id: str) -> bool:
        """Whether it is known if the item can be had; starts finding out if it isn't."""
        now = time.monotonic()
        item = self._items.get(identifier)
        if item is None or (item.outcome is not None and self._outdated(item, now)):
            item = self._fetch(identifier, now, request_id)
        if item.outcome is not None:
            return True
        if now - item.asked_at < self._settings.fetch_deadline_s:
            return False
        if not item.lock.acquire(blocking=False):
            return False  # being written to the staging folder at this moment
        try:
            if item.outcome is None:
                item.abandoned = True
                item.outcome = "deadline"
                self._store.counters.miss("deadline", 1)
        finally:
            item.lock.release()
        return True

    def _outdated(self, item: Item, now: float) -> bool:
        if item.outcome == "ready":
            return False
        # "stored" may have been evicted since, "absent" may have been stored since.
        return now - item.asked_at > self._settings.absent_ttl_s

    def _fetch(self, identifier: str, now: float, request_id: str) -> Item:
        last = self._items.pop(identifier, None)
        item = self._items[identifier] = Item(now, asked_by=request_id)
        noted = last is not None and last.asked_by == request_id
        if last is not None and noted:
            # The same request, still waiting: noted again it would be its own first use.
            item.asked_before = last.asked_before
        while len(self._items) > _REMEMBERED:
            self._items.popitem(last=False)
        note = self._second_use and not noted
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
                item.staged = StagedItem(path, slot.dtype, slot.shape[0], slot.shape[1])
                outcome = "ready"
            self._store.transfers.call(lambda: self._space.touch([run.segment]))
        except KVStoreError as exc:
            outcome = miss_reason(exc)
            log.warning("an encoder output is computed again: %s", exc)
        finally:
            with item.lock:
                if item.outcome is None:
                    item.outcome = outcome
            if outcome == "ready":
                self._staging.unpin(item.name)

    def _expire_pins(self) -> None:
        """End pins whose step never reached a worker."""
        now = time.monotonic()
        for name in [name for name, end in self._promised.items() if end < now]:
            del self._promised[name]
            self._staging.unpin(name)
        for identifier in [one for one, pins in self._loading.items() if pins[0][1] < now]:
            for name, _ in self._loading.pop(identifier):
                self._staging.unpin(name)
