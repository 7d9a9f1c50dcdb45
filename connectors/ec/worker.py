"""The EC connector in a worker: it loads staged items into the encoder cache and saves encoder outputs.

Loading reads a verified file of this node, so it takes microseconds to a few milliseconds. Saving copies the
item's own view to the host, on a GPU beside the engine (connectors.ec.memory), and leaves the rest to the
store's threads. The saves of
what a step encodes are queued when the step is over: only then is it known how long each item took
(connectors.ec.cost).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from connectors.ec.cost import Encoding
from connectors.ec.memory import ItemCopy, ItemMemory
from connectors.ec.messages import NOBODY, ECStoreMetadata, ECStoreWorkerMetadata, StagedItem, User
from connectors.ec.metrics import RENAMED, no_gauges
from connectors.ec.proving.comparing import ItemProofs
from connectors.engine.guard import guarded
from connectors.engine.tensors import TORCH_DTYPES, HostCopy
from connectors.telemetry.metrics import Report, Tally
from kvstore.errors import KVStoreError
from kvstore.format.segment import Slot
from kvstore.keys import ContentKey
from kvstore.store.space import Space
from kvstore.store.store import Store
from schemas.namespace import Namespace

log = logging.getLogger(__name__)


class ECWorker:
    """The connector's half in one rank. `saves` tells whether this rank saves: all have the same outputs."""

    def __init__(
        self,
        store: Store,
        *,
        dtype: torch.dtype,
        device: Callable[[], torch.device],
        saves: Callable[[], bool],
        memory: ItemMemory | None = None,
    ) -> None:
        """`memory` is what items pass through on a GPU."""
        self._store = store
        self._memory = memory
        self._dtype = dtype
        self._device = device
        self._saves = saves
        self._space: Space | None = None
        self._namespace_json = ""
        self._loaded: set[ContentKey] = set()
        #: This step's run of the encoder, if something that it makes is to be saved.
        self._encoding: Encoding | None = None
        #: Queue the saves of what this step encodes; to be called when the step is over.
        self._encoded: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        #: Outcomes of saves that have ended; guarded by the lock.
        self._saved: dict[ContentKey, str] = {}
        self._tally = Tally(store.counters, RENAMED)
        self._proofs = ItemProofs(store.transfers)
        #: Whether the log says already that outputs can't be cached: all outputs of a model are alike.
        self._said = False

    def use(self, metadata: ECStoreMetadata) -> None:
        """Enter the namespace that the scheduler's half has named; all later calls belong to it."""
        if metadata.writer and metadata.writer != self._store.backends.writer.name:
            self._store.backends.writer.adopt(metadata.writer)
        if metadata.namespace is not None and metadata.namespace != self._namespace_json:
            self._namespace_json = metadata.namespace
            namespace = Namespace.model_validate_json(metadata.namespace)
            self._space = self._store.open(namespace)

    def load(self, metadata: ECStoreMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Put this step's promised items into the encoder cache."""
        for identifier, item in metadata.loads.items():
            # Whatever is there under this name: the scheduler has made room for this very item.
            encoder_cache[identifier] = self._tensor(item)
            self._loaded.add(item.key)
        self._begin(metadata)

    @guarded(None)
    def save_held(self, metadata: ECStoreMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Save what an earlier step computed and the store lacks; `save` saves what this step computes."""
        for identifier, key in metadata.held.items():
            if identifier in encoder_cache:
                self._save(metadata, key, encoder_cache[identifier], None)
        self._begin(metadata)

    @guarded(None)
    def _begin(self, metadata: ECStoreMetadata) -> None:
        self._encoding = None
        self._encoding = Encoding(self._device()) if metadata.saves and self._saves() else None

    @guarded(None)
    def save(
        self, metadata: ECStoreMetadata, encoder_cache: dict[str, torch.Tensor], identifier: str
    ) -> None:
        """Queue one encoder output of this step for the store, if the scheduler's half wants it there."""
        if self._encoding is not None:
            self._encoding.made(encoder_cache[identifier].shape[0])
        if (key := metadata.saves.get(identifier)) is not None:
            self._save(metadata, key, encoder_cache[identifier], self._encoding)
        if (staged := metadata.proofs.get(identifier)) is not None and self._saves():
            self._proofs.start(staged, self._copied(encoder_cache[identifier]))

    def _save(
        self, metadata: ECStoreMetadata, key: ContentKey, tensor: torch.Tensor, encoding: Encoding | None
    ) -> None:
        space, user = self._space, metadata.users.get(key, NOBODY)
        if space is None or not self._saves():
            return
        if tensor.dim() != 2 or tensor.dtype != self._dtype:
            if not self._said:
                self._said = True
                log.warning("encoder outputs of %s%s are not cached", tensor.dtype, list(tensor.shape))
            return
        nbytes = tensor.numel() * tensor.element_size()
        copy = self._copied(tensor)
        if copy is None:
            self._dropped(key)
            return
        write = partial(self._write, space, key, user, copy, encoding, time.monotonic())

        def discard() -> None:
            copy.wait()
            copy.release()

        def queue() -> None:
            after = copy.wait if copy.under_way else None
            if self._store.transfers.write(nbytes, write, after):
                return
            self._dropped(key)
            if copy.under_way:
                # Not for this thread to wait for: in a store that is closed its memory stays taken.
                self._store.transfers.in_turn(discard)
            else:
                discard()

        if encoding is None:
            queue()
        else:
            self._encoded.append(queue)

    def _copied(self, tensor: torch.Tensor) -> HostCopy | ItemCopy | None:
        """Returns a copy on its way to the host, or None if there is no room."""
        return HostCopy(tensor) if self._memory is None else self._memory.save(tensor)

    def _dropped(self, key: ContentKey) -> None:
        self._store.counters.saved("dropped", 1)
        self._ended(key, "dropped")

    def _ended(self, key: ContentKey, outcome: str) -> None:
        with self._lock:
            self._saved[key] = outcome

    def take_report(self) -> ECStoreWorkerMetadata | None:
        """Queue the saves of the step, which is over; return what happened since the last call, or None."""
        encoded, self._encoded, self._encoding = self._encoded, [], None
        for queue in encoded:
            guarded(None)(queue)()
        stats = self._stats()
        if not (self._loaded or self._saved or self._proofs or stats is not None):
            return None
        with self._lock:
            saved, self._saved = self._saved, {}
        loaded, self._loaded = self._loaded, set()
        return ECStoreWorkerMetadata(loaded, stats, saved, self._proofs.take())

    @guarded(None)
    def _stats(self) -> Report | None:
        return self._tally.take(False, no_gauges)

    def shutdown(self) -> None:
        """Let queued saves finish, for a bounded time, then close the store of this half."""
        self._store.close()

    def _tensor(self, item: StagedItem) -> torch.Tensor:
        if self._memory is not None and (loaded := self._memory.load(item)) is not None:
            return loaded
        with item.open() as file:
            data = bytearray(file.readall())
        host = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return host.view(TORCH_DTYPES[item.dtype]).view(item.rows, item.width).to(self._device())

    def _write(
        self,
        space: Space,
        key: ContentKey,
        user: User,
        copy: HostCopy | ItemCopy,
        encoding: Encoding | None,
        since: float,
    ) -> None:
        """Saves one item, a segment of its own; it was copied at `since`. Runs on a transfer thread."""
        outcome = "failed"
        try:
            data, dtype, shape = copy.wait()
            cost_us = encoding.cost_us(shape[0]) if encoding is not None else 0
            slot = Slot(key, data, dtype, shape)
            saved = space.save([slot], cost_us=cost_us, salt=user.salt, session=user.session)
            outcome = saved.outcome
            if saved.stored:
                self._tally.timed("save_seconds", time.monotonic() - since)
        except KVStoreError as exc:
            log.debug("an encoder output is not cached: %s", exc)
        finally:
            copy.release()
            self._ended(key, outcome)


def current_device() -> torch.device:
    """Returns this worker's device."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike():
        return torch.device(current_platform.device_type, torch.cuda.current_device())
    return torch.device(current_platform.device_type)


def is_first_rank() -> bool:
    """Returns whether this worker is the first of its tensor-parallel group."""
    from vllm.distributed import get_tensor_model_parallel_rank

    rank: Any = get_tensor_model_parallel_rank()
    return bool(rank == 0)
