"""Tiny random text models whose layers keep different kinds of state: builders for `tools.models`.

Each takes the folder to write and the settings that all models share. Layers are few and windows short, so
that a prompt of a few hundred tokens crosses every boundary that matters; blocks are of 32 tokens unless
said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

#: Tokens that a layer with a sliding window sees.
WINDOW = 64
#: Tokens of a chunk of chunked local attention.
CHUNK = 128

_SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def window(folder: Path, shared: dict[str, Any]) -> None:
    """A Gemma 3: two groups of layers with a sliding window and one with full attention, pages alike."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    Gemma3ForCausalLM(
        Gemma3TextConfig(
            **shared,
            **_SIZES | {"num_hidden_layers": 6},
            head_dim=64,
            query_pre_attn_scalar=64,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        )
    ).save_pretrained(folder)


def sizes(folder: Path, shared: dict[str, Any]) -> None:
    """A Gemma 4, whose full attention has wider heads: vLLM evens the pages out by giving its blocks 32
    tokens and those of the layers with a sliding window 64."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    Gemma4ForCausalLM(
        Gemma4TextConfig(
            **shared,
            **_SIZES | {"num_hidden_layers": 6},
            head_dim=64,
            global_head_dim=128,
            sliding_window=WINDOW,
            layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
            hidden_size_per_layer_input=0,
            vocab_size_per_layer_input=shared["vocab_size"],
            num_kv_shared_layers=0,
        )
    ).save_pretrained(folder)


def local(folder: Path, shared: dict[str, Any]) -> None:
    """A Mistral: a sliding window in every layer, one group. What lies more than four windows back has no
    influence at all."""
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(**shared, **_SIZES, head_dim=64, sliding_window=WINDOW)
    MistralForCausalLM(config).save_pretrained(folder)


def chunked(folder: Path, shared: dict[str, Any]) -> None:
    """A Llama 4 without experts: three layers of chunked local attention, each a group, and one of full."""
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    Llama4ForCausalLM(
        Llama4TextConfig(
            **shared,
            **_SIZES,
            head_dim=64,
            intermediate_size_mlp=512,
            num_local_experts=4,
            num_experts_per_tok=1,
            moe_layers=[],
            interleave_moe_layer_step=0,
            attention_chunk_size=CHUNK,
            layer_types=["chunked_attention"] * 3 + ["full_attention"],
            no_rope_layers=[1, 1, 1, 0],
        )
    ).save_pretrained(folder)


def conv(folder: Path, shared: dict[str, Any]) -> None:
    """An LFM2: three layers of short convolution, each a group whose state is 2 KiB of a 32 KiB page, and
    one of full attention."""
    from transformers import Lfm2Config, Lfm2ForCausalLM

    Lfm2ForCausalLM(
        Lfm2Config(
            **shared,
            **_SIZES,
            layer_types=["conv", "conv", "full_attention", "conv"],
            conv_L_cache=3,
            block_auto_adjust_ff_dim=False,
            # Read by vLLM, left out by transformers.
            conv_dim=256,
            conv_dim_out=256,
            block_dim=256,
            block_ff_dim=512,
        )
    ).save_pretrained(folder)


def mamba(folder: Path, shared: dict[str, Any]) -> None:
    """A Granite 4 hybrid without experts: Mamba2 and full attention by turns. A state is 136 KiB, so vLLM
    makes the blocks of both groups 160 tokens long."""
    from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

    GraniteMoeHybridForCausalLM(
        GraniteMoeHybridConfig(
            **shared,
            **_SIZES,
            layer_types=["mamba", "attention"] * 2,
            mamba_n_heads=8,
            mamba_d_head=64,
            mamba_d_state=64,
            mamba_expand=2,
            mamba_n_groups=1,
            mamba_chunk_size=64,
            num_local_experts=0,
            num_experts_per_tok=0,
            shared_intermediate_size=512,
        )
    ).save_pretrained(folder)


BUILDERS: dict[str, Callable[[Path, dict[str, Any]], None]] = {
    "window": window,
    "sizes": sizes,
    "local": local,
    "chunked": chunked,
    "conv": conv,
    "mamba": mamba,
}
