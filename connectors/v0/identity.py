"""The facts about a v0 engine, from the configuration of its factory, and the namespaces of its stages.

Each pipeline stage has a namespace of its own, because each is served or computes by itself: what a stage
hands to the next is stored whole, so the next does not depend on which of the two it was. A stage of one
engine serves a stage of another that has the same layers, heads per rank and output.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from connectors.engine.identity import model_fields as fields_of_model
from connectors.v0.pages import Pages, Rows
from connectors.v0.planning import HASH_ALGO, hash_root
from connectors.weights import UNNAMED
from kvstore.errors import ConfigError
from schemas.namespace import GroupSpec, Namespace, Parallel
from schemas.settings import Settings


@dataclass(frozen=True, slots=True)
class Engine:
    """One worker's place in its engine."""

    block_tokens: int
    mla: bool
    #: Rows that the last stage hands on.
    hidden: Rows
    dtype: Any
    tp: int
    tp_rank: int
    pp: int
    pp_rank: int

    @property
    def is_last_stage(self) -> bool:
        """Returns whether this worker's hidden states are the ones that the sampler reads."""
        return self.pp_rank == self.pp - 1

    @property
    def parts(self) -> int:
        """Returns how many ranks hold different bytes of a stage; MLA's latent KV is the same on all."""
        return 1 if self.mla else self.tp

    @property
    def part(self) -> int:
        """Returns which of those parts is this rank's."""
        return 0 if self.mla else self.tp_rank


def engine_of(rank: int, config: Any) -> Engine:
    """Returns the facts from a VllmConfig, for the worker of this rank in the world.

    Tensor-parallel ranks are innermost in the world.
    """
    model, parallel = config.model_config, config.parallel_config
    tp, pp = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    text = getattr(model, "hf_text_config", None) or model.hf_config
    return Engine(
        block_tokens=config.cache_config.block_size,
        mla=bool(getattr(model, "use_mla", getattr(text, "kv_lora_rank", None) is not None)),
        hidden=Rows.hidden(model.get_hidden_size(), model.dtype),
        dtype=model.dtype,
        tp=tp,
        tp_rank=rank % tp,
        pp=pp,
        pp_rank=rank // tp % pp,
    )


def refuse_unsupported(config: Any, settings: Settings) -> None:
    """Raises ConfigError for an engine or settings that this connector can't serve."""
    if settings.kv.observe:
        raise ConfigError(
            "kvstore: kv.observe doesn't work in v0 connectors, which would store and load; leave it off"
        )
    if getattr(config, "speculative_config", None) is not None:
        raise ConfigError(
            "kvstore: speculative decoding in a v0 engine reads hidden states of every prompt token, and "
            "only the last is stored; not supported"
        )
    if getattr(config.model_config, "is_encoder_decoder", False):
        raise ConfigError(
            "kvstore: an encoder-decoder model's KV depends on more than its decoder's tokens; not supported"
        )
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise ConfigError(
            "kvstore: with --calculate-kv-scales each engine scales its KV by its first tokens, so it "
            "can't read another engine's; not supported"
        )
    if settings.admission.second_use:
        raise ConfigError(
            "kvstore: admission.second_use needs a scheduler's half, which v0 connectors don't have; "
            "leave it off"
        )


def model_fields(config: Any, settings: Settings) -> dict[str, Any]:
    """Returns the namespace's fields that name the model. It reads samples of the weights: under a second.

    Raises ConfigError if the weights have no name: each rank would have to find the same one."""
    fields = fields_of_model(config, settings, kind="kv")
    if fields["weights"].startswith(UNNAMED):
        raise ConfigError(
            "kvstore: a v0 connector needs weights with a name (the warning before this says why they have "
            "none); set identity.weights to a label that changes with them"
        )
    return fields


def is_unchanged(config: Any, settings: Settings, fields: dict[str, Any]) -> bool:
    """Returns whether the model's files still say what they said when `model_fields` returned `fields`."""
    try:
        return model_fields(config, settings) == fields
    except ConfigError:
        return False


def namespace_of(
    engine: Engine,
    settings: Settings,
    fields: dict[str, Any],
    kv_dtype: str,
    pages: Pages,
    rows: Rows,
    layers: range,
) -> Namespace:
    """Returns the namespace of one stage. `fields` is what `model_fields` returned."""
    names = f"v0 layers {layers.start} to {layers.stop}"
    group = GroupSpec(
        kind="mla" if engine.mla else "full",
        block_tokens=engine.block_tokens,
        dtype=pages.dtype_name,
        shape=(pages.layers, pages.heads * engine.parts, engine.block_tokens, pages.content),
        layers=hashlib.sha256(names.encode()).hexdigest()[:16],
        shards=engine.parts,
    )
    return Namespace(
        kind="kv",
        **fields,
        block_tokens=engine.block_tokens,
        hash_algo=HASH_ALGO,
        hash_root=hash_root(),
        kv_dtype=kv_dtype,
        page_order="LHNC",
        page_format=f"v0/{pages.device.type}/{rows.describe()}",
        groups=(group,),
        parallel=Parallel(tp=engine.tp),
        codec=settings.segment.codec,
        epoch=settings.identity.epoch,
    )
