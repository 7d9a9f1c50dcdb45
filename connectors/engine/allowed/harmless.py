"""The options of vLLM that are known to leave the bytes of KV blocks and encoder outputs as they are.

An option is named by the class of vLLM's that has it, so that it is known wherever such an object stands.
Each group has its reason. An option that is not listed here, such as an option of a newer vLLM, is taken for
one that changes bytes: engines that differ in it don't share.
tests/connectors/engine/test_options.py fails if a name is in neither version of vLLM that is supported.
"""

from __future__ import annotations

#: Sections that say how an engine is watched, spoken to or stopped, or what becomes of its logits: none of it
#: comes before a layer's output.
SECTIONS = frozenset(
    {
        "ECTransferConfig", "EncoderCacheManagerConfig", "FaultToleranceConfig", "KVEventsConfig",
        "KVTransferConfig", "LoggingConfig", "ObservabilityConfig", "PoolerConfig", "ProfilerConfig",
        "ReasoningConfig", "StructuredOutputsConfig", "WatchdogConfig", "WatermarkConfig",
        "WeightTransferConfig",
    }
)  # fmt: skip

#: Options of every engine, by the class that has them.
_OPTIONS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    # -- Other members of the namespace hold them.
    ("ModelConfig", "named by the members model, revision, weights, config, dtype and quantization", (
        "model", "model_weights", "revision", "dtype", "quantization", "hf_config_path", "hf_overrides",
        "quantization_config", "override_generation_config", "generation_config", "model_impl",
        "trust_remote_code", "code_revision",
    )),
    ("VllmConfig", "made from the model's quantisation and its files", ("quant_config",)),
    ("CacheConfig", "named by the members block_tokens, hash_algo, kv_dtype and groups", (
        "block_size", "cache_dtype", "prefix_caching_hash_algo", "prefix_match_unit", "sliding_window",
        "mamba_block_size", "mamba_cache_dtype", "mamba_ssm_cache_dtype", "mamba_page_size_padded",
        "skip_page_size_padded", "is_attention_free",
    )),
    ("ParallelConfig", "named by the member parallel", (
        "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size",
        "decode_context_parallel_size",
    )),
    ("LoadConfig", "the member weights is the files' digest for these formats only: see loaders.py", (
        "load_format",
    )),
    ("MultiModalConfig", "named by the member config", (
        "mm_processor_kwargs", "media_io_kwargs", "mm_device_do_normalize", "mm_encoder_attn_backend",
        "mm_encoder_attn_dtype", "video_pruning_rate", "video_pruning_method",
    )),
    ("SpeculativeConfig", "the draft's own configuration and weights say more", (
        "model", "revision", "code_revision", "quantization", "target_model_config", "target_parallel_config",
        "draft_tensor_parallel_size", "tensor_parallel_size", "draft_load_config", "draft_parallel_config",
    )),
    # -- Names, places and credentials: they say where something is, and not what is in it.
    ("ModelConfig", "names and places of what comes before tokens and after logits", (
        "tokenizer", "tokenizer_mode", "tokenizer_revision", "skip_tokenizer_init", "served_model_name",
        "hf_token", "allowed_local_media_path", "allowed_media_domains", "config_format",
    )),
    ("LoadConfig", "where and how quickly the same bytes are read", (
        "download_dir", "safetensors_prefetch_num_threads", "safetensors_prefetch_block_size", "device",
        "use_tqdm_on_load",
    )),
    ("CompilationConfig", "places of what was compiled, and of dumps", (
        "debug_dump_path", "cache_dir", "compile_cache_save_format",
    )),
    ("VllmConfig", "the name of this process, and how it stops", ("instance_id", "shutdown_timeout")),
    ("DeviceConfig", "in the member page_format; encoder outputs have no other device than the model", (
        "device",
    )),
    # -- Sizes of memory, batches and queues: how much is computed at once and kept, not what.
    ("SchedulerConfig", "which requests are computed when, and in what portions", (
        "runner_type", "max_num_batched_tokens", "max_num_scheduled_tokens", "max_num_seqs",
        "max_num_active_seqs", "long_prefill_token_threshold", "long_prefill_token_threshold_adaptive",
        "max_num_queued_reqs", "max_num_queued_tokens", "enable_chunked_prefill", "is_multimodal_model",
        "policy", "disable_chunked_mm_input", "disable_hybrid_kv_cache_manager",
        "scheduler_reserve_full_isl", "watermark", "prefill_schedule_interval", "async_scheduling",
        "stream_interval",
    )),
    ("CacheConfig", "sizes of the engine's own cache, and what it keeps there", (
        "gpu_memory_utilization", "kv_cache_memory_bytes", "num_gpu_blocks_override",
        "enable_prefix_caching", "prefix_cache_retention_interval", "mamba_cache_mode",
        "enable_mamba_shared_prefix_checkpoint", "kv_offloading_size", "kv_offloading_backend",
    )),
    ("ModelConfig", "how long a request may be; what depends on it is in the member config", (
        "max_model_len", "spec_target_max_model_len",
    )),
    ("ParallelConfig", "how many copies of the engine there are, and which of them this is", (
        "data_parallel_size", "data_parallel_size_local", "data_parallel_rank", "data_parallel_rank_local",
        "rank", "nnodes", "node_rank", "_api_process_count", "_api_process_rank", "enable_elastic_ep",
        "elastic_ep_max_dp_size",
    )),
    ("ParallelConfig", "addresses, ports, time limits and how processes are started", (
        "data_parallel_master_ip", "data_parallel_rpc_port", "data_parallel_master_port",
        "data_parallel_backend", "data_parallel_external_lb", "data_parallel_hybrid_lb", "dp_sync_interval",
        "_data_parallel_master_port_list", "_coord_store_port", "master_addr", "master_port",
        "distributed_executor_backend", "distributed_timeout_seconds", "cpu_distributed_timeout_seconds",
        "max_parallel_loading_workers", "disable_nccl_for_dp_synchronization", "ray_workers_use_nsight",
        "ray_runtime_env", "placement_group", "numa_bind", "numa_bind_nodes", "numa_bind_cpus",
        "assigned_physical_gpu_ids", "enable_shm_tensor_arena", "enable_fault_tolerance", "is_moe_model",
        "_allow_auto_resolve_cp_interleave_size",
    )),
    ("ParallelConfig", "adds methods that do nothing until they are called, and then a reset follows", (
        "worker_extension_cls",
    )),
    ("LoRAConfig", "requests with an adapter are left out, or named by it", (
        "max_loras", "max_lora_rank", "max_cpu_loras", "specialize_active_lora", "max_lora_cls_labels",
    )),
    ("MultiModalConfig", "how inputs are kept and handed on, and which are allowed", (
        "limit_per_prompt", "enable_mm_embeds", "mm_processor_cache_gb", "mm_processor_cache_type",
        "mm_shm_cache_max_object_size_mb", "interleave_mm_strings", "skip_mm_profiling", "mm_tensor_ipc",
        "allow_missing_mm_embeddings", "mm_ipc_gpu_memory_gb", "mm_encoder_only",
        "mm_encoder_fp8_scale_save_path", "mm_encoder_fp8_scale_save_margin",
    )),
    # -- What comes after a layer's output, or in vLLM's own memory.
    ("ModelConfig", "sampling, logits and what is returned", (
        "runner", "convert", "seed", "return_sampling_mask", "max_logprobs", "logprobs_mode",
        "use_fp64_gumbel", "enable_trace_replay", "enable_prompt_embeds", "logits_processors",
        "io_processor_plugin", "renderer_num_workers", "pooler_config",
    )),
    ("ModelConfig", "what sleeps and wakes; a reset of the cache goes with it", (
        "enable_sleep_mode", "sleep_preserve_parameter_names", "sleep_mode_backend",
        "sleep_mode_offload_cudagraph", "enable_nccl_comm_suspend", "enable_cumem_allocator",
    )),
    ("ModelConfig", "resolved into compilation_config.mode, which is not listed", ("enforce_eager",)),
    ("ParallelConfig", "which rank samples", ("enable_batch_sharded_sampling",)),
    ("SpeculativeConfig", "how many tokens are guessed, and which guesses are kept", (
        "num_speculative_tokens", "num_speculative_tokens_per_batch_size", "enforce_eager", "max_model_len",
        "prompt_lookup_max", "prompt_lookup_min", "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests", "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob", "rejection_sample_method", "synthetic_acceptance_rates",
        "synthetic_acceptance_length", "draft_sample_method", "disable_padded_drafter_batch",
        "use_local_argmax_reduction", "disable_lookahead_block_hashes",
    )),
    ("CompilationConfig", "which batches are replayed from a recorded graph of the same kernels", (
        "cudagraph_mode", "cudagraph_num_of_warmups", "cudagraph_capture_sizes", "cudagraph_copy_inputs",
        "cudagraph_specialize_lora", "max_cudagraph_capture_size", "cudagraph_mm_encoder",
        "encoder_cudagraph_token_budgets", "encoder_cudagraph_max_vision_items_per_batch",
        "encoder_cudagraph_max_frames_per_batch", "cudagraph_decoder_replay",
        "decoder_replay_cudagraph_capture_sizes", "decoder_replay_trim_threshold", "compile_sizes",
        "compile_ranges_endpoints",
    )),
    ("CompilationConfig", "names the same layers whatever they compute", ("splitting_ops",)),
    ("KernelConfig", "which kernels are compiled before the first request", (
        "enable_cutedsl_warmup", "enable_jit_warmup",
    )),
    ("AuxOutputConfig", "what is returned beside tokens", ("enable_return_routed_experts", "max_bytes")),
)  # fmt: skip

#: Values of options that are listed nowhere above, which do what the default does.
VALUES: dict[str, frozenset[str]] = {
    # They guess from tokens, without a model.
    "SpeculativeConfig.method": frozenset({"ngram", "ngram_gpu", "suffix"}),
    # The same bytes, read at another moment.
    "LoadConfig.safetensors_load_strategy": frozenset({"lazy", "eager", "prefetch"}),
    # vLLM's own, one for each platform, which page_format names.
    "ParallelConfig.worker_cls": frozenset(
        f"vllm.v1.worker.{name}Worker" for name in ("gpu_worker.", "cpu_worker.CPU", "xpu_worker.XPU")
    ),
}

#: Keys of free-form options that say how quickly the same bytes are read.
KEYS: dict[str, frozenset[str]] = {
    "LoadConfig.model_loader_extra_config": frozenset(
        {"enable_multithread_load", "num_threads", "enable_weights_track", "distributed", "concurrency",
         "memory_limit"}
    )
}  # fmt: skip

#: Environment variables that vLLM reads and that don't decide what a layer computes.
_VARIABLES: tuple[tuple[str, str], ...] = (
    (
        "addresses, ports, places, and what a process or a node is called",
        """
        CUDA_HOME CUDA_VISIBLE_DEVICES LD_LIBRARY_PATH LOCAL_RANK MOONCAKE_PREFERRED_SEGMENT
        MOONCAKE_REQUESTER_LOCAL_HOSTNAME S3_ENDPOINT_URL VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN
        VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_CUDART_SO_PATH VLLM_CUDA_COMPATIBILITY_PATH VLLM_DP_MASTER_IP
        VLLM_DP_MASTER_PORT VLLM_DP_RANK VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_EC_SIDE_CHANNEL_HOST
        VLLM_EC_SIDE_CHANNEL_PORT VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_GPU_NIC_PCIE_MAPPING VLLM_HOST_IP
        VLLM_IMAGE_TAG VLLM_LOOPBACK_IP VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST
        VLLM_MEDIA_CACHE VLLM_MODEL_REDIRECT_PATH VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_NCCL_INCLUDE_PATH
        VLLM_NCCL_SO_PATH VLLM_NIC_SELECTION_VARS VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT
        VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_P2P_SIDE_CHANNEL_HOST VLLM_P2P_SIDE_CHANNEL_PORT VLLM_PORT
        VLLM_PROCESS_NAME_PREFIX VLLM_RPC_BASE_PATH VLLM_RUST_FRONTEND_PATH VLLM_XLA_CACHE_PATH
    """,
    ),
    ("credentials", "S3_ACCESS_KEY_ID S3_SECRET_ACCESS_KEY VLLM_API_KEY"),
    (
        "logs, statistics, colours and dumps",
        """
        FORCE_COLOR NO_COLOR VERBOSE VLLM_CONFIGURE_LOGGING VLLM_CUSTOM_SCOPES_FOR_PROFILING
        VLLM_DEBUG_DUMP_PATH VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_DEBUG_MFU_METRICS
        VLLM_DISABLE_LOG_LOGO VLLM_DO_NOT_TRACK VLLM_GC_DEBUG VLLM_LOGGING_COLOR VLLM_LOGGING_CONFIG_PATH
        VLLM_LOGGING_LEVEL VLLM_LOGGING_PREFIX VLLM_LOGGING_STREAM VLLM_LOG_BATCHSIZE_INTERVAL
        VLLM_LOG_MODEL_INSPECTION VLLM_LOG_STATS_INTERVAL VLLM_NO_USAGE_STATS VLLM_NVTX_SCOPES_FOR_PROFILING
        VLLM_PATTERN_MATCH_DEBUG VLLM_REQUEST_BODY_LOG_LEVEL VLLM_RINGBUFFER_WARNING_INTERVAL
        VLLM_TRACE_FUNCTION VLLM_USAGE_SOURCE VLLM_USAGE_STATS_SERVER
    """,
    ),
    (
        "how it was built",
        """
        CMAKE_BUILD_TYPE MAX_JOBS NVCC_THREADS VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL
        VLLM_DOCKER_BUILD_CONTEXT VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX
        VLLM_TARGET_DEVICE VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST
    """,
    ),
    (
        "time limits and bounds of requests",
        """
        VLLM_AUDIO_FETCH_TIMEOUT VLLM_CHAT_TEMPLATE_FUEL VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT
        VLLM_ENGINE_READY_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS VLLM_HTTP_MAX_REQUEST_BODY_SIZE
        VLLM_HTTP_TIMEOUT_KEEP_ALIVE VLLM_IMAGE_FETCH_TIMEOUT VLLM_MAX_AUDIO_CLIP_FILESIZE_MB
        VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_PREPROCESS_WORKERS
        VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_COMPLETION_PROMPTS VLLM_MAX_EMBED_DECODE_BYTES
        VLLM_MAX_IMAGE_PIXELS VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES
        VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_N_SEQUENCES
        VLLM_MAX_STOP_STRINGS VLLM_MEDIA_CACHE_MAX_SIZE_MB VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_CONNECTOR
        VLLM_MEDIA_FETCH_MAX_RETRIES VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MEDIA_URL_ALLOW_REDIRECTS
        VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_MOONCAKE_CONNECTOR_TIMEOUT VLLM_P2P_HANDSHAKE_TIMEOUT_S
        VLLM_P2P_IDLE_TIMEOUT_S VLLM_P2P_MAX_PEERS VLLM_REGEX_COMPILATION_TIMEOUT_S
        VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS VLLM_VIDEO_FETCH_TIMEOUT VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS
        VLLM_XGRAMMAR_CACHE_MB
    """,
    ),
    (
        "how processes are started, and what they say to each other",
        """
        VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_CPU_NUM_OF_RESERVED_CPU VLLM_CPU_OMP_THREADS_BIND
        VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_ELASTIC_EP_SCALE_UP_LAUNCH VLLM_ENABLE_V1_MULTIPROCESSING
        VLLM_KEEP_ALIVE_ON_ENGINE_DEATH VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES VLLM_MQ_MAX_CHUNK_BYTES_MB
        VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_PLUGINS VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY
        VLLM_RAY_DP_PLACEMENT_NODE_IPS VLLM_RAY_EXTRA_ENV_VARS_TO_COPY
        VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_RAY_PER_WORKER_GPUS VLLM_SERVER_DEV_MODE
        VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM
        VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_V1_OUTPUT_PROC_CHUNK_SIZE VLLM_WORKER_MULTIPROC_METHOD
    """,
    ),
    (
        "sizes of memory",
        """
        VLLM_CPU_KVCACHE_SPACE VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS
        VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO
        VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE VLLM_WSL2_ENABLE_PIN_MEMORY
    """,
    ),
    (
        "what was compiled is kept, or not",
        """
        VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_DISABLE_COMPILE_CACHE VLLM_ENABLE_STARTUP_PLAN
        VLLM_TRITON_JIT_WARMUP_NUM_THREADS
    """,
    ),
    (
        "vLLM sets it for itself: another stream for the same kernels, another recording of them",
        """
        VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_USE_BREAKABLE_CUDAGRAPH
    """,
    ),
    (
        "what is asked for, and how it is answered",
        """
        VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT
        VLLM_DISABLE_REQUEST_ID_RANDOMIZATION VLLM_ENABLE_COHERE_API VLLM_ENABLE_RESPONSES_API_STORE
        VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS
        VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS VLLM_SKIP_MODEL_NAME_VALIDATION VLLM_SYSTEM_START_DATE
        VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_USE_FASTOKENS
        VLLM_USE_FLASHINFER_SAMPLER VLLM_USE_RUST_BENCH VLLM_USE_RUST_FRONTEND VLLM_V1_USE_OUTLINES_CACHE
        VLLM_XPU_USE_SAMPLER_KERNEL
    """,
    ),
)
VARIABLES = frozenset(name for _, names in _VARIABLES for name in names.split())

#: How ranks add up what each has computed, which vLLM chooses by their number. With identity.any_tp an
#: operator has said that engines of other numbers of ranks may share.
OF_RANKS = frozenset(
    {
        "ParallelConfig.dcp_comm_backend", "ParallelConfig.dcp_q_replicate",
        "ParallelConfig.disable_custom_all_reduce", "PassConfig.fuse_allreduce_rms",
        "PassConfig.fi_allreduce_fusion_max_size_mb",
    }
)  # fmt: skip

#: Sections without a part in an encoder's output, which one rank makes before the language model's first
#: layer. An engine that only encodes and one that only generates differ in most of it.
NOT_OF_ITEMS = frozenset(
    {
        "AttentionConfig", "AuxOutputConfig", "CacheConfig", "EngramConfig", "DiffusionConfig", "LoRAConfig",
        "MambaConfig", "SchedulerConfig", "SpeculativeConfig",
    }
)  # fmt: skip

OPTIONS = frozenset(f"{owner}.{name}" for owner, _, names in _OPTIONS for name in names)
