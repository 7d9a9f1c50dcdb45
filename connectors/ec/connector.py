"""ECStoreConnector: vLLM's encoder-cache connector over the store.

    --ec-transfer-config '{"ec_connector": "ECStoreConnector", "ec_connector_module_path": "connectors.ec",
      "ec_role": "ec_both",
      "ec_connector_extra_config": {"index": "redis://HOST:6379/0", "payloads": "file:///DIR"}}'

A facade: each method hands over to the half that runs in this process, `ECScheduler` or `ECWorker`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from connectors.engine.version import check_vllm_version  # isort: skip

check_vllm_version()  # says so in words, before an import below fails on an older vLLM

from vllm.distributed.ec_transfer.ec_connector.base import (
    ECConnectorBase,
    ECConnectorMetadata,
    ECConnectorRole,
)

from connectors.ec.engine import engine_of, refuse_unsupported
from connectors.ec.memory import memory_of
from connectors.ec.messages import ECStoreMetadata, ECStoreWorkerMetadata
from connectors.ec.metrics import ECStorePromMetrics, ECStoreStats
from connectors.ec.scheduler import ECScheduler
from connectors.ec.worker import ECWorker, current_device, is_first_rank
from connectors.engine.identity import ec_namespace, refuse_counter_identifiers
from connectors.engine.opening import open_for
from connectors.engine.tensors import accelerator_id
from kvstore.build import load_settings

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ECConnectorOutput
    from vllm.v1.request import Request


class ECStoreConnector(ECConnectorBase):
    """vLLM makes one for its scheduler and one for each worker; `role` says which."""

    def __new__(cls, vllm_config: VllmConfig, role: ECConnectorRole) -> Any:
        """Return another connector, which does nothing but record, if the settings say so."""
        if load_settings(vllm_config.ec_transfer_config.ec_connector_extra_config).ec.observe:
            from connectors.observing.ec import ObservingECConnector

            return ObservingECConnector(vllm_config, role)
        return super().__new__(cls)

    def __init__(self, vllm_config: VllmConfig, role: ECConnectorRole) -> None:
        super().__init__(vllm_config, role)
        refuse_counter_identifiers(vllm_config)
        refuse_unsupported(vllm_config, consumer=self.is_consumer)
        settings = load_settings(vllm_config.ec_transfer_config.ec_connector_extra_config)
        self._scheduler: ECScheduler | None = None
        self._worker: ECWorker | None = None
        if role is ECConnectorRole.SCHEDULER:
            namespace = ec_namespace(vllm_config, settings)
            store = open_for(settings, "EC connector", namespace, saves=self.is_producer)
            # An engine of one rank runs in this very process, unless its configuration says otherwise.
            store.backends.writer.computes_on([accelerator_id()])
            engine = engine_of(vllm_config, consumer=self.is_consumer, producer=self.is_producer)
            self._scheduler = ECScheduler(store, store.open(namespace), engine)
        else:
            store = open_for(settings, "EC connector worker")
            self._worker = ECWorker(
                store,
                dtype=vllm_config.model_config.dtype,
                device=current_device,
                saves=is_first_rank,
                memory=memory_of(vllm_config, settings, current_device()),
            )

    # ---- worker ---------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: ECConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._on_worker.use(self._metadata())

    def start_save_caches(self, **kwargs: Any) -> None:
        self._on_worker.save_held(self._metadata(), kwargs.get("encoder_cache") or {})

    def start_load_caches(self, encoder_cache: dict[str, torch.Tensor], **kwargs: Any) -> None:
        self._on_worker.load(self._metadata(), encoder_cache)

    def save_caches(self, encoder_cache: dict[str, torch.Tensor], mm_hash: str, **kwargs: Any) -> None:
        # Outside of a step (profiling, warm-up) there is no metadata and nothing to save.
        if self.is_producer and self._connector_metadata is not None:
            self._on_worker.save(self._metadata(), encoder_cache, mm_hash)

    def build_connector_worker_meta(self) -> ECStoreWorkerMetadata | None:
        return self._on_worker.take_report()

    def _metadata(self) -> ECStoreMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ECStoreMetadata)
        return metadata

    # ---- scheduler ------------------------------------------------------------------------------

    def ensure_cache_available(self, request: Request, num_computed_tokens: int) -> bool:
        return self._on_scheduler.ensure_cache_available(request, num_computed_tokens)

    def has_cache_item(self, identifier: str) -> bool:
        return self._on_scheduler.has_cache_item(identifier)

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self._on_scheduler.update_state_after_alloc(request, index)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ECConnectorMetadata:
        return self._on_scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: ECConnectorOutput) -> None:
        self._on_scheduler.update_connector_output(connector_output)

    def take_unavailable_requests(self) -> set[str]:
        return self._on_scheduler.take_unavailable_requests()

    def request_finished(self, request: Request) -> tuple[bool, dict[str, Any] | None]:
        # True would leak the request: nothing ever frees it.
        return False, self._on_scheduler.request_finished(request)

    # ---- both -----------------------------------------------------------------------------------

    def get_ec_connector_stats(self) -> ECStoreStats | None:
        # The workers' statistics come to the scheduler with their metadata.
        report = self._scheduler.take_stats() if self._scheduler is not None else None
        return ECStoreStats(report) if report is not None else None

    @classmethod
    def build_ec_connector_stats(cls, data: dict[str, Any] | None = None) -> ECStoreStats:
        return ECStoreStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> ECStorePromMetrics:
        return ECStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()

    @property
    def _on_worker(self) -> ECWorker:
        assert self._worker is not None, "called on the scheduler's side"
        return self._worker

    @property
    def _on_scheduler(self) -> ECScheduler:
        assert self._scheduler is not None, "called on the worker's side"
        return self._scheduler
