"""The table of what connectors/ take from vLLM, and why. tests/connectors/test_vllm_contract.py checks it.

A new use in connectors/ fails there until it is listed here with its reason; a name that vLLM has lost or
moved fails with that reason. To extend: add the name to its type below; for a new type, add its path, and if
objects of it are reached through an attribute, say so in RESULTS.
"""

from __future__ import annotations

from typing import Final, NamedTuple

_KV = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_EC = "vllm.distributed.ec_transfer.ec_connector"
_TIER = "vllm.v1.kv_offload"


class Taken(NamedTuple):
    """One importable thing: why it is needed, and which of its attributes, each with its reason."""

    why: str
    names: dict[str, str] = {}  # noqa: RUF012  # never changed


#: Where it is ("module:name", or the package alone) -> what of it is used.
TAKEN: Final[dict[str, Taken]] = {
    # ---- the KV connector -----------------------------------------------------------------------
    f"{_KV}:KVConnectorBase_V1": Taken(
        "the interface itself",
        {
            "__new__": "makes one, unless the settings ask for one that only observes",
            "__init__": "keeps the configuration and the role",
            "_vllm_config": "kept by the base for later calls",
            "_kv_cache_config": "kept by the base; its own hooks read it too",
            "_get_connector_metadata": "this step's work, as bound by the model runner",
        },
    ),
    f"{_KV}:SupportsHMA": Taken("without it vLLM turns the hybrid KV cache manager off"),
    f"{_KV}:KVConnectorRole": Taken("which half this process needs", {"WORKER": "the worker's half"}),
    f"{_KV}:KVConnectorMetadata": Taken("base of what the scheduler's half tells the workers"),
    f"{_KV}:KVConnectorHandshakeMetadata": Taken("base of what workers tell once, at the start"),
    f"{_KV}:KVConnectorWorkerMetadata": Taken("base of what workers report every step"),
    f"{_KV}:KVConnectorTransferResults": Taken(
        "names loads that ended, and those that failed, in one answer",
        {
            "finished_recving": "frees the request from its wait",
            "failed_recving": "with several KV cache groups the only way to say that a load failed",
        },
    ),
    "vllm.distributed.kv_transfer.kv_connector.utils:get_current_attn_backends": Taken(
        "which attention backend fills the pages: part of the namespace"
    ),
    "vllm.v1.attention.backend:AttentionBackend": Taken("", {"get_name": "its name in the namespace"}),
    "vllm.v1.metrics.cache_hit_source:CacheHitSource": Taken(
        "what vLLM's statistics call the places that loads come from"
    ),
    "vllm.v1.outputs:KVConnectorOutput": Taken(
        "what the workers said of one step",
        {
            "finished_recving": "loads that ended",
            "finished_sending": "finished requests whose blocks are vLLM's again",
            "kv_connector_worker_meta": "the workers' reports, aggregated over ranks",
        },
    ),
    "vllm.forward_context:ForwardContext": Taken("annotation of start_load_kv"),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks": Taken(
        "the blocks allocated for a load", {"get_block_ids": "one list per KV cache group"}
    ),
    "vllm.distributed.kv_transfer:get_kv_transfer_group": Taken("the worker's connector, to name weights to"),
    "vllm.distributed.kv_transfer:has_kv_transfer_group": Taken("whether there is one"),
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorStats": Taken(
        "base of the statistics", {"__init__": "takes the data"}
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.metrics:KVConnectorPromMetrics": Taken(
        "base of the metrics", {"__init__": "keeps the labels"}
    ),
    # ---- KV events ------------------------------------------------------------------------------
    "vllm.distributed.kv_events:KVCacheEvent": Taken("annotation of take_events"),
    "vllm.distributed.kv_events:BlockStored": Taken("tells routers what the store has"),
    "vllm.distributed.kv_events:BlockRemoved": Taken("tells routers what it has no more"),
    "vllm.distributed.kv_events:MEDIUM_STORAGE": Taken("what events call the store"),
    "vllm.v1.core.kv_cache_utils:maybe_convert_block_hash": Taken("hashes as vLLM's own events have them"),
    "vllm.v1.kv_cache_interface:get_kv_cache_spec_kind": Taken("kind of a group, in events"),
    "vllm.v1.kv_cache_interface:get_kv_cache_spec_sliding_window": Taken("window of a group, in events"),
    "vllm.v1.kv_cache_interface:KVCacheSpecKind": Taken("", {"value": "in events"}),
    # ---- KV caches ------------------------------------------------------------------------------
    "vllm.v1.kv_cache_interface:KVCacheConfig": Taken(
        "which layers form which group",
        {
            "kv_cache_groups": "one block table each",
            "num_blocks": "first dimension of every layer's tensor",
            "prefix_cacheable_group_ids": "groups whose blocks can be found by their hashes",
        },
    ),
    "vllm.v1.kv_cache_interface:KVCacheGroupSpec": Taken(
        "",
        {
            "kv_cache_spec": "what a page of the group is",
            "layer_names": "which tensors, and in which order a slot holds them",
            "host_resident": "a pool of its own in host memory, which no hook hands out",
        },
    ),
    "vllm.v1.kv_cache_interface:KVCacheSpec": Taken(
        "shape and meaning of a page; what each kind has",
        {
            "block_size": "tokens per block",
            "dtype": "of the numbers in a page",
            "kv_cache_specs": "(uniform groups) one spec per layer",
            "num_heads": "a page is [heads, states, content]",
            "num_head_slots": "whether a backend packs a page as it likes",
            "cache_role": "an indexer's page is packed, too",
            "num_states": "a page is [heads, states, content]",
            "state_content_size_bytes": "a page is [heads, states, content]",
            "non_causal": "a block that depends on what follows it can't be shared",
            "sliding_window": "how much of a prefix is needed to go on from it",
            "extra_retained_tokens": "what vLLM keeps of a window beyond it",
            "attention_chunk_size": "how much of a prefix is needed to go on from it",
            "mamba_cache_mode": "whether states are kept at block boundaries at all",
            "max_tp_shards": "ranks that hold the same heads as others",
            "tp_replicated": "states that all ranks hold alike",
        },
    ),
    "vllm.v1.core.block_pool:BlockPool": Taken(
        "whether the engine's own cache is empty, so that nothing computed with old weights is in it",
        {
            "get_usage": "blocks that requests hold",
            "cached_block_hash_to_block": "blocks that another request could find",
        },
    ),
    # ---- the scheduler --------------------------------------------------------------------------
    "vllm.v1.request:Request": Taken(
        "a request in the scheduler",
        {
            "request_id": "names it in metadata and reports",
            "block_hashes": "names of its full blocks: what the index is asked for",
            "num_tokens": "how long a load may be",
            "num_prompt_tokens": "where the prompt ends: what is saved by default",
            "num_computed_tokens": "what is computed, as of before this step",
            "skip_reading_prefix_cache": "asks to be computed whole (prompt log-probabilities)",
            "lora_request": "its adapter: block hashes name it, not its weights",
            "resumable": "a streaming session, whose prompt may go on",
            "mm_features": "its images and other inputs",
            "cache_salt": "keeps its encoder outputs apart from others'",
            "get_num_encoder_embeds": "rows of an item's encoder output",
            "get_skip_reading_prefix_cache": "the same, asked of a request that was shortened",
            "all_token_ids": "tokens of its blocks, for events and for the name of a partial one",
            "kv_transfer_params": "what a proxy says of the prefill's side",
            "max_tokens": "of a prompt that is prefilled for another engine: one",
            "prompt_token_ids": "shortened where the last tokens are the decode engine's to compute",
            "_all_token_ids": "shortened alike",
            "prompt_embeds": "a prompt without tokens isn't shortened",
            "status": "how it ended",
            "ec_transfer_params": "what a proxy says of the encoder's side",
            "trace_headers": "the client's trace, for spans",
            "session_id": "which requests a client calls one session",
            "kv_hints": "what an orchestrator says of that session",
        },
    ),
    "vllm.v1.kv_hints:KvHintsEnvelope": Taken("hints of a request", {"actions": "one after the other"}),
    "vllm.v1.kv_hints:KvHintAction": Taken(
        "one hint",
        {
            "action_type": "what is to be done",
            "action_version": "whether its payload is as we know it",
            "payload": "for how long, and the like",
        },
    ),
    "vllm.v1.request:RequestStatus": Taken(
        "",
        {
            "FINISHED_STOPPED": "ended by itself: its prompt is computed",
            "FINISHED_LENGTH_CAPPED": "ended by itself: its prompt is computed",
        },
    ),
    "vllm.lora.request:LoRARequest": Taken(
        "an adapter, in events", {"adapter_id": "its number", "name": "its name"}
    ),
    "vllm.v1.core.sched.output:SchedulerOutput": Taken(
        "what a step does",
        {
            "num_scheduled_tokens": "tokens of each request in this step",
            "total_num_scheduled_tokens": "their sum, at no cost in a step of many requests",
            "kv_connector_block_state": "block tables, for saving",
            "preempted_req_ids": "requests whose blocks are gone",
            "scheduled_new_reqs": "with the blocks that they were given",
            "scheduled_cached_reqs": "with the blocks that they were given",
            "has_sync_kv_loads": "whether another connector loads within this step, and may fail to",
            "new_block_ids_to_zero": "blocks that are zeroed before a connector can read them",
            "free_encoder_mm_hashes": "items that leave the encoder caches",
            "scheduled_encoder_inputs": "from whose items the encoder caches are filled",
        },
    ),
    "vllm.v1.core.sched.output:NewRequestData": Taken(
        "a request that is scheduled for the first time",
        {"block_ids": "one list per KV cache group", "req_id": "whose tokens are counted then"},
    ),
    "vllm.v1.core.sched.output:CachedRequestData": Taken(
        "the requests that were scheduled before", {"new_block_ids": "one list per KV cache group"}
    ),
    "vllm.v1.core.sched.output:KVConnectorBlockState": Taken(
        "block tables of the requests of this step",
        {
            "get_block_ids": "one list per KV cache group, None for a request that isn't in this step",
            "boundary_state_offloads": "(Mamba, align) states that are at a boundary in this step",
        },
    ),
    "vllm.v1.core.kv_cache_utils:resolve_none_hash_seed": Taken("what the first block's hash starts from"),
    "vllm.v1.core.kv_cache_utils:resolve_kv_cache_block_sizes": Taken("tokens per block hash"),
    "vllm.v1.core.kv_cache_utils:hash_block_tokens": Taken("names a partial block, by vLLM's own means"),
    "vllm.v1.core.kv_cache_utils:generate_block_hash_extra_keys": Taken("what such a name covers besides"),
    "vllm.utils.hashing:get_hash_fn_by_name": Taken("the hash algorithm that the seed belongs to"),
    # ---- configuration --------------------------------------------------------------------------
    "vllm.config:VllmConfig": Taken(
        "the engine's configuration",
        {
            "model_config": "the model",
            "cache_config": "KV cache and prefix caching",
            "parallel_config": "ranks",
            "kv_transfer_config": "the connector's own configuration",
            "ec_transfer_config": "the connector's own configuration",
            "lora_config": "adapters",
            "compilation_config": "holds the layers, whose instruction set fills pages",
            "kv_events_config": "whether anybody listens to events",
            "observability_config": "whether it traces, and where to",
            "num_prefill_lookahead_tokens": "tokens that speculative decoding computes beyond a prompt",
            "speculative_config": "a draft model's layers may have a place in a chunk",
            "max_in_flight_tokens": "how much staging memory holds what steps compute",
            "scheduler_config": "how many encoder outputs a step makes",
            "load_config": "whether the weights are those of the model's folder",
        },
    ),
    "vllm.config:ModelConfig": Taken(
        "identity of the model",
        {
            "model": "its name or folder",
            "revision": "in the namespace",
            "dtype": "in the namespace",
            "quantization": "in the namespace",
            "hf_config": "digest of the configuration",
            "hf_overrides": "overrides of it",
            "max_model_len": "long-context rotary embeddings depend on it",
            "multimodal_config": "preprocessing decides what an encoder is given",
            "get_inputs_embeds_size": "width of an encoder output",
            "is_encoder_decoder": "its encoder's outputs aren't this cache's",
            "architectures": "whether its class is vLLM's own",
            "model_weights": "whether its weights are read from another place",
            "trust_remote_code": "whether code in its folder may run",
            "code_revision": "whether that comes from another revision",
        },
    ),
    "vllm.config:CacheConfig": Taken(
        "",
        {
            "mamba_cache_dtype": "of states, in the namespace",
            "mamba_ssm_cache_dtype": "of states, in the namespace",
            "cache_dtype": "of KV pages, in the namespace",
            "enable_prefix_caching": "whether loaded blocks are found again locally",
            "prefix_caching_hash_algo": "in the namespace",
        },
    ),
    "vllm.config:ParallelConfig": Taken(
        "",
        {
            "tensor_parallel_size": "in the namespace",
            "pipeline_parallel_size": "in the namespace",
            "decode_context_parallel_size": "told to the proxy",
            "world_size": "whether workers are on this node",
            "nnodes_within_dp": "whether workers are on this node",
            "data_parallel_size_local": "how many engines share the node's memory",
            "distributed_executor_backend": "whether workers are on this node",
        },
    ),
    "vllm.config:SchedulerConfig": Taken(
        "", {"max_num_encoder_input_tokens": "how many encoder outputs a step makes"}
    ),
    "vllm.config:KVTransferConfig": Taken(
        "",
        {
            "kv_connector_extra_config": "the store's settings",
            "kv_load_failure_policy": "must be recompute",
            "is_kv_producer": "whether to save",
            "is_kv_consumer": "whether to load",
        },
    ),
    "vllm.config:ECTransferConfig": Taken(
        "",
        {
            "ec_connector_extra_config": "the store's settings",
            "mm_encoder_output_widths": "exact width of an item, where it exceeds the hidden size",
        },
    ),
    "vllm.config:LoRAConfig": Taken(
        "", {"enable_tower_connector_lora": "adapters that change encoder outputs"}
    ),
    "vllm.config:MultiModalConfig": Taken(
        "",
        {
            "mm_processor_cache_gb": "at 0 identifiers may be a counter",
            "get_limit_per_prompt": "encoders that this engine has not loaded",
        },
    ),
    "vllm.config:ObservabilityConfig": Taken(
        "", {"otlp_traces_endpoint": "where its spans go, and ours beside them"}
    ),
    "vllm.tracing:extract_trace_context": Taken("the client's trace, as OpenTelemetry has it"),
    "vllm.tracing.otel:get_span_exporter": Taken("sends spans as vLLM's own are sent"),
    "vllm.config:CompilationConfig": Taken(
        "", {"static_forward_context": "layers by name, for the CPU's instruction set"}
    ),
    # ---- the EC connector -----------------------------------------------------------------------
    f"{_EC}.base:ECConnectorBase": Taken(
        "the interface itself",
        {
            "__new__": "makes one, unless the settings ask for one that only observes",
            "__init__": "keeps the configuration and the role",
            "is_producer": "whether to save",
            "is_consumer": "whether to load",
            "bind_connector_metadata": "extended, to learn of the namespace first",
            "_connector_metadata": "None outside of a step",
            "_get_connector_metadata": "this step's work",
        },
    ),
    f"{_EC}.base:ECConnectorRole": Taken("which half this process needs", {"SCHEDULER": "that half"}),
    f"{_EC}.base:ECConnectorMetadata": Taken("base of what the scheduler's half tells the workers"),
    f"{_EC}.base:ECConnectorWorkerMetadata": Taken("base of what workers report every step"),
    f"{_EC}.metrics:ECConnectorStats": Taken("base of the statistics", {"__init__": "takes the data"}),
    f"{_EC}.metrics:ECConnectorPromMetrics": Taken("base of the metrics", {"__init__": "keeps the labels"}),
    f"{_EC}.utils:collect_ec_item_metadata": Taken("what vLLM's proxies expect of a producer"),
    "vllm.v1.outputs:ECConnectorOutput": Taken(
        "", {"ec_connector_worker_meta": "the workers' reports, aggregated over ranks"}
    ),
    "vllm.multimodal:MULTIMODAL_REGISTRY": Taken(
        "", {"create_processor": "says which fields of an item describe it"}
    ),
    "vllm.multimodal.inputs:MultiModalFeatureSpec": Taken(
        "one image, video or clip of a request",
        {
            "identifier": "the item's name",
            "modality": "chooses the expected width",
            "mm_position": "which tokens it stands for",
            "data": "the item itself, or only what describes it: its digest names it",
        },
    ),
    "vllm.multimodal.inputs:PlaceholderRange": Taken(
        "", {"offset": "whether the item is behind already", "length": "whether the item is behind already"}
    ),
    # ---- workers --------------------------------------------------------------------------------
    "vllm.platforms:current_platform": Taken(
        "the device",
        {
            "device_type": "where to put what is loaded",
            "device_name": "who packs a page: torch calls AMD's accelerators cuda",
            "is_fp8_fnuz": "what numbers of 8 bits mean",
            "is_cuda_alike": "which of several devices",
            "is_cpu": "kernels are chosen by instruction set",
            "get_device_capability": "kernels are chosen by it",
            "get_device_name": "kernels are chosen by it",
        },
    ),
    "vllm.distributed:get_tensor_model_parallel_rank": Taken("which part of a segment this rank holds"),
    "vllm.distributed.parallel_state:get_tensor_model_parallel_rank": Taken("the same"),
    "vllm.distributed.parallel_state:get_pp_group": Taken("which stage of the model this rank holds"),
    "vllm.distributed.parallel_state:get_tp_group": Taken("(v0) ranks that must decide alike"),
    "vllm.distributed.parallel_state:GroupCoordinator": Taken(
        "",
        {
            "rank_in_group": "which stage of the model this rank holds",
            "cpu_group": "(v0) on which ranks agree",
        },
    ),
    # ---- the offloading tier --------------------------------------------------------------------
    f"{_TIER}.tiering.base:SecondaryTierManager": Taken(
        "the interface itself",
        {
            "__init__": "keeps the view of the CPU tier",
            "_block_size_bytes": "bytes of a chunk",
            "bp_detector": "with one, saves aren't held back to fill up a segment",
        },
    ),
    f"{_TIER}.tiering.base:TransferJob": Taken(
        "chunks to move",
        {
            "job_id": "names it in the report",
            "keys": "one per chunk",
            "chunk_ids": "rows of the CPU tier",
            "req_context": "whose they are",
        },
    ),
    f"{_TIER}.tiering.base:JobResult": Taken(
        "",
        {
            "job_id": "which job",
            "success": "whether all of it is there",
            "successful_keys": "what is there, if not all",
            "transfer_time": "for vLLM's statistics",
            "transfer_bytes": "for vLLM's statistics",
        },
    ),
    f"{_TIER}.tiering.backpressure:BackpressureDetector": Taken("annotation of the constructor"),
    f"{_TIER}.base:OffloadingSpec": Taken(
        "how vLLM cuts the KV cache into chunks", {"kv_events_config": "whether to tell of events"}
    ),
    f"{_TIER}.base:OffloadKey": Taken("block hash and group of a chunk"),
    f"{_TIER}.base:ReqContext": Taken(
        "", {"req_id": "which request", "get_offload_key_position": "a chunk's place in its request"}
    ),
    f"{_TIER}.base:RequestOffloadingContext": Taken("answer of on_new_request"),
    f"{_TIER}.base:ScheduleEndContext": Taken("annotation of on_schedule_end"),
    f"{_TIER}.base:LookupResult": Taken(
        "", {"HIT": "it is stored", "MISS": "it is not", "RETRY": "the index has not answered yet"}
    ),
    f"{_TIER}.base:Medium": Taken("", {"STORAGE": "what events call the store"}),
    f"{_TIER}.base:Locality": Taken("", {"value": "as configured"}),
    f"{_TIER}.base:OffloadingEvent": Taken(
        "", {"removed": "stored, not removed", "locality": "as configured"}
    ),
    f"{_TIER}.base:OffloadingCounterMetadata": Taken(
        "", {"documentation": "of a metric", "labelnames": "of a metric"}
    ),
    "vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics:OffloadingConnectorStats": Taken(
        "the tier's statistics", {"increase_counter": "one change"}
    ),
    # ---- what is computed ---------------------------------------------------------------------------
    "vllm.envs:environment_variables": Taken("variables that may change what is computed, in the namespace"),
    "vllm.model_executor.model_loader:_LOAD_FORMAT_TO_MODEL_LOADER": Taken("whether a loader is vLLM's own"),
    "vllm.model_executor.models.registry:ModelRegistry": Taken(
        "", {"models": "whether a model's class is vLLM's own, and what it loads"}
    ),
    "vllm": Taken("its own version", {"__version__": "in what a chunk's format is named"}),
}

#: Types that no annotation in connectors/ tells: of an attribute, or of what a call returns.
RESULTS: Final = {
    "VllmConfig.model_config": "ModelConfig",
    "VllmConfig.cache_config": "CacheConfig",
    "VllmConfig.parallel_config": "ParallelConfig",
    "VllmConfig.scheduler_config": "SchedulerConfig",
    "VllmConfig.kv_transfer_config": "KVTransferConfig",
    "VllmConfig.ec_transfer_config": "ECTransferConfig",
    "VllmConfig.lora_config": "LoRAConfig",
    "VllmConfig.compilation_config": "CompilationConfig",
    "VllmConfig.observability_config": "ObservabilityConfig",
    "ModelConfig.multimodal_config": "MultiModalConfig",
    "KVCacheConfig.kv_cache_groups": "KVCacheGroupSpec",
    "KVCacheGroupSpec.kv_cache_spec": "KVCacheSpec",
    "KVCacheSpec.kv_cache_specs": "KVCacheSpec",
    "Request.lora_request": "LoRARequest",
    "get_kv_cache_spec_kind()": "KVCacheSpecKind",
    "Request.mm_features": "MultiModalFeatureSpec",
    "Request.kv_hints": "KvHintsEnvelope",
    "KvHintsEnvelope.actions": "KvHintAction",
    "MultiModalFeatureSpec.mm_position": "PlaceholderRange",
    "SchedulerOutput.kv_connector_block_state": "KVConnectorBlockState",
    "SchedulerOutput.scheduled_new_reqs": "NewRequestData",
    "SchedulerOutput.scheduled_cached_reqs": "CachedRequestData",
    "KVConnectorBase_V1._vllm_config": "VllmConfig",
    "KVConnectorBase_V1._kv_cache_config": "KVCacheConfig",
    "ECConnectorBase._vllm_config": "VllmConfig",
    "TransferJob.req_context": "ReqContext",
    "get_current_attn_backends()": "AttentionBackend",
    "get_pp_group()": "GroupCoordinator",
    "get_tp_group()": "GroupCoordinator",
}

#: Types of parameters that are annotated `Any`, by name; "" where one of that name is something else.
NAMES: Final = {
    "vllm_config": "VllmConfig",
    "kv_cache_config": "KVCacheConfig",
    "model_config": "ModelConfig",
    "model": "ModelConfig",
    "parallel": "ParallelConfig",
    "spec": "KVCacheSpec",
    "feature": "MultiModalFeatureSpec",
    "group": "KVCacheGroupSpec",
    # Not the KV cache's, but vLLM's description of it to its offloading tiers.
    "tier/identity.group": "",
    # Named by torch: a process group.
    "v0/peers.group": "",
    "v0/identity.model": "",
    "v0/identity.parallel": "",
    "v0/identity.vllm_config": "",
}

#: Attributes that only newer versions have, which connectors/ must therefore read with a default.
SINCE: Final[dict[str, tuple[int, int]]] = {}

#: Used where the search does not follow: it takes what lists have for theirs, and what we set for ours.
UNSEEN: Final = {"TransferJob.keys"}
