"""The EC connector in a worker: staged items into the encoder cache, encoder outputs to the store.

Loading reads a verified file of this node, so it takes microseconds to a few milliseconds. Saving
copies the item's own view to the host on the engine's thread and leaves the rest to the store's. What a step
encodes is queued when the step is over: only then is it known what each item took (connectors.ec_timing).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from connectors.ec_stats import RENAMED, no_gauges
from connectors.ec_timing import Encoding
from connectors.ec_types import ECStoreMetadata, ECStoreWorkerMetadata, StagedItem
from connectors.stats import Tally
from connectors.tensors import TORCH_DTYPES, HostCopy
from kvstore.codec import Slot
from kvstore.errors import KVStoreError
from kvstore.keys import item_key
from kvstore.store import Space, Store
from schemas.namespace import Namespace

log = logging.getLogger(__name__)


class ECWorker:
    """One per rank. `saves` tells whether this rank is the one that saves: outputs are replicated."""

    def __init__(
        self,
        store: Store,
        *,
        dtype: torch.dtype,
        device: Callable[[], torch.device],
        saves: Callable[[], bool],
    ) -> None:
        self._store = store
        self._dtype = dtype
        self._device = device
        self._saves = saves
        self._space: Space | None = None
        self._named = ""
        self._loaded: set[str] = set()
        #: This step's run of the encoder, if something of it is wanted, and what is to be saved of it.
        self._encoding: Encoding | None = None
        self._encoded: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        #: Guarded by the lock.
        self._saved: dict[str, str] = {}
        self._tally = Tally(store.counters, RENAMED)

    def use(self, metadata: ECStoreMetadata) -> None:
        """The scheduler's half has named the namespace; all that follows belongs to it."""
        if metadata.namespace is not None and metadata.namespace != self._named:
            self._named = metadata.namespace
            namespace = Namespace.model_validate_json(metadata.namespace)
            self._space = self._store.open(namespace, block_bytes=1 << 20)

    def load(self, metadata: ECStoreMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Put this step's promised items into the encoder cache."""
        for identifier, item in metadata.loads.items():
            if identifier not in encoder_cache:
                encoder_cache[identifier] = self._tensor(item)
            self._loaded.add(identifier)
        self._begin(metadata)

    def save_held(self, metadata: ECStoreMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Save what an earlier step computed and the store lacks. What this step computes comes later."""
        for identifier in metadata.saves:
            if identifier in encoder_cache:
                self._save(metadata, encoder_cache, identifier, None)
        self._begin(metadata)

    def _begin(self, metadata: ECStoreMetadata) -> None:
        self._encoding = Encoding(self._device()) if metadata.saves and self._saves() else None

    def save(
        self, metadata: ECStoreMetadata, encoder_cache: dict[str, torch.Tensor], identifier: str
    ) -> None:
        """Queue one encoder output of this step for the store, if the scheduler's half wants it there."""
        if self._encoding is not None:
            self._encoding.made(encoder_cache[identifier].shape[0])
        self._save(metadata, encoder_cache, identifier, self._encoding)

    def _save(
        self,
        metadata: ECStoreMetadata,
        encoder_cache: dict[str, torch.Tensor],
        identifier: str,
        encoding: Encoding | None,
    ) -> None:
        space = self._space
        if identifier not in metadata.saves or space is None or not self._saves():
            return
        tensor = encoder_cache[identifier]
        if tensor.dim() != 2 or tensor.dtype != self._dtype:
            log.warning("an encoder output of %s%s is not cached", tensor.dtype, list(tensor.shape))
            return
        nbytes = tensor.numel() * tensor.element_size()
        copy, now = HostCopy(tensor), time.monotonic()

        def queue() -> None:
            if not self._store.transfers.write(
                nbytes, lambda: self._write(space, identifier, copy, encoding, now)
            ):
                self._store.counters.saved("dropped", 1)
                self._ended(identifier, "dropped")

        if encoding is None:
            queue()
        else:
            self._encoded.append(queue)

    def _ended(self, identifier: str, outcome: str) -> None:
        with self._lock:
            self._saved[identifier] = outcome

    def take_report(self) -> ECStoreWorkerMetadata | None:
        """What happened since the last call; None if nothing. The step is over."""
        encoded, self._encoded, self._encoding = self._encoded, [], None
        for queue in encoded:
            queue()
        stats = self._tally.take(False, no_gauges)
        if not (self._loaded or self._saved or stats is not None):
            return None
        with self._lock:
            saved, self._saved = self._saved, {}
        loaded, self._loaded = self._loaded, set()
        return ECStoreWorkerMetadata(loaded, stats, saved)

    def shutdown(self) -> None:
        """Let queued saves finish (bounded), then close the store of this half."""
        self._store.close()

    def _tensor(self, item: StagedItem) -> torch.Tensor:
        data = bytearray(Path(item.path).read_bytes())
        host = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return host.view(TORCH_DTYPES[item.dtype]).view(item.rows, item.width).to(self._device())

    def _write(
        self, space: Space, identifier: str, copy: HostCopy, encoding: Encoding | None, since: float
    ) -> None:
        """Transfer thread: one item, a segment of its own."""
        data, dtype, shape = copy.wait()
        cost_us = encoding.cost_us(shape[0]) if encoding is not None else 0
        outcome = "failed"
        try:
            saved = space.save([Slot(item_key(identifier), data, dtype, shape)], cost_us=cost_us)
            outcome = saved.outcome
            if saved.stored:
                self._tally.timed("save_seconds", time.monotonic() - since)
        except KVStoreError as exc:
            log.warning("an encoder output is not cached: %s", exc)
        finally:
            self._ended(identifier, outcome)


def current_device() -> torch.device:
    """This worker's device."""
    from vllm.platforms import current_platform

    if current_platform.is_cuda_alike():
        return torch.device(current_platform.device_type, torch.cuda.current_device())
    return torch.device(current_platform.device_type)


def is_first_rank() -> bool:
    """Whether this worker is the first of its tensor-parallel group."""
    from vllm.distributed import get_tensor_model_parallel_rank

    rank: Any = get_tensor_model_parallel_rank()
    return bool(rank == 0)
