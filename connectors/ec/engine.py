"""The facts about its engine that the EC connector needs, from vLLM's configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from connectors.engine.media import Media, media_of
from connectors.engine.tensors import SAFETENSORS_DTYPES
from kvstore.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ECEngine:
    """An engine's use of encoder outputs, and their dtype and widths in it."""

    media: Media
    #: safetensors' name of the encoder outputs' dtype.
    dtype: str
    #: The language model's width; that of an encoder output is a multiple of it.
    hidden: int
    #: Returns the encoder outputs' widths by modality, as far as vLLM knows them by now.
    widths: Callable[[], Mapping[str, int]]
    #: Whether the engine loads encoder outputs.
    consumer: bool
    #: Whether the engine encodes items and saves the outputs.
    producer: bool
    #: Whether adapters may change the encoder's weights.
    tower_lora: bool


def engine_of(vllm_config: Any, *, consumer: bool, producer: bool) -> ECEngine:
    """Returns the facts from a VllmConfig."""
    model, lora = vllm_config.model_config, vllm_config.lora_config
    media = media_of(model)
    hidden = model.get_inputs_embeds_size()
    bare = dict.fromkeys(media.without_encoder, hidden)
    return ECEngine(
        media,
        SAFETENSORS_DTYPES[model.dtype],
        hidden,
        lambda: bare | vllm_config.ec_transfer_config.mm_encoder_output_widths,
        consumer=consumer,
        producer=producer,
        tower_lora=bool(lora is not None and getattr(lora, "enable_tower_connector_lora", False)),
    )


def refuse_unsupported(vllm_config: Any, *, consumer: bool) -> None:
    """Raises ConfigError for an engine that this connector can't serve."""
    if vllm_config.kv_transfer_config is not None and not consumer:
        raise ConfigError(
            "kvstore: an ec_producer runs no language model, so it can't have a KV connector too"
        )
    if vllm_config.model_config.is_encoder_decoder:
        raise ConfigError(
            "kvstore: vLLM keeps the encoder outputs of encoder-decoder models out of its encoder cache, so "
            "an EC connector could never hand one over; start without it"
        )
    parallel = vllm_config.parallel_config
    nodes = getattr(parallel, "nnodes_within_dp", 1)
    if parallel.world_size > 1 and (nodes > 1 or parallel.distributed_executor_backend == "ray"):
        raise ConfigError(
            "kvstore: the ranks of an engine load encoder outputs from a folder of the scheduler's node, so "
            "all must run there: --distributed-executor-backend mp and one node"
        )
