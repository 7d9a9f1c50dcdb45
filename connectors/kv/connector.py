"""KVStoreConnector: vLLM's KV connector over the store.

    --kv-transfer-config '{"kv_connector": "KVStoreConnector", "kv_role": "kv_both",
      "kv_load_failure_policy": "recompute",
      "kv_connector_extra_config": {"index": "redis://HOST:6379/0", "payloads": "file:///DIR"}}'

vLLM finds that name where this package is installed (connectors.plugin); where it is only on the path, add
"kv_connector_module_path": "connectors.kv".

The class is a facade: each method calls the half that runs in this process, `KVScheduler` or `KVWorker`.
Loads are always asynchronous: the engine never runs a step that waits for bytes. The blocks of a failed load
are recomputed, so `kv_load_failure_policy` must be "recompute".
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from connectors.engine.version import check_vllm_version  # isort: skip

check_vllm_version()  # in words, before an older one lacks a name

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from connectors.engine.agreement import agree
from connectors.engine.identity import page_format, refuse_unsupported_kv
from connectors.engine.layout import Group, fails_by_request, local_groups
from connectors.engine.media import Media, media_of
from connectors.engine.opening import hit_sources, is_remote, open_for
from connectors.engine.shards import Place, fits
from connectors.engine.tensors import accelerator_id
from connectors.kv.events import Events, tables_of
from connectors.kv.handoff.handoffs import open_handoffs
from connectors.kv.messages import KVStoreHandshake, KVStoreMetadata, KVStoreWorkerMetadata
from connectors.kv.metrics import KVStorePromMetrics, KVStoreStats
from connectors.kv.requests import KVEngine
from connectors.kv.scheduler import KVScheduler
from connectors.kv.worker.room import room_of
from connectors.kv.worker.worker import KVWorker
from connectors.plugin import register
from connectors.telemetry.tracing import open_spans
from kvstore.build import load_settings
from kvstore.errors import ConfigError
from kvstore.rules.segments import segment_blocks
from kvstore.store.space import Space
from schemas.namespace import Namespace

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
        KVConnectorPromMetrics,
        KVConnectorStats,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request


# MultiConnector looks up connectors by name when it sorts their statistics, even those with a module path.
register()


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """The connector that vLLM makes, once per scheduler and once per worker; `role` says for which."""

    def __new__(cls, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> Any:
        """Return another connector, which does nothing but record, if the settings say so."""
        if load_settings(vllm_config.kv_transfer_config.kv_connector_extra_config).kv.observe:
            from connectors.observing.kv import ObservingKVConnector

            return ObservingKVConnector(vllm_config, role, kv_cache_config)
        return super().__new__(cls)

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        if transfer.kv_load_failure_policy != "recompute":
            raise ConfigError(
                'kvstore: set "kv_load_failure_policy": "recompute"; with "fail" (vLLM\'s default) a '
                "block that can't be loaded would fail its request"
            )
        self._settings = load_settings(transfer.kv_connector_extra_config)
        self._hit_sources = hit_sources(self._settings)
        self._scheduler: KVScheduler | None = None
        self._worker: KVWorker | None = None
        self._block_pool: BlockPool | None = None
        #: The workers' handshakes at the start.
        self._ranks: dict[tuple[int, int], KVStoreHandshake] = {}
        refuse_unsupported_kv(vllm_config)
        self._groups = local_groups(kv_cache_config, vllm_config.parallel_config.tensor_parallel_size)
        if role is KVConnectorRole.WORKER:
            store = open_for(self._settings, "KV connector worker")
            self._worker = KVWorker(
                store,
                self._groups,
                segment_blocks=[segment_blocks(self._settings, group.slot_bytes) for group in self._groups],
                place=_place(vllm_config.parallel_config),
                by_request=fails_by_request(kv_cache_config, self._groups),
                room=room_of(vllm_config, self._groups, self._settings.transfers),
            )

    @property
    def requires_kv_delivery(self) -> bool:
        """Returns False: in a cache a dropped save is a later miss, never a reason to recompute."""
        return False

    # ---- worker ---------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._on_worker.register(kv_caches, self._kv_cache_config.num_blocks)

    def unregister_kv_caches(self) -> None:
        self._on_worker.unregister()

    def restore_kv_caches(self) -> None:
        self._on_worker.restore()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        caches = self._on_worker.memory.caches
        form = page_format(self._vllm_config, self._groups, caches)
        return KVStoreHandshake(form, self._groups, accelerator_id())

    def handle_preemptions(self, kv_connector_metadata: KVConnectorMetadata) -> None:
        metadata = self._namespaced(kv_connector_metadata)
        if metadata.abandon_loads:
            self._on_worker.reads.abandon()
            self._on_worker.writes.give_up()
        self._on_worker.writes.begin_step(
            metadata.lost_blocks, metadata.handed_over, metadata.flushes, hold=bool(metadata.audits)
        )

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._namespaced(self._get_connector_metadata())
        self._on_worker.reads.start(metadata.loads)
        if metadata.probes:
            self._on_worker.reads.probe(metadata.probes)

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        return

    def wait_for_save(self) -> None:
        metadata = self._namespaced(self._get_connector_metadata())
        # Before the saves, which take all the staging that there is: no proof, no loads.
        if metadata.audits:
            self._on_worker.audits.start(metadata.audits)
        self._on_worker.writes.start(metadata.saves)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        finished, failed = self._on_worker.reads.take_finished()
        return KVConnectorTransferResults(
            finished_sending=self._on_worker.writes.take_read(),
            finished_recving=finished,
            failed_recving=failed,
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._on_worker.reads.take_failed_blocks()

    def build_connector_worker_meta(self) -> KVStoreWorkerMetadata | None:
        return self._on_worker.take_report()

    # get_finished_count is not overridden: every rank loads its part of every load and reports it. So a load
    # has ended when all ranks have said so, which is vLLM's default. Nor is get_kv_connector_kv_cache_events:
    # a block is known to be stored when all ranks have reported it, which only the scheduler half sees.

    def name_weights(self, name: str) -> None:
        """Name the weights that this worker has now: see connectors.weights."""
        self._on_worker.name_weights(name)

    def _namespaced(self, metadata: KVConnectorMetadata) -> KVStoreMetadata:
        assert isinstance(metadata, KVStoreMetadata)
        if metadata.namespace is not None:
            self._on_worker.use(Namespace.model_validate_json(metadata.namespace), metadata.writer)
        return metadata

    # ---- scheduler ------------------------------------------------------------------------------

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self._block_pool = gpu_block_pool

    def _holds_blocks(self) -> bool:
        """Returns whether the engine's own cache has blocks that a request holds or another could find."""
        pool = self._block_pool
        return pool is None or pool.get_usage() > 0 or len(pool.cached_block_hash_to_block) > 0

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): one for rank, one in metadata.items()})

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Open the store: with what the workers tell of their pages, the namespace is complete.

        vLLM repeats it when it wakes up (from 0.33 on). The namespace may be that of other weights then and
        requests may be under way, so what is there goes on."""
        ranks = {place: one for place, one in metadata.items() if isinstance(one, KVStoreHandshake)}
        if self._scheduler is not None:
            if ranks != self._ranks:
                self._scheduler.give_up("workers have woken up with other pages than at the start")
            return
        config, settings = self._vllm_config, self._settings
        agreed = agree(ranks, config, self._kv_cache_config, settings)
        groups, stages, tokens = agreed.groups, agreed.stages, agreed.hash_tokens
        saves = config.kv_transfer_config.is_kv_producer
        store = open_for(settings, "KV connector", agreed.namespace, saves=saves)
        store.backends.writer.computes_on(one.accelerator for one in ranks.values())
        shards = [group.page.shards for group in stages[0]]
        space = store.open(agreed.namespace)

        engine = KVEngine(
            groups,
            hash_tokens=tokens,
            segment_blocks=[segment_blocks(settings, group.part_bytes) for group in groups],
            prefix_caching=bool(config.cache_config.enable_prefix_caching),
            can_load=config.kv_transfer_config.is_kv_consumer,
            can_save=saves,
            fits=lambda group, parts: fits(parts, len(stages), shards[group]),
            one_node=_on_one_node(config.parallel_config),
            ranks=len(ranks),
            holds_blocks=self._holds_blocks,
            media=media_of(config.model_config) if config.ec_transfer_config is not None else Media({}),
        )
        self._ranks = ranks
        self._scheduler = KVScheduler(
            store,
            space,
            engine,
            handoffs=open_handoffs(config, space, groups, hash_tokens=tokens, fits=engine.fits),
            events=self._events(space, groups, tokens),
            spans=partial(open_spans, config),
        )

    def _events(self, space: Space, groups: list[Group], hash_tokens: int) -> Events | None:
        """Returns the sender of KV events, or None if the engine's configuration doesn't enable them."""
        config = self._vllm_config.kv_events_config
        if config is None or not config.enable_kv_cache_events:
            return None
        tables = tables_of(self._kv_cache_config)
        return Events(groups, tables, hash_tokens, ownership=space.id, remote=is_remote(self._settings))

    def on_new_request(self, request: Request) -> None:
        self._on_scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._on_scheduler.get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        self._on_scheduler.update_state_after_alloc(request, blocks, num_external_tokens)

    def get_external_cache_hit_sources(
        self, request: Request, num_external_tokens: int
    ) -> dict[CacheHitSource, int]:
        counts: dict[CacheHitSource, int] = {}
        for tier, tokens in self._on_scheduler.planned(request).items():
            source = CacheHitSource(self._hit_sources[tier])
            counts[source] = counts.get(source, 0) + tokens
        return counts

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._on_scheduler.build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self._on_scheduler.update_connector_output(connector_output)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._on_scheduler.request_finished(request, [block_ids])

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._on_scheduler.request_finished(request, block_ids)

    def take_events(self) -> Iterable[KVCacheEvent]:
        return self._on_scheduler.take_events()

    def reset_cache(self) -> bool | None:
        return self._on_scheduler.reset_cache()

    # ---- both -----------------------------------------------------------------------------------

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        if self._worker is not None:
            return self._worker.take_stats()
        return self._scheduler.take_stats() if self._scheduler is not None else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KVStoreStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return KVStorePromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.shutdown()
        if self._worker is not None:
            self._worker.shutdown()

    @property
    def _on_worker(self) -> KVWorker:
        assert self._worker is not None, "called on the scheduler's side"
        return self._worker

    @property
    def _on_scheduler(self) -> KVScheduler:
        assert self._scheduler is not None, "called on the worker's side"
        return self._scheduler


def _on_one_node(parallel: Any) -> bool:
    """Returns whether all workers of this engine are surely on its scheduler's node."""
    if parallel.world_size == 1:
        return True
    return parallel.nnodes_within_dp == 1 and parallel.distributed_executor_backend != "ray"


def _place(parallel: Any) -> Place:
    """Returns the place of this worker process among the engine's ranks."""
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    if tp == pp == 1:
        return Place()
    return Place(get_tensor_model_parallel_rank(), tp, get_pp_group().rank_in_group, pp)
