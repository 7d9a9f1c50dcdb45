"""The EC connector in the scheduler: promise only what is verified and on this node.

vLLM ends the engine if a promised encoder output does not arrive, so nothing is promised that could
still fail: an item is looked up, read and verified on the store's threads while its request is
deferred (`ensure_cache_available`), and `has_cache_item` says yes only once the bytes lie in the
staging folder, pinned until the workers have taken them.

Who waits, and what for, at most `ec.fetch_deadline_s`:

    any request      while an item it needs is being fetched
    a consumer's     for an item that a producer has announced (`ec_transfer_params`): it may still be on its
                     way into the store. After that the engine encodes it.
    a consumer's     for an item of which it has the description only, since nobody here can encode that.
                     After that, or once the item is known to be damaged, the request fails, alone
                     (`take_unavailable_requests`); whoever sent it may have it encoded again and retry.

With `admission.second_use` an absent item is saved only if an earlier request has asked for it. Its use is
noted together with its look-up, once per request, however often that one looks it up while it waits. An
encoder-only producer saves everything.

All state belongs to the scheduler's thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from connectors.ec_epochs import follow
from connectors.ec_items import Item, Items
from connectors.ec_media import Media
from connectors.ec_staging import StagingFolder
from connectors.ec_stats import RENAMED
from connectors.ec_types import ECStoreMetadata, ECStoreWorkerMetadata, StagedItem
from connectors.guard import guarded
from connectors.identity import CONTENT_HASH
from connectors.outcomes import Outcomes
from connectors.stats import Report, Tally, TierStates, merge
from connectors.tensors import SAFETENSORS_DTYPES
from connectors.weights import UNNAMED
from kvstore.errors import KVStoreError
from kvstore.keys import canonical_json, digest, item_key
from kvstore.store import Space, Store

if TYPE_CHECKING:
    import torch
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

#: A pin whose release was lost (a step that never reached a worker) ends after this.
_PIN_S = 60.0
#: Saves that may be under way; of more, the oldest's end is not told. (One of vLLM's model runners drops what
#: the workers of an encoder-only producer report.)
_MOST_SAVING = 4096
#: Outcomes that waiting doesn't change.
_HOPELESS = frozenset({"corrupt", "missing", "namespace_mismatch", "permission", "quarantined", "closed"})
#: In an announcement: the namespace that the producer saves to.
_NAMESPACE = "kvstore_namespace"


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
        media: Media,
        consumer: bool,
        producer: bool,
        tower_lora: bool,
    ) -> None:
        self._store = store
        self._first = space.namespace
        self._dtype = SAFETENSORS_DTYPES[dtype]
        self._settings = store.settings.ec
        self._second_use = store.settings.admission.second_use and consumer
        self._hidden = hidden
        self._widths = widths
        self._media = media
        self._consumer = consumer
        self._producer = producer
        self._tower_lora = tower_lora
        self._staging = StagingFolder(self._settings.staging_dir, self._settings.staging_bytes)
        self._tally = Tally(store.counters, RENAMED)
        self._tier_states = TierStates(store, self._tally)
        self._outcomes = Outcomes(store)
        #: Items that the workers are saving, and for which request.
        self._saving: dict[str, str] = {}
        #: What the workers have reported since it was asked for.
        self._reported: Report | None = None
        #: Identifiers in the workers' encoder caches.
        self._resident: set[str] = set()
        #: (producer) Those of them that were encoded here, so that the workers really have the output.
        self._held: set[str] = set()
        #: (rows, width if known) that the request being scheduled expects, by identifier.
        self._expected: dict[str, tuple[int, int | None]] = {}
        #: When a request began to wait for an item, by request and identifier; until the request is over.
        self._waits: dict[str, dict[str, float]] = {}
        #: Requests to be failed.
        self._unavailable: set[str] = set()
        self._loads: dict[str, StagedItem] = {}
        self._saves: set[str] = set()
        #: Names of staged items that were promised in this pass of the scheduler, and are pinned.
        self._promised: set[str] = set()
        #: Loads handed to the workers, by identifier: (name, when its pin ends by itself).
        self._loading: dict[str, deque[tuple[str, float]]] = {}
        self._warned = False
        self._open(space)
        follow(self)

    def _open(self, space: Space) -> None:
        self._space: Space | None = space
        self._tally.state(f"namespace{{{space.id}}}", 1)
        self._namespace_json = canonical_json(space.namespace)
        self._items = Items(
            self._store, space, self._staging, self._tally, dtype=self._dtype, consumer=self._consumer
        )
        space.register_soon()

    # ---- the scheduler's questions --------------------------------------------------------------

    @guarded(True)
    def ensure_cache_available(self, request: Request, computed: int) -> bool:
        """False while an item that the request still needs is being fetched; never for long."""
        ready = True
        for index, feature in enumerate(request.mm_features):
            position = feature.mm_position
            if position.offset + position.length > computed and not self._settled(request, index):
                ready = False
        return ready

    def _settled(self, request: Request, index: int) -> bool:
        """Whether the scheduler may go on with the request as far as this item is concerned."""
        feature = request.mm_features[index]
        identifier = feature.identifier
        here = self._media.is_here(feature)
        if not self._cacheable(request, feature):
            return here or self._give_up(request, "its item may not be looked up")
        expected = (request.get_num_encoder_embeds(index), self._widths().get(feature.modality))
        if self._expected.setdefault(identifier, expected) != expected:
            # One name for two things within a step: whichever is staged, one of them it is not.
            self._expected[identifier] = (-1, None)
        if identifier in self._resident and here and self._consumer:
            return True
        announced = self._consumer and self._announced(request, identifier)
        since = None
        if announced or not here:
            waits = self._waits.setdefault(request.request_id, {})
            since = waits.setdefault(identifier, time.monotonic())
        # What was found out before the request came may be what it was sent to mend.
        item = self._items.look(identifier, request.request_id, not_before=since)
        if item.outcome is None:
            return False
        if not self._consumer:
            return self._settled_on_producer(request, identifier, item, here=here)
        if not here:
            return self._settled_without_media(request, identifier, item)
        return not (announced and item.outcome == "absent" and self._go_on_waiting(request, identifier))

    def _settled_on_producer(self, request: Request, identifier: str, item: Item, *, here: bool) -> bool:
        if item.outcome in ("stored", "saving"):
            return True
        if identifier in self._held:
            # Encoded once, and not (or no longer) in the store: the workers still have it.
            self._save(identifier, request)
            return True
        return here or self._unavailable_item(request, identifier, item)

    def _settled_without_media(self, request: Request, identifier: str, item: Item) -> bool:
        """Promise the item now: when vLLM asks for it, "no" would have it encode what isn't there."""
        if item.outcome == "ready":
            if not self._fits(identifier, item):
                self._tell(request, identifier, "mismatch")
                return self._give_up(request, "its item is not of the size it describes")
            if self._promise(identifier, item):
                return True
        elif item.outcome in _HOPELESS or not self._go_on_waiting(request, identifier):
            return self._unavailable_item(request, identifier, item)
        return False

    def _go_on_waiting(self, request: Request, identifier: str) -> bool:
        waited_s = time.monotonic() - self._waits[request.request_id][identifier]
        if waited_s >= self._settings.fetch_deadline_s:
            return False
        self._items.look_again(identifier, request.request_id, waited_s=waited_s)
        return True

    def _unavailable_item(self, request: Request, identifier: str, item: Item) -> bool:
        self._tell(request, identifier, str(item.outcome))
        return self._give_up(request, f"its item is {item.outcome}")

    def _tell(self, request: Request, identifier: str, reason: str) -> None:
        """Have it remembered what became of an item that was asked for; "" if it was served."""
        if self._space is not None:
            self._outcomes.note(
                self._space,
                request.request_id,
                "match",
                asked=1,
                served=0 if reason else 1,
                reason=reason,
                missing=lambda: digest(item_key(identifier)),
            )

    def _tell_save(self, request_id: str, identifier: str, outcome: str) -> None:
        if self._space is not None:
            self._outcomes.note(
                self._space,
                request_id,
                "save",
                asked=1,
                served=1 if outcome in ("stored", "present") else 0,
                reason=outcome,
                missing=lambda: digest(item_key(identifier)),
            )

    def _give_up(self, request: Request, why: str) -> bool:
        if request.request_id not in self._unavailable:
            self._unavailable.add(request.request_id)
            self._tally.add("unavailable_requests")
            log.warning("request %s brings no media and %s: it fails", request.request_id, why)
        return False

    def take_unavailable_requests(self) -> set[str]:
        """Requests to be failed, each told once."""
        failed, self._unavailable = self._unavailable, set()
        return failed

    @guarded(False)
    def has_cache_item(self, identifier: str) -> bool:
        """Whether the engine need not encode the item: it is staged here, or (producer only) stored."""
        if self._space is None:
            return False
        if identifier in self._resident:
            # vLLM asks only for what is not in the encoder cache: that has been reset. (Or the item was
            # dropped for another one in this very pass: then the others are fetched once for nothing.)
            self._resident.clear()
            self._held.clear()
        item = self._items.get(identifier)
        if item is None:
            return False
        if item.outcome == "stored":
            return not self._consumer
        if item.outcome != "ready":
            return False
        if not self._fits(identifier, item):
            # A client's uuid, reused for something else. vLLM would end the engine over it.
            log.warning("a stored encoder output is not of the size that the request expects")
            return False
        return self._promise(identifier, item)

    def _promise(self, identifier: str, item: Item) -> bool:
        """Pin a staged item until the end of this pass; False if it has gone."""
        if item.name in self._promised:
            return True
        if not self._staging.pin(item.name):
            self._items.forget(identifier)
            return False
        self._promised.add(item.name)
        return True

    def _fits(self, identifier: str, item: Item) -> bool:
        rows, width = self._expected.get(identifier, (-1, None))
        if item.staged is None or item.staged.rows != rows:
            return False
        # DeepStack levels are packed side by side, so without vLLM's word a multiple will do.
        return item.staged.width == width if width else item.staged.width % self._hidden == 0

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """The scheduler has made room for the item: load it if it was promised, else it is encoded."""
        feature = request.mm_features[index]
        identifier = feature.identifier
        self._resident.add(identifier)
        item = self._items.get(identifier)
        if item is not None and item.staged is not None and item.name in self._promised:
            self._loads[identifier] = item.staged
            # The promise's pin is now the load's, until the workers report it.
            self._promised.remove(item.name)
            pin = (item.name, time.monotonic() + _PIN_S)
            self._loading.setdefault(identifier, deque()).append(pin)
            self._tally.add("items{staging}" if item.used else "items{store}")
            self._tally.add("loaded_bytes", item.staged.nbytes)
            self._tally.add("saved_compute_seconds", item.staged.cost_us / 1e6)
            self._tell(request, identifier, "")
            item.used = True
        elif item is not None and item.outcome == "stored":
            self._tally.add("items{skipped}")
            self._tell(request, identifier, "")
        else:
            self._encoded(request, feature, item)

    def _encoded(self, request: Request, feature: Any, item: Item | None) -> None:
        """The engine encodes the item in this step."""
        self._tally.add("items{encoder}")
        ready = item is not None and item.outcome == "ready"
        if item is not None and item.outcome != "saving":
            reason = "mismatch" if ready else str(item.outcome)
            self._tally.add(f"misses{{{reason}}}")
            self._tell(request, feature.identifier, reason)
        if not self._producer or ready or not self._cacheable(request, feature):
            return
        if not self._consumer:
            self._held.add(feature.identifier)
        if self._second_use and not (item is not None and item.asked_before):
            self._store.counters.saved("not_admitted", 1)
            self._tell_save(request.request_id, feature.identifier, "not_admitted")
        else:
            self._save(feature.identifier, request)

    def _save(self, identifier: str, request: Request) -> None:
        self._saves.add(identifier)
        self._saving[identifier] = request.request_id
        while len(self._saving) > _MOST_SAVING:
            del self._saving[next(iter(self._saving))]
        self._items.saving(identifier)

    # ---- the rest of a step ---------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> ECStoreMetadata:
        """This step's work for the workers."""
        self._resident.difference_update(output.free_encoder_mm_hashes)
        self._held.difference_update(output.free_encoder_mm_hashes)
        loads, self._loads = self._loads, {}
        saves, self._saves = self._saves, set()
        self._expected.clear()
        # Promised to requests that were not scheduled after all. They ask again.
        for name in self._promised:
            self._staging.unpin(name)
        self._promised.clear()
        self._expire_pins()
        self._outcomes.tick()
        return ECStoreMetadata(self._namespace_json if loads or saves else None, loads, saves)

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        """Workers have taken items: they need not stay."""
        meta = output.ec_connector_worker_meta
        if not isinstance(meta, ECStoreWorkerMetadata):
            return
        for identifier in meta.loaded:
            if pins := self._loading.get(identifier):
                self._staging.unpin(pins.popleft()[0])
                if not pins:
                    del self._loading[identifier]
        for identifier, outcome in meta.saved.items():
            if (request_id := self._saving.pop(identifier, None)) is not None:
                self._tell_save(request_id, identifier, outcome)
        if meta.stats is not None:
            if self._reported is None:
                self._reported = meta.stats
            else:
                merge(self._reported, meta.stats)

    def take_stats(self) -> Report | None:
        """What both halves have done since the last call; None if nothing."""
        self._tier_states.tell()
        own = self._tally.take(False, self._gauges)
        reported, self._reported = self._reported, None
        if own is not None and reported is not None:
            merge(own, reported)
        return own or reported

    def _gauges(self) -> dict[str, float]:
        store = self._store
        # With a tier in front much can be read while what is behind it is down, so no breaker says that.
        breakers = {"index_down": store.index_breaker, "payloads_down": store.breaker}
        return {
            name: int(breaker is not None and not breaker.is_closed) for name, breaker in breakers.items()
        }

    @guarded(None)
    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """Forget the request, however it ended; a producer says what of its items the store has.

        By identifier: `item_indices` as vLLM's proxies use them, and for what is or will be stored the
        `metadata` with which a consumer needs no media, and the namespace.
        """
        self._waits.pop(request.request_id, None)
        self._unavailable.discard(request.request_id)
        self._outcomes.tick(idle=True)
        if self._consumer or not request.mm_features:
            return None
        made = self._media.describe(request.mm_features)
        for identifier, entry in made.items():
            item = self._items.get(identifier)
            if self._space is not None and item is not None and item.outcome in ("stored", "saving"):
                entry[_NAMESPACE] = str(self._space.id)
            else:
                # Without it a proxy sends the media along, and the consumer can encode it.
                entry["metadata"] = {}
        return made

    def enter(self, weights: str | None) -> None:
        """The engine's weights have changed in place and are called so now; None: they have no name.

        What is known, staged or asked for belongs to the old ones and is forgotten. Without a name the store
        is left alone. What is under a name that nobody else has is emptied when it is left.
        """
        self._leave()
        self._items.forget_all()
        self._resident.clear()
        self._held.clear()
        self._saves.clear()
        self._saving.clear()
        if weights is not None:
            namespace = self._first.model_copy(update={"weights": weights})
            self._open(self._store.open(namespace, block_bytes=1 << 20))
            log.info("encoder outputs: the engine's weights are now called %s", weights)

    def _leave(self) -> None:
        space, self._space = self._space, None
        self._tally.state("namespace{}", 1)
        if space is not None and space.namespace.weights.startswith(UNNAMED):
            self._store.transfers.errand(0, lambda: _empty(space))

    def shutdown(self) -> None:
        """Close the store of this half and remove the staging folder."""
        self._leave()
        self._outcomes.tick(idle=True)
        self._store.close()
        self._staging.close()

    def _cacheable(self, request: Request, feature: Any) -> bool:
        if self._space is None or self._media.is_output(feature):
            return False
        if self._tower_lora and request.lora_request is not None:
            return False  # the identifier names the adapter, not its weights
        trusted = self._store.settings.identity.client_uuids == "trust"
        return trusted or bool(CONTENT_HASH.fullmatch(feature.identifier))

    def _announced(self, request: Request, identifier: str) -> bool:
        """Whether a producer has said that the item is, or is about to be, where this engine looks."""
        params = request.ec_transfer_params
        entry = params.get(identifier) if isinstance(params, dict) else None
        namespace = entry.get(_NAMESPACE) if isinstance(entry, dict) else None
        mine = str(self._space.id) if self._space is not None else ""
        if namespace is not None and namespace != mine and not self._warned:
            self._warned = True
            log.warning(
                "kvstore: a producer saves encoder outputs to namespace %.40r, this engine looks in %s, so "
                "they never meet; `cache-admin namespaces diff` says in what they differ",
                namespace,
                mine,
            )
        return bool(namespace and namespace == mine)

    def _expire_pins(self) -> None:
        """End pins whose step never reached a worker."""
        now = time.monotonic()
        for identifier in [one for one, pins in self._loading.items() if pins[0][1] < now]:
            for name, _ in self._loading.pop(identifier):
                self._staging.unpin(name)


def _empty(space: Space) -> None:
    try:
        space.store.forget(space.id)
    except KVStoreError as exc:
        log.warning("namespace %s of unnamed weights could not be emptied: %s", space.id, exc)
