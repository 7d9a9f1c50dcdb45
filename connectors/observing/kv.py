"""The KV connector of an engine that only observes: it records what requests ask for.

Every answer to vLLM is that of a connector that has nothing: no blocks are promised, none are kept, and the
workers have nothing to do. It opens no store, takes no memory beside the bounded queue of the trace, and
starts no thread before the first request. A failure is guarded, and costs a line of the trace.

vLLM's block hashes are recorded as they are. They hold what clients call their items: no digest of an item is
made here, because that takes longer than everything else.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from connectors.engine.agreement import agree
from connectors.engine.guard import guarded
from connectors.engine.identity import page_format, refuse_unsupported_kv
from connectors.engine.layout import local_groups
from connectors.engine.new_weights import weights_are
from connectors.engine.opening import adopt_logging
from connectors.engine.step import RequestView, StepView
from connectors.kv.messages import KVStoreHandshake, KVStoreMetadata
from connectors.kv.worker.memory import views
from connectors.observing.recording import Asked, gpus_of
from kvstore.build import load_settings, open_recording
from kvstore.keys import namespace_id

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

log = logging.getLogger(__name__)


class ObservingKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Stands in for KVStoreConnector where `kv.observe` is set, in either role."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        adopt_logging()
        self._settings = load_settings(vllm_config.kv_transfer_config.kv_connector_extra_config)
        # An engine whose blocks couldn't be stored needs no advice, so it is refused now.
        refuse_unsupported_kv(vllm_config)
        self._groups = local_groups(kv_cache_config, vllm_config.parallel_config.tensor_parallel_size)
        self._pages: KVStoreHandshake | None = None
        self._asked: Asked | None = None
        self._nothing = KVStoreMetadata()

    @property
    def requires_kv_delivery(self) -> bool:
        """Returns False: nothing is delivered."""
        return False

    # ---- worker ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        pages = views(self._groups, kv_caches, self._kv_cache_config.num_blocks)
        self._pages = KVStoreHandshake(page_format(self._vllm_config, self._groups, pages), self._groups)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._pages

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        return

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        return

    # ---- scheduler ------------------------------------------------------------------------------

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): one for rank, one in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Begin to record, under the namespace that a store would have."""
        if self._asked is not None:
            return
        ranks = {place: one for place, one in metadata.items() if isinstance(one, KVStoreHandshake)}
        agreed = agree(ranks, self._vllm_config, self._kv_cache_config, self._settings)
        self._asked = Asked(
            open_recording(self._settings),
            agreed.namespace,
            agreed.groups,
            agreed.hash_tokens,
            adapters=self._settings.identity.lora == "trust",
            gpus=gpus_of(self._vllm_config.parallel_config),
        )
        log.info(
            "kvstore KV connector: observes only, stores and loads nothing; requests are recorded in %s, "
            "namespace %s of %s",
            self._settings.trace.folder,
            namespace_id(agreed.namespace),
            agreed.namespace.model,
        )

    @guarded(None)
    def on_new_request(self, request: Request) -> None:
        if self._asked is not None:
            self._asked.arrives(RequestView(request))

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        self._come_to(request, num_computed_tokens)
        return 0, False

    @guarded(None)
    def _come_to(self, request: Request, computed: int) -> None:
        if self._asked is not None:
            self._asked.comes_to(RequestView(request), computed)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        return

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        self._step(scheduler_output)
        return self._nothing

    @guarded(None)
    def _step(self, output: SchedulerOutput) -> None:
        if self._asked is not None:
            self._asked.step(StepView(output))

    @guarded(())
    def take_events(self) -> Iterable[KVCacheEvent]:
        # vLLM asks at the end of each step.
        if self._asked is not None:
            self._asked.cost.ended()
        return ()

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    @guarded((False, None))
    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        if self._asked is not None:
            self._asked.ends(RequestView(request).request_id)
        return False, None

    @guarded(True)
    def reset_cache(self) -> bool | None:
        if self._asked is not None:
            # An EC connector beside this one may store, and hears of new weights from here alone.
            weights_are(self._asked.restart())
        return True

    # ---- both -----------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._asked is not None:
            if lost := self._asked.lost:
                log.warning("kvstore: %d requests could not be recorded", lost)
            self._asked.close()
