"""What vLLM is told of an engine."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.config.ec_transfer import ECTransferConfig
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import init_none_hash

from trials.accelerator.layouts import Layout
from trials.accelerator.plan import Plan

#: Number of tokens that are drafted in each step.
DRAFTS = 3


@functools.cache
def _base(model: Path) -> VllmConfig:
    config = VllmConfig(
        model_config=ModelConfig(
            str(model), skip_tokenizer_init="text" in model.name, dtype="bfloat16", max_model_len=208
        ),
        cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=64, max_num_seqs=6, max_model_len=208, is_encoder_decoder=False
        ),
        device_config=DeviceConfig("cpu"),
    )
    init_none_hash(get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo))
    return config


def configured(model: Path, plan: Plan, layout: Layout) -> VllmConfig:
    """An engine's configuration."""
    base = _base(model)
    config = copy.copy(base)
    config.cache_config, config.scheduler_config = (
        copy.copy(base.cache_config),
        copy.copy(base.scheduler_config),
    )
    cache = config.cache_config
    cache.num_gpu_blocks_override, cache.kv_cache_layout = layout.blocks, layout.order
    cache.block_size = min(spec.block_size for spec in layout.specs.values())
    cache.mamba_cache_mode = layout.mamba_mode
    config.scheduler_config.async_scheduling = plan.depth > 1
    pages = sum(spec.page_size_bytes for spec in layout.specs.values())
    place = f"memory://accelerator-{id(config)}"
    store = {"payloads": place, "index": place, "identity": {"weights": "none", "client_uuids": "trust"}}
    if plan.ranks > 1:
        config.parallel_config = ParallelConfig(
            tensor_parallel_size=plan.ranks, distributed_executor_backend="mp"
        )
    if plan.drafts and plan.depth == 1 and not plan.items and layout.mamba_mode == "none":
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=DRAFTS,
            prompt_lookup_max=2,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    if plan.items:
        config.ec_transfer_config = ECTransferConfig(
            ec_connector="ECStoreConnector",
            ec_connector_module_path="connectors.ec",
            ec_role="ec_both",
            ec_connector_extra_config={**store, "ec": {"fetch_deadline_s": 20.0}},
        )
    ours: dict[str, Any] = {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "connectors.kv",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            **store,
            "kv": {
                "load": "adaptive" if plan.adaptive else "always",
                "save_decode": plan.save_decode,
                "load_deadline_s": 0.05 if plan.late else 20.0,
                "match_deadline_s": 20.0,
                "audit_every": plan.audited,
                "handoff": plan.handoffs,
                "handoff_wait_s": 20.0,
                **({"staging_bytes": plan.staged * pages} if plan.staged else {}),
            },
        },
    }
    if plan.beside:
        other = {
            "kv_connector": "Rdma",
            "kv_connector_module_path": "trials.accelerator.beside",
            "kv_role": "kv_both",
        }
        ours = {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"connectors": [ours, other]},
        }
    config.kv_transfer_config = KVTransferConfig(**ours)
    return config


def of_rank(config: VllmConfig, rank: int) -> VllmConfig:
    """A rank's configuration. Where staging is given, each rank has less of it, so that it comes later."""
    made, transfer = copy.copy(config), copy.deepcopy(config.kv_transfer_config)
    if "staging_bytes" in (settings := transfer.kv_connector_extra_config.get("kv", {})):
        settings["staging_bytes"] //= rank + 1
    made.kv_transfer_config = transfer
    return made
