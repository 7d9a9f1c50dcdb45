"""The EC connector in the scheduler, which promises only what is verified and on this node.

vLLM ends the engine if a promised encoder output does not arrive. So a promise must not be able to fail: the
store's threads look an item up, read it and verify it while its request is deferred
(`ensure_cache_available`). `has_cache_item` says yes only once the bytes lie in the staging folder, pinned
until the workers have taken them.

A request waits, for at most `ec.fetch_deadline_s`,

    anywhere         while an item that it needs is being fetched;
    on a consumer    for an item that a producer has announced (`ec_transfer_params`): it may still be on its
                     way into the store. After that the engine encodes it;
    on a consumer    for an item that it brings the description of only, since this engine can't encode that.
                     After that, or once the item is known to be damaged, this one request fails
                     (`take_unavailable_requests`); its sender may have the item encoded again and retry.

Stored items of requests that wait for their turn are fetched to the node's folder meanwhile, if the engine's
KV connector tells of those (connectors.ec.ahead).

An item is looked up, promised and stored under its content key: what it is, and the salt of the request that
brings it (connectors.engine.contents). vLLM's names of items come from clients. They lead only from vLLM's
questions to the asking request's own keys, and from its encoder caches to their real contents: never from one
request to another's item.

With `admission.second_use` an absent item is saved only if an earlier request has asked for it. The look-up
also notes its use, once per request, however often the request repeats it while it waits. An encoder-only
producer saves everything.

All state belongs to the scheduler's thread. Followers (connectors.engine.guard) do the rest, and a fault
costs only the work of its follower. Two steps stand bare: promised items are handed to the workers, and items
that they have loaded are let go.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from connectors.ahead.queued import listen
from connectors.ec.ahead import Ahead
from connectors.ec.announcements import Announcements
from connectors.ec.engine import ECEngine
from connectors.ec.items import Item, Items
from connectors.ec.messages import NOBODY, ECStoreMetadata, ECStoreWorkerMetadata, StagedItem, User
from connectors.ec.observer import ECObserver
from connectors.ec.promises import Promises
from connectors.ec.staging import StagingFolder
from connectors.ec.uses import ItemUses
from connectors.engine.contents import MOST_NAME, Contents, loaded
from connectors.engine.guard import Followers, guarded
from connectors.engine.new_weights import empty, follow
from connectors.engine.step import RequestView, StepView, items_ahead
from connectors.telemetry.metrics import Report
from connectors.weights import UNNAMED
from kvstore.errors import CorruptPayload
from kvstore.index.port import Run
from kvstore.keys import ContentKey, canonical_json, item_key
from kvstore.store.space import Space
from kvstore.store.store import Store

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)

#: Items that are being compared at a time.
_MOST_PROVING = 256
#: Outcomes that waiting doesn't change.
_HOPELESS = frozenset(
    {
        "corrupt", "missing", "namespace_mismatch", "unsigned", "unknown_key", "newer_format", "permission",
        "other_region", "quarantined", "closed",
    }
)  # fmt: skip


class ECScheduler:
    """The connector's half in an engine's scheduler."""

    def __init__(self, store: Store, space: Space, engine: ECEngine) -> None:
        settings = store.settings
        self._store = store
        self._engine = engine
        self._deadline_s = settings.ec.fetch_deadline_s
        self._first = space.namespace
        self._staging = StagingFolder(settings.ec.staging_dir, settings.ec.staging_bytes)
        self._promises = Promises(self._staging, engine.hidden)
        #: The followers that each hook guards one by one.
        self.followers = followers = Followers(store.counters)
        self._announcements = followers.guard(Announcements(engine.media))
        self._observer = followers.guard(ECObserver(store, followers), ECObserver.restart)
        self._contents = Contents(engine.media)
        #: The scheduled request's names of its items -> their keys, or None if an item is not to be cached.
        self._asking: dict[str, ContentKey | None] = {}
        #: Promised items of which that request brings only the description; and staged items that are encoded
        #: all the same, because their writer is unproven.
        self._described: set[ContentKey] = set()
        self._doubted: set[ContentKey] = set()
        #: Identifiers in the workers' encoder caches.
        self._resident: set[str] = set()
        #: (producer) The resident ones that were encoded here, so that the workers really have the
        #: output, and whose it is.
        self._held: dict[str, ContentKey] = {}
        #: Times at which requests first asked, by request and item, until the request is over.
        self._waits: dict[str, dict[ContentKey, float]] = {}
        #: Requests that are to fail.
        self._unavailable: set[str] = set()
        #: Items that this step's workers are to load and to save: see ECStoreMetadata.
        self._loads: dict[str, StagedItem] = {}
        self._saves: dict[str, ContentKey] = {}
        self._saves_held: dict[str, ContentKey] = {}
        self._savers: dict[ContentKey, User] = {}
        self._proofs: dict[str, StagedItem] = {}
        #: Items that are being compared, and where they were found.
        self._proving: dict[ContentKey, Run] = {}
        #: Names of weights whose namespaces are left alone: this engine differs from all writers there.
        self._distrusted: set[str] = set()
        self._uses = followers.guard(ItemUses(store), ItemUses.restart)
        self._ahead = followers.guard(Ahead(store, consumer=engine.consumer), Ahead.restart)
        self._open(space)
        follow(self)
        listen(self)

    def _open(self, space: Space) -> None:
        self._space: Space | None = space
        self._observer.entered(space)
        self._uses.use(space)
        self._namespace_json = canonical_json(space.namespace)
        self._items = Items(self._store, space, self._staging, self._observer.tally, self._engine)
        space.register_soon()

    # ---- the scheduler's questions --------------------------------------------------------------

    @guarded(None)
    def queued(self, request: RequestView, tokens: int) -> None:
        """Have a waiting request's items fetched to the node's folder, less those in its first `tokens`
        tokens, which are going to be loaded."""
        if not self._engine.consumer or self._space is None or request.request_id in self._waits:
            return
        ahead = items_ahead(request, tokens)
        missing = [i for i in ahead if request.mm_features[i].identifier not in self._resident]
        keys = [self._key(request, index) for index in missing]
        wanted = [key for key in dict.fromkeys(keys) if key is not None and not self._items.is_staged(key)]
        if wanted:
            self._ahead.bring(request.request_id, self._space, wanted)

    def ensure_cache_available(self, request: Request, computed: int) -> bool:
        """Returns False while an item that the request still needs is being fetched; never for long."""
        if (available := self._available(request, computed)) is None:
            # The engine encodes what it can.
            self._asking.clear()
            return self._brings_all(RequestView(request))
        return available

    @guarded(True)
    def _brings_all(self, request: RequestView) -> bool:
        """Returns whether a request brings the media of all its items; one that doesn't fails."""
        if all(map(self._engine.media.is_here, request.mm_features)):
            return True
        return self._give_up(request, "the look-up of its items failed")

    @guarded(None)
    def _available(self, request: Request, computed: int) -> bool | None:
        for former in (self._asking, self._described, self._doubted):
            former.clear()
        ahead = items_ahead(request, computed)
        if self._ahead:
            self._ahead.come_to(RequestView(request).request_id, needs=bool(ahead))
        if not ahead:
            return True
        view = RequestView(request)
        for index in ahead:
            identifier, key = view.mm_features[index].identifier, self._key(view, index)
            if key is None and len(identifier) > MOST_NAME:
                continue
            if self._asking.setdefault(identifier, key) != key:
                self._asking[identifier] = None  # one name for two items of a request
        # All look-ups begin before the wait for any of them.
        settled = [self._settled(view, index) for index in ahead]
        return all(settled)

    def _settled(self, request: RequestView, index: int) -> bool:
        """Returns whether the scheduler may go on with the request as far as this item is concerned."""
        feature = request.mm_features[index]
        here, key = self._engine.media.is_here(feature), self._asking.get(feature.identifier)
        if key is None:
            return here or self._give_up(request, "its item's content is unknown")
        width = self._engine.widths().get(feature.modality)
        self._promises.expect(key, request.get_num_encoder_embeds(index), width)
        if feature.identifier in self._resident and here and self._engine.consumer:
            return True
        announced = self._engine.consumer and self._announcements.include(
            request.ec_transfer_params, feature.identifier, self._space
        )
        since = self._waits.setdefault(request.request_id, {}).setdefault(key, time.monotonic())
        # The request may have been sent to repair what was found out before it came.
        least = since if announced or not here else None
        item = self._items.look(key, request.request_id, self._uses.by(request), not_before=least)
        if item.outcome is None:
            # A request that found no place in a batch, or another request, looks the item up again. No
            # request waits for that twice.
            return here and time.monotonic() - since >= self._deadline_s
        if not self._engine.consumer:
            return self._settled_on_producer(request, feature.identifier, key, item, here=here)
        if not here:
            return self._settled_without_media(request, key, item)
        return not (announced and item.outcome == "absent" and self._go_on_waiting(request, key))

    def _settled_on_producer(
        self, request: RequestView, identifier: str, key: ContentKey, item: Item, *, here: bool
    ) -> bool:
        if item.outcome in ("stored", "saving"):
            return True
        if self._held.get(identifier) == key:
            # Encoded once, and not (or no longer) in the store: the workers still have it.
            self._saves_held[identifier] = key
            self._saving(request, key)
            return True
        return here or self._unavailable_item(request, key, item)

    def _settled_without_media(self, request: RequestView, key: ContentKey, item: Item) -> bool:
        """Promises the item now: if vLLM later heard "no", it would encode media that aren't there. So it is
        loaded even from an unproven writer, unless that writer has failed."""
        if item.outcome == "ready":
            if not self._promises.fits(key, item.staged):
                self._observer.missed(request.request_id, key, "mismatch")
                return self._give_up(request, "its item is not of the size it describes")
            if self._has_failed(item):
                # It was staged before that was known; it is absent now.
                self._items.forget(key)
                return False
            if self._promise(key, item):
                self._described.add(key)
                return True
            # It has made room for others, again and again perhaps.
            if self._waited_s(request, key) >= self._deadline_s:
                self._observer.missed(request.request_id, key, "capacity")
                return self._give_up(request, "the staging folder has no room for its item")
        elif item.outcome in _HOPELESS or not self._go_on_waiting(request, key):
            return self._unavailable_item(request, key, item)
        return False

    def _go_on_waiting(self, request: RequestView, key: ContentKey) -> bool:
        if (waited_s := self._waited_s(request, key)) >= self._deadline_s:
            return False
        self._items.look_again(key, request.request_id, self._uses.by(request), waited_s=waited_s)
        return True

    def _waited_s(self, request: RequestView, key: ContentKey) -> float:
        return time.monotonic() - self._waits[request.request_id][key]

    def _unavailable_item(self, request: RequestView, key: ContentKey, item: Item) -> bool:
        self._observer.missed(request.request_id, key, str(item.outcome))
        return self._give_up(request, f"its item is {item.outcome}")

    def _give_up(self, request: RequestView, why: str) -> bool:
        if request.request_id not in self._unavailable:
            self._unavailable.add(request.request_id)
            self._observer.failed(request.request_id, why)
        return False

    def take_unavailable_requests(self) -> set[str]:
        """Returns the requests that are to fail, each of them once."""
        failed, self._unavailable = self._unavailable, set()
        return failed

    @guarded(False)
    def has_cache_item(self, identifier: str) -> bool:
        """Returns whether the engine need not encode the item: it is staged, or (producer only) stored.

        vLLM asks for the request that it has last asked `ensure_cache_available` for, which says what the
        identifier stands for."""
        if self._space is None:
            return False
        if identifier in self._resident:
            # vLLM asks only for what is not in its encoder cache, so that has been reset. (Or the item was
            # dropped for another one in this very pass: then the others are fetched once for nothing.)
            self._resident.clear()
            self._held.clear()
        key = self._asking.get(identifier)
        item = self._items.get(key) if key is not None else None
        if key is None or item is None:
            return False
        if item.outcome == "stored":
            return not self._engine.consumer
        if item.outcome != "ready":
            return False
        if not self._promises.fits(key, item.staged):
            # A digest was forged, or what is stored is wrong. vLLM would end the engine over it.
            self._space.not_loaded.note(1, CorruptPayload("an encoder output is not of the expected size"))
            return False
        if key not in self._described and self._is_doubted(item):
            # Another request of this pass may have been promised it: this one encodes it nevertheless.
            self._doubted.add(key)
            return False
        return self._promise(key, item)

    def _is_doubted(self, item: Item) -> bool:
        """Returns whether the item's writer is unproven: then the item is encoded, and compared. Not for an
        item of which a request brings only the description."""
        space = self._space
        return item.doubted is not None and space is not None and bool(space.writers.unproven([item.doubted]))

    def _has_failed(self, item: Item) -> bool:
        """Returns whether the item's writer, which was unproven, is known by now to write something else than
        this engine computes."""
        run, space = item.doubted, self._space
        return run is not None and space is not None and run.record.writer in space.writers.failed()

    def _promise(self, key: ContentKey, item: Item) -> bool:
        """Keep a staged item for the scheduler; False if it has gone."""
        if self._promises.make(item.name):
            return True
        self._items.forget(key)
        return False

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        """The scheduler has made room for the item: if it was promised it is loaded, else it is encoded."""
        view = RequestView(request)
        identifier, key = view.mm_features[index].identifier, self._key(view, index)
        # Should something else have been in its place in this very pass: that isn't there any more.
        for former in (self._held, self._loads, self._saves, self._saves_held, self._proofs):
            former.pop(identifier, None)
        if len(identifier) <= MOST_NAME:
            self._resident.add(identifier)
        if key is None:
            unnamed = self._cacheable(view, index) and self._contents.of(view, index) is None
            self._observer.encoded_unasked(view.request_id, unnamed=unnamed)
            return
        item = self._items.get(key)
        staged = None
        if item is not None and item.staged is not None and key not in self._doubted:
            staged = self._promises.hand_over(item.staged, item.name)
        if item is not None and staged is not None:
            self._loads[identifier] = staged
            self._observer.loaded(view.request_id, staged, again=item.used)
            self._uses.again(view, item)
            item.used = True
            self._loads_content(view, index, identifier)
        elif item is not None and item.outcome == "stored":
            self._observer.skipped(view.request_id, key)
        elif item is not None and item.outcome == "ready" and self._is_doubted(item):
            self._observer.encoded(view.request_id, key, item, reason="unproven")
            self._prove(identifier, key, item)
        else:
            self._observer.encoded(view.request_id, key, item)
            self._save_encoded(view, identifier, key, item)

    @guarded(None)
    def _loads_content(self, request: RequestView, index: int, identifier: str) -> None:
        if (content := self._contents.of(request, index)) is not None:
            loaded(identifier, content)

    def _prove(self, identifier: str, key: ContentKey, item: Item) -> None:
        """Have the workers compare what this step encodes with what is staged."""
        run, staged, space = item.doubted, item.staged, self._space
        if run is None or staged is None or space is None or self._has_failed(item):
            self._items.forget(key)
            return
        self._proofs[identifier], self._proving[key] = staged, run
        while len(self._proving) > _MOST_PROVING:
            del self._proving[next(iter(self._proving))]

    def _compared(self, key: ContentKey, alike: bool | None) -> None:
        run = self._proving.pop(key, None)
        if run is None or alike is None or self._space is None:
            return
        self._space.settle(run, "alike" if alike else "differs")
        if not alike:
            self._items.forget(key)
            if self._space.writers.distrusts_itself():
                self._distrust(self._space)

    @guarded(None)
    def _distrust(self, space: Space) -> None:
        """Leave the namespace alone as long as this engine lives: which of both is wrong can't be known."""
        self._distrusted.add(space.namespace.weights)
        log.error(
            "namespace %s holds encoder outputs that are not what this engine computes: the engine neither "
            "loads from it nor saves to it any more. Restart the engine once the cause is found",
            space.id,
        )
        self.enter(None)

    @guarded(None)
    def _save_encoded(
        self, request: RequestView, identifier: str, key: ContentKey, item: Item | None
    ) -> None:
        """Has the workers save an item that this step encodes, if the store lacks it and should have it."""
        if not self._engine.producer or (item is not None and item.outcome == "ready"):
            return
        if not self._engine.consumer:
            self._held[identifier] = key
        if self._items.admits(item):
            self._saves[identifier] = key
            self._saving(request, key)
        else:
            self._observer.not_admitted(request.request_id, key)

    def _saving(self, request: RequestView, key: ContentKey) -> None:
        if (user := self._uses.by(request)) != NOBODY:
            self._savers[key] = user
        self._observer.saving(request.request_id, key)
        self._items.saving(key)

    def _key(self, request: RequestView, index: int) -> ContentKey | None:
        """Returns the content key of a request's item, or None if the item is not to be cached."""
        content = self._contents.of(request, index) if self._cacheable(request, index) else None
        return item_key(content, request.cache_salt) if content is not None else None

    def _cacheable(self, request: RequestView, index: int) -> bool:
        if self._space is None or self._engine.media.is_output(request.mm_features[index]):
            return False
        # With an adapter in the encoder, its weights have made the output, and nothing here tells them.
        return not (self._engine.tower_lora and request.lora_request is not None)

    # ---- the rest of a step ---------------------------------------------------------------------

    def build_connector_meta(self, output: SchedulerOutput) -> ECStoreMetadata:
        """Returns this step's work for the workers."""
        if self._space is not None and self._space.writers.own_failed:
            self._distrust(self._space)
        loads, self._loads = self._loads, {}
        if (made := self._plan_step(StepView(output), loads)) is None:
            # No later step makes the outputs that this one was to save.
            for unsent in (self._saves, self._saves_held, self._savers):
                unsent.clear()
            return ECStoreMetadata(self._namespace_json, loads)
        return made

    @guarded(None)
    def _plan_step(self, step: StepView, loads: dict[str, StagedItem]) -> ECStoreMetadata | None:
        self._promises.end_pass()
        freed = step.free_encoder_mm_hashes
        self._resident.difference_update(freed)
        for identifier in freed:
            # One that was dropped and encoded again in this very pass is held still.
            if identifier not in self._saves:
                self._held.pop(identifier, None)
        saves, self._saves = self._saves, {}
        held, self._saves_held = self._saves_held, {}
        savers, self._savers = self._savers, {}
        proofs, self._proofs = self._proofs, {}
        self._ahead.step()
        self._observer.tick()
        self._items.tick()
        namespace = self._namespace_json if loads or saves or held or proofs else None
        writer = self._store.backends.writer.name if namespace is not None else ""
        return ECStoreMetadata(namespace, loads, saves, held, savers, proofs, writer)

    def update_connector_output(self, output: ECConnectorOutput) -> None:
        """Unpin what the workers have loaded, and pass on what they report."""
        meta = output.ec_connector_worker_meta
        if isinstance(meta, ECStoreWorkerMetadata):
            for key in meta.loaded:
                self._promises.taken(key)
            for key, alike in meta.compared.items():
                self._compared(key, alike)
            if self._space is not None and "refused" in meta.saved.values():
                self._space.was_refused()
            self._observer.heard(meta)

    def take_stats(self) -> Report | None:
        """Returns the statistics of both halves since the last call, or None without any."""
        return self._observer.take()

    @guarded(None)
    def request_finished(self, request: Request) -> dict[str, Any] | None:
        """Forget the request, however it ended; a producer announces which of its items are stored."""
        view = RequestView(request)
        looked_up = self._waits.pop(view.request_id, {})
        self._ahead.gone(view.request_id)
        self._unavailable.discard(view.request_id)
        self._uses.ends(view, map(self._items.get, looked_up))
        self._observer.tick(idle=True)
        if self._engine.consumer or not view.mm_features:
            return None
        return self._announcements.make(view.mm_features, self._space, self._stored(view))

    def _stored(self, request: RequestView) -> dict[str, bytes]:
        """Returns, by identifier, the digests of a request's items that the store has, or is about to."""
        found: dict[str, set[bytes | None]] = {}
        for index, feature in enumerate(request.mm_features):
            key = self._key(request, index)
            item = self._items.get(key) if key is not None else None
            has = item is not None and item.outcome in ("stored", "saving")
            content = self._contents.of(request, index) if has else None
            found.setdefault(feature.identifier, set()).add(content)
        # One name for two items says nothing about either.
        return {name: one for name, [one, *more] in found.items() if one is not None and not more}

    def enter(self, weights: str | None) -> None:
        """Go on with weights that have replaced the engine's in place. `weights` is None if they have no
        name.

        Items that are known, staged or asked for belong to the old weights and are forgotten. The store is
        left alone for weights without a name, and for weights with which this engine differs from all
        writers. This engine empties the namespace of unnamed weights (connectors.weights) on leaving, since
        no other engine can use it.
        """
        self._leave()
        self._ahead.restart()
        self._items.forget_all()
        self._resident.clear()
        self._held.clear()
        self._saves.clear()
        self._saves_held.clear()
        self._savers.clear()
        self._proofs.clear()
        self._proving.clear()
        if weights is not None and weights not in self._distrusted:
            namespace = self._first.model_copy(update={"weights": weights})
            self._open(self._store.open(namespace))
            log.info("encoder outputs: the engine's weights are now called %s", weights)

    def _leave(self) -> None:
        space, self._space = self._space, None
        self._observer.entered(None)
        self._uses.use(None)
        if space is not None and space.namespace.weights.startswith(UNNAMED):
            self._store.transfers.errand(0, lambda: empty(space))

    def shutdown(self) -> None:
        """Close the store of this half and remove the staging folder."""
        self._leave()
        self._observer.tick(idle=True)
        self._store.close()
        self._promises.close()
        self._staging.close()
