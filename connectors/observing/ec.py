"""The EC connector of an engine that only observes: it records which items the engine encodes.

The engine's own encoder cache lacks these items, so it would ask a store for them. The record names an item
by the name that vLLM or a client gives it, hashed with its request's salt: a digest of its content would take
longer than everything else here. All items of a namespace count with the size of the first.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from blake3 import blake3
from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from connectors.ec.engine import ECEngine, engine_of, refuse_unsupported
from connectors.ec.messages import ECStoreMetadata
from connectors.engine.guard import guarded
from connectors.engine.identity import ec_namespace, refuse_counter_identifiers
from connectors.engine.new_weights import follow
from connectors.engine.opening import adopt_logging
from connectors.engine.step import RequestView
from connectors.observing.recording import gpus_of
from connectors.weights import unnamed
from kvstore.build import Recording, load_settings, open_recording
from kvstore.errors import ConfigError
from kvstore.keys import digest, item_key, namespace_id
from schemas.namespace import DTYPE_BYTES, Namespace

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

log = logging.getLogger(__name__)


class ObservingECConnector(ECConnectorBase):
    """Stands in for ECStoreConnector where `ec.observe` is set, in either role."""

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        adopt_logging()
        refuse_counter_identifiers(vllm_config)
        refuse_unsupported(vllm_config, consumer=self.is_consumer)
        if not (self.is_consumer and self.is_producer):
            raise ConfigError(
                'kvstore: ec.observe is for engines that encode what they need: "ec_role": "ec_both"'
            )
        settings = load_settings(vllm_config.ec_transfer_config.ec_connector_extra_config)
        self._nothing = ECStoreMetadata()
        self._encoded: EncodedItems | None = None
        if role is ECConnectorRole.SCHEDULER:
            namespace = ec_namespace(vllm_config, settings)
            engine = engine_of(vllm_config, consumer=True, producer=True)
            self._encoded = EncodedItems(
                open_recording(settings), namespace, engine, gpus_of(vllm_config.parallel_config)
            )
            log.info(
                "kvstore EC connector: observes only, stores and loads nothing; items are recorded in %s, "
                "namespace %s of %s",
                settings.trace.folder,
                namespace_id(namespace),
                namespace.model,
            )

    # ---- worker ---------------------------------------------------------------------------------

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        return

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        return

    # ---- scheduler ------------------------------------------------------------------------------

    def has_cache_item(self, identifier: str) -> bool:
        return False

    @guarded(None)
    def update_state_after_alloc(self, request: Request, index: int) -> None:
        if self._encoded is not None:
            self._encoded.add(RequestView(request), index)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        return self._nothing

    def shutdown(self) -> None:
        if self._encoded is not None:
            self._encoded.close()


class EncodedItems:
    """Records the items that one engine encodes. Belongs to the scheduler's thread."""

    def __init__(self, recording: Recording, namespace: Namespace, engine: ECEngine, gpus: int) -> None:
        self._recording = recording
        self._gpus = gpus
        self._engine = engine
        self._namespace = namespace
        #: Bytes of an item; 0 while none has been seen.
        self._nbytes = 0
        self._name = namespace_id(namespace)
        follow(self)

    def enter(self, weights: str | None) -> None:
        """Go on with the weights of this name; None: with some that have none."""
        self._namespace = self._namespace.model_copy(update={"weights": weights or unnamed()})
        self._name = namespace_id(self._namespace)
        if self._nbytes:
            self._recording.trace.describe(self._name, self._namespace, self._nbytes, gpus=self._gpus)

    def add(self, view: RequestView, index: int) -> None:
        """Record that the engine encodes the item `index` of a request."""
        feature, trace = view.mm_features[index], self._recording.trace
        if self._engine.media.is_output(feature) or (
            self._engine.tower_lora and view.lora_request is not None
        ):
            return  # it would not be stored
        if not self._nbytes:
            width = self._engine.widths().get(feature.modality, self._engine.hidden)
            self._nbytes = max(
                1, view.get_num_encoder_embeds(index) * width * DTYPE_BYTES[self._engine.dtype]
            )
            trace.describe(self._name, self._namespace, self._nbytes, gpus=self._gpus)
        content = blake3(feature.identifier.encode("utf-8", "surrogatepass")).digest()
        # The engine encodes only items that its own cache lacks.
        trace.record(self._name, digest(item_key(content, view.cache_salt)), time.time(), local=0)

    def close(self) -> None:
        """Write what waits."""
        self._recording.close()
