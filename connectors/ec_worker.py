"""The EC connector in a worker: staged items into the encoder cache, encoder outputs to the store.

Loading reads a verified file of this node, so it takes microseconds to a few milliseconds. Saving
copies the item's own view to the host on the engine's thread and leaves the rest to the store's.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from connectors.ec_stats import RENAMED, no_gauges
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

    def save_held(self, metadata: ECStoreMetadata, encoder_cache: dict[str, torch.Tensor]) -> None:
        """Save what an earlier step computed and the store lacks. What this step computes comes later."""
        for identifier in metadata.saves:
            if identifier in encoder_cache:
                self.save(metadata, encoder_cache, identifier)

    def save(
        self, metadata: ECStoreMetadata, encoder_cache: dict[str, torch.Tensor], identifier: str
    ) -> None:
        """Queue one encoder output for the store, if the scheduler's half wants it there."""
        space = self._space
        if identifier not in metadata.saves or space is None or not self._saves():
            return
        tensor = encoder_cache[identifier]
        if tensor.dim() != 2 or tensor.dtype != self._dtype:
            log.warning("an encoder output of %s%s is not cached", tensor.dtype, list(tensor.shape))
            return
        nbytes = tensor.numel() * tensor.element_size()
        copy, now = HostCopy(tensor), time.monotonic()
        if not self._store.transfers.write(nbytes, lambda: self._save(space, identifier, copy, now)):
            self._store.counters.saved("dropped", 1)

    def take_report(self) -> ECStoreWorkerMetadata | None:
        """Identifiers loaded since the last call, and statistics; None if there are none."""
        stats = self._tally.take(False, no_gauges)
        if not self._loaded and stats is None:
            return None
        loaded, self._loaded = self._loaded, set()
        return ECStoreWorkerMetadata(loaded, stats)

    def shutdown(self) -> None:
        """Let queued saves finish (bounded), then close the store of this half."""
        self._store.close()

    def _tensor(self, item: StagedItem) -> torch.Tensor:
        data = bytearray(Path(item.path).read_bytes())
        host = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
        return host.view(TORCH_DTYPES[item.dtype]).view(item.rows, item.width).to(self._device())

    def _save(self, space: Space, identifier: str, copy: HostCopy, since: float) -> None:
        """Transfer thread: one item, a segment of its own."""
        data, dtype, shape = copy.wait()
        try:
            saved = space.save([Slot(item_key(identifier), data, dtype, shape)])
            if saved.stored:
                self._tally.timed("save_seconds", time.monotonic() - since)
        except KVStoreError as exc:
            log.warning("an encoder output is not cached: %s", exc)


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
