"""The namespace of the chunks in vLLM's CPU tier, as the scheduler's process can tell it.

A chunk is one row of memory. It holds, worker after worker, the pages of `blocks_per_chunk` blocks of a KV
cache group, in an order that vLLM keeps to itself. The tier can't see inside it, and lives in a process that
may hold no layers: it can't ask the attention backends how they fill a page. But vLLM derives the backends,
their pages and the order of a row from what it is given, and all of that is known here. So the causes of a
chunk's format name it: vLLM's version, the device, and every setting that has a say in it. Equal causes make
equal bytes; a difference that does not matter costs a hit, never a wrong token. `chunk_facts` lists the
causes; a digest of the list is in the namespace, and the list itself is in the log.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import platform
import sys
from dataclasses import dataclass
from typing import Any

from connectors.engine.identity import described_model, kv_namespace, refuse_counter_identifiers
from connectors.engine.tensors import SAFETENSORS_DTYPES
from kvstore.errors import ConfigError
from schemas.namespace import DTYPE_BYTES, GroupKind, GroupSpec, Namespace, Parallel
from schemas.settings import AdmissionSettings, KVSettings, Settings

#: Version of the way in which this module describes a row and lists its facts.
_FORMAT = 1
#: Packages whose presence and version decide which attention kernels there are.
_KERNELS = ("flashinfer-python", "flash-attn", "aiter", "amd-aiter", "triton", "xformers", "vllm-flash-attn")
_CACHE_FIELDS = (
    "block_size", "user_specified_block_size", "cache_dtype", "kv_cache_layout", "mamba_block_size",
    "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_cache_mode", "kv_sharing_fast_prefill",
    "skip_sliding_window", "kv_cache_dtype_skip_layers",
)  # fmt: skip
_PARALLEL_FIELDS = (
    "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size",
    "decode_context_parallel_size", "cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size",
    "dcp_comm_backend",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """The engine's whole configuration, and the part of it that vLLM gives a tier."""

    vllm: Any
    kv_cache: Any
    offloading: Any

    @property
    def chunk_tokens(self) -> dict[int, int]:
        """Returns the tokens per chunk of every offloaded KV cache group, by its number."""
        config = self.offloading.config
        return {one.group_id: one.tokens_per_block * config.cache.blocks_per_chunk for one in config.groups}


def engine_of(offloading_spec: Any) -> EngineConfig:
    """Returns the engine that a tier with this offloading spec is being made for.

    vLLM gives a tier a digest of the engine's configuration, without what a namespace needs (hash
    algorithm, revision, overrides, LoRA, attention). The configuration is an argument of the function
    that asks for the tiers, further up the stack. Raises ConfigError if this vLLM does it otherwise.
    """
    frame = sys._getframe(1)
    while frame is not None:
        names = frame.f_locals
        if names.get("spec") is offloading_spec and {"vllm_config", "kv_cache_config"} <= names.keys():
            return EngineConfig(names["vllm_config"], names["kv_cache_config"], offloading_spec)
        frame = frame.f_back  # type: ignore[assignment]
    raise ConfigError(
        "kvstore: this version of vLLM makes its offloading tiers in another way, and KVStoreTier can't tell "
        "which engine it is made for; use a version of vLLM that kvstore names as supported"
    )


def refuse_settings(settings: Settings) -> None:
    """Raises ConfigError for settings that a tier can't honour."""
    if settings.kv.observe:
        raise ConfigError(
            "kvstore: kv.observe doesn't work in the offloading tier, which would store and load; observe "
            "with KVStoreConnector"
        )
    if settings.admission != AdmissionSettings():
        raise ConfigError(
            "kvstore: admission doesn't work in the offloading tier, which sees no prompts; leave it out"
        )
    if settings.identity.any_tp:
        raise ConfigError(
            "kvstore: identity.any_tp doesn't work in the offloading tier, whose chunks hold all workers' "
            "bytes as they are; leave it out"
        )
    defaults = KVSettings()
    if settings.kv.save_decode != defaults.save_decode:
        raise ConfigError(
            'kvstore: under the OffloadingConnector, set "offload_prompt_only": false in '
            "kv_connector_extra_config instead of kv.save_decode"
        )
    if settings.kv.load == "never" or settings.kv.objective != defaults.objective:
        raise ConfigError(
            "kvstore: the offloading tier loads what vLLM has promised; leave kv.load and kv.objective out"
        )
    if settings.kv.min_load_blocks != defaults.min_load_blocks:
        raise ConfigError("kvstore: kv.min_load_blocks doesn't work in the offloading tier; leave it out")


def refuse_engine(engine: EngineConfig, settings: Settings) -> None:
    """Raises ConfigError for an engine whose chunks can't be shared."""
    refuse_counter_identifiers(engine.vllm)
    if getattr(engine.vllm, "lora_config", None) is not None and settings.identity.lora == "skip":
        raise ConfigError(
            "kvstore: the offloading tier can't tell requests with a LoRA adapter from others, and vLLM's "
            'block hash names an adapter, not its weights. Set identity.lora to "trust" if an adapter\'s '
            "name and path never get other weights, or use KVStoreConnector, which leaves such requests out."
        )
    multimodal = engine.vllm.model_config.multimodal_config is not None
    if multimodal and settings.identity.client_uuids == "refuse":
        raise ConfigError(
            "kvstore: identity.client_uuids = refuse doesn't work in the offloading tier, which sees no "
            'images of a request. Set it to "trust" if only a gateway names them, or use '
            "KVStoreConnector"
        )
    parallel = engine.vllm.parallel_config
    workers = engine.offloading.config.parallel.world_size
    if workers > 1 and (parallel.nnodes_within_dp > 1 or parallel.distributed_executor_backend != "mp"):
        raise ConfigError(
            "kvstore: the offloading tier sees the memory of workers on its own node only, so with more than "
            'one worker the engine must be on one node and --distributed-executor-backend must be "mp"'
        )


def tier_namespace(engine: EngineConfig, settings: Settings, row_bytes: int) -> Namespace:
    """Returns the namespace of an engine's chunks, whose rows are `row_bytes` long. Raises ConfigError."""
    dtype = _row_dtype(engine, row_bytes)
    namespace = kv_namespace(
        engine.vllm,
        [_group(engine, one, row_bytes, dtype) for one in engine.offloading.config.groups],
        settings,
        hash_tokens=engine.offloading.config.cache.tokens_per_hash,
        page_format=chunk_format(chunk_facts(engine, settings)),
    )
    # All workers' bytes are in one row, so a segment has one part; the format has the number of workers.
    return namespace.model_copy(update={"page_order": "offloading", "parallel": Parallel()})


def chunk_format(facts: dict[str, Any]) -> str:
    """Returns the format's name: the facts that people ask for first, and a digest of all of them."""
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]
    sizes = facts["parallel"]
    layout = f"tp{sizes['tensor_parallel_size']}.pp{sizes['pipeline_parallel_size']}"
    return f"offloading{_FORMAT}/{'.'.join(map(str, facts['device']))}/vllm-{facts['vllm']}/{layout}/{digest}"


def chunk_facts(engine: EngineConfig, settings: Settings) -> dict[str, Any]:
    """Returns everything that decides what the bytes of a chunk are, besides the other members."""
    import torch
    import vllm

    config, cache = engine.offloading.config, engine.vllm.cache_config
    groups = [(one.group_id, one.tokens_per_block, list(one.layer_names)) for one in config.groups]
    return {
        "format": _FORMAT,
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "device": _device(),
        "kernels": {name: version for name in _KERNELS if (version := _version(name)) is not None},
        "cache": {name: str(getattr(cache, name, None)) for name in _CACHE_FIELDS},
        "parallel": {name: getattr(engine.vllm.parallel_config, name, None) for name in _PARALLEL_FIELDS},
        "runner": bool(getattr(engine.vllm, "use_v2_model_runner", False)),
        "groups": groups,
        "specs": [str(engine.kv_cache.kv_cache_groups[one.group_id].kv_cache_spec) for one in config.groups],
        "chunk": {
            "blocks": config.cache.blocks_per_chunk,
            "worker_bytes": config.worker_kv_bytes_per_block,
            "workers": config.parallel.world_size,
            "canonical": config.canonical_layout,
            "replicated": config.replicated_layout,
            "layout": config.kv_cache_layout,
        },
        "draft": _draft(engine.vllm, settings),
    }


def _group(engine: EngineConfig, group: Any, row_bytes: int, dtype: str) -> GroupSpec:
    kind, window = _kind(engine.kv_cache.kv_cache_groups[group.group_id].kv_cache_spec)
    return GroupSpec(
        kind=kind,
        block_tokens=engine.chunk_tokens[group.group_id],
        dtype=dtype,
        shape=(1, 1, 1, row_bytes // DTYPE_BYTES[dtype]),
        layers=hashlib.sha256("\n".join(group.layer_names).encode()).hexdigest()[:16],
        window=window,
    )


def _kind(spec: Any) -> tuple[GroupKind, int | None]:
    """Returns a group's kind and its window, for people to read: the format follows from the facts."""
    name = type(_layer_specs(spec)[0]).__name__
    if name.startswith("SlidingWindow"):
        return "sliding_window", _layer_specs(spec)[0].sliding_window
    if name.startswith("ChunkedLocal"):
        return "chunked_local", _layer_specs(spec)[0].attention_chunk_size
    if name.startswith("Mamba"):
        return "mamba", None
    return ("mla", None) if "MLA" in name else ("full", None)


def _layer_specs(spec: Any) -> list[Any]:
    inner = getattr(spec, "kv_cache_specs", None)
    return [spec] if inner is None else list(inner.values())


def _row_dtype(engine: EngineConfig, row_bytes: int) -> str:
    """Returns the dtype of all of a row, for codecs that look inside numbers; "U8" if there are several."""
    specs = [
        spec
        for group in engine.offloading.config.groups
        for spec in _layer_specs(engine.kv_cache.kv_cache_groups[group.group_id].kv_cache_spec)
    ]
    dtypes = {SAFETENSORS_DTYPES.get(getattr(spec, "dtype", None)) for spec in specs}
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    return dtype if dtype is not None and row_bytes % DTYPE_BYTES[dtype] == 0 else "U8"


def _device() -> list[str]:
    """Returns the device that KV blocks are computed on, as exactly as kernels are chosen for it."""
    import torch
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        sets = [torch.backends.cpu.get_cpu_capability(), *_instruction_sets()]
        return ["cpu", platform.machine(), *sets]
    capability = current_platform.get_device_capability()
    return [
        current_platform.device_type,
        str(current_platform.get_device_name()).replace(" ", "-"),
        capability.as_version_str() if capability is not None else "",
    ]


def _instruction_sets() -> list[str]:
    import torch

    names = ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported")
    found = [name for name in names if getattr(torch.cpu, name, lambda: False)()]
    return [name.removeprefix("_is_").removesuffix("_supported") for name in found]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _draft(vllm_config: Any, settings: Settings) -> Any:
    """Returns what describes the draft model of speculative decoding, whose layers may be part of a chunk.

    Its weights are part of the namespace's."""
    config = getattr(vllm_config, "speculative_config", None)
    if config is None:
        return None
    model, method = getattr(config, "draft_model_config", None), str(getattr(config, "method", None))
    if model is None:
        return [method]
    load = getattr(config, "draft_load_config", None) or getattr(vllm_config, "load_config", None)
    return [method, described_model(model, load, settings)]
