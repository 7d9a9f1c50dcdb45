"""Tiny random models, built locally: the demo, the tests and the benchmarks run real engines on them.

    python -m tools.models DIR [KIND ...] [--seed N]

Nothing is downloaded. A model is a folder `DIR/<kind>-<seed>` with a config, safetensors weights and, for
the image models, a tokenizer of made-up words (`w0`, `w1`, ...) and an image processor. The same kind and
seed give the same weights; another seed gives another model of the same shape, which is what a test of
"different weights must never share a cache" needs.

The weights are drawn far wider (`initializer_range`) than anyone would train with: at the usual 0.02 a
random model repeats one token whatever the prompt, and then "same tokens" proves nothing. All of it is
meant for float32; in bfloat16 the margins between the best two tokens drown in rounding.

A folder appears by a rename, complete or not at all, and names the recipe it was built by, so an edit of
this file or of `tools.hybrids` rebuilds it.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tools import hybrids

KINDS = ("text", "mqa", "volume", "mla", "image", "deepstack", *hybrids.BUILDERS)
_RECIPE_FILE = "recipe.txt"

# Ids below `FIRST_WORD` are reserved for special tokens in every model, so a prompt of made-up ids taken
# from `range(FIRST_WORD, VOCAB)` is valid everywhere.
VOCAB = 1024
FIRST_WORD = 16
IMAGE_TOKEN = {"image": "<image>", "deepstack": "<|vision_start|> <|image_pad|> <|vision_end|>"}
"""What stands in a text prompt for one image."""


def build(root: Path, kind: str, seed: int = 0) -> Path:
    """The folder of the model `kind`, `seed` under `root`; built unless it is there and current."""
    if kind not in KINDS:
        raise ValueError(f"unknown model {kind!r}; known: {', '.join(KINDS)}")
    target = root / f"{kind}-{seed}"
    sources = [Path(__file__), Path(hybrids.__file__)]
    recipe = hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()
    if _recipe_of(target) == recipe:
        return target
    os.environ["HF_HUB_OFFLINE"] = "1"
    root.mkdir(parents=True, exist_ok=True)
    with (root / ".lock").open("w") as lock:
        # Another process may be building it: what it replaces might be in use by then.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _recipe_of(target) != recipe:
            _replace(root, target, kind, seed, recipe)
    return target


def _replace(root: Path, target: Path, kind: str, seed: int, recipe: str) -> None:
    work = Path(tempfile.mkdtemp(prefix=f".{kind}-{seed}.", dir=root))
    try:
        _seed(seed)
        _BUILDERS[kind](work)
        (work / _RECIPE_FILE).write_text(recipe)
        work.chmod(0o755)
        shutil.rmtree(target, ignore_errors=True)
        work.rename(target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _recipe_of(folder: Path) -> str | None:
    try:
        return (folder / _RECIPE_FILE).read_text()
    except OSError:
        return None


def _seed(seed: int) -> None:
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)


def _text(folder: Path) -> None:
    """A Llama with grouped-query attention: 4 KiB of float32 KV per token."""
    from transformers import LlamaForCausalLM

    LlamaForCausalLM(_llama_config()).save_pretrained(folder)


def _mqa(folder: Path) -> None:
    """The same with one head of keys and values, which every rank of two keeps a copy of."""
    from transformers import LlamaForCausalLM

    LlamaForCausalLM(_llama_config(num_key_value_heads=1)).save_pretrained(folder)


def _volume(folder: Path) -> None:
    """A small Llama with the KV cache of one of 8 billion parameters: 128 KiB per token in 16 bits."""
    from transformers import LlamaForCausalLM

    config = _llama_config(
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=32,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=128,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


_SHARED: dict[str, Any] = {
    "vocab_size": VOCAB,
    "max_position_embeddings": 16384,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}


def _llama_config(**changes: Any) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        **{
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            **_SHARED,
            **changes,
        }
    )


def _mla(folder: Path) -> None:
    """A DeepSeek-V2 without experts: multi-head latent attention, one latent per token and layer."""
    from transformers import DeepseekV2Config, DeepseekV2ForCausalLM

    config = DeepseekV2Config(
        hidden_size=256,
        intermediate_size=512,
        moe_intermediate_size=128,
        num_hidden_layers=4,
        first_k_dense_replace=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        kv_lora_rank=512,
        q_lora_rank=None,
        qk_nope_head_dim=64,
        qk_rope_head_dim=64,
        v_head_dim=64,
        n_routed_experts=4,
        n_shared_experts=1,
        num_experts_per_tok=2,
        **_SHARED,
    )
    DeepseekV2ForCausalLM(config).save_pretrained(folder)


def _word_tokenizer(specials: Sequence[str]) -> Any:
    """One id per word: the specials, filler up to FIRST_WORD, then w16, w17, ... so that `wN` is id N."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<s>", "</s>", "<unk>", *specials]
    names += [f"<unused{i}>" for i in range(len(names), FIRST_WORD)]
    names += [f"w{i}" for i in range(FIRST_WORD, VOCAB)]
    tokenizer = Tokenizer(WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=list(specials),
    )


def _image(folder: Path) -> None:
    """A LLaVA-1.5: a CLIP tower over 56-pixel images in patches of 14, so 16 tokens per image."""
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    tokenizer = _word_tokenizer(["<image>"])
    vision = CLIPVisionConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=56,
        patch_size=14,
        projection_dim=64,
        initializer_range=0.2,
        # CLIP scales every layer's init by this factor on top of the range.
        initializer_factor=4.0,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=_llama_config(),
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        vision_feature_layer=-2,
        vision_feature_select_strategy="default",
        image_seq_length=16,
        initializer_range=0.2,
        tie_word_embeddings=False,
        dtype="float32",
    )
    LlavaForConditionalGeneration(config).save_pretrained(folder)
    # transformers 5 saves the tower one level flatter than the checkpoints that vLLM's loader was
    # written for.
    _rename_weights(folder, lambda name: name.replace("vision_tower.", "vision_tower.vision_model.", 1))
    side = {"height": 56, "width": 56}
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=side),
        tokenizer=tokenizer,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    ).save_pretrained(folder)


def _deepstack(folder: Path) -> None:
    """A Qwen3-VL: two DeepStack levels, so an image's embeddings are three times the hidden size wide."""
    from transformers import (
        Qwen2VLImageProcessorPil,
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        Qwen3VLProcessor,
        Qwen3VLVideoProcessor,
    )

    tokenizer = _word_tokenizer(["<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>"])
    ids = tokenizer.convert_tokens_to_ids
    config = Qwen3VLConfig(
        text_config={
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "vocab_size": VOCAB,
            "max_position_embeddings": 16384,
            "initializer_range": 0.2,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [16, 8, 8],
                "mrope_interleaved": True,
            },
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "dtype": "float32",
        },
        vision_config={
            "depth": 3,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 256,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
            "initializer_range": 0.2,
        },
        image_token_id=ids("<|image_pad|>"),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids("<|vision_start|>"),
        vision_end_token_id=ids("<|vision_end|>"),
        tie_word_embeddings=False,
        dtype="float32",
    )
    Qwen3VLForConditionalGeneration(config).save_pretrained(folder)
    pixels = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    size = {"shortest_edge": 56 * 56, "longest_edge": 224 * 224}
    Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessorPil(size=size, **pixels),
        tokenizer=tokenizer,
        video_processor=Qwen3VLVideoProcessor(size=size, **pixels),
        chat_template="",
    ).save_pretrained(folder)


def _rename_weights(folder: Path, rename: Callable[[str], str]) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
        tensors = {rename(name): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    save_file(tensors, path, metadata)


_BUILDERS: dict[str, Callable[[Path], None]] = {
    "text": _text,
    "volume": _volume,
    "mqa": _mqa,
    "mla": _mla,
    "image": _image,
    "deepstack": _deepstack,
    **{kind: partial(make, shared=_SHARED) for kind, make in hybrids.BUILDERS.items()},
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.models", description="Build tiny random models.")
    parser.add_argument("root", type=Path, metavar="DIR")
    parser.add_argument("kinds", nargs="*", metavar="kind", help=f"any of: {', '.join(KINDS)} (default: all)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    unknown = [kind for kind in options.kinds if kind not in KINDS]
    if unknown:
        parser.error(f"unknown kind {unknown[0]!r}; known: {', '.join(KINDS)}")
    for kind in options.kinds or KINDS:
        print(build(options.root, kind, options.seed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
