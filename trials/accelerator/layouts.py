"""KV caches as vLLM lays them out: its own specs of layers, grouped and placed by its own code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

BLOCK = 8


@dataclass(frozen=True)
class Layout:
    """One model's layers and how their cache is laid out."""

    specs: Mapping[str, KVCacheSpec]
    #: The order of layers, blocks, heads, tokens ("N") and content in memory.
    order: str = "LBNHC"
    #: Number of tokens of a kernel's block, where it is less than a block's.
    kernel_tokens: int | None = None
    mamba_mode: str = "none"
    #: Number of blocks in the pool.
    blocks: int = 40
    #: Bytes of scales, of a position in a head, which follow all values of a kernel's block; 0: none.
    scales: int = 0
    #: The layers of a draft model.
    drafts: tuple[str, ...] = ()


def _layers(*specs: KVCacheSpec) -> dict[str, KVCacheSpec]:
    return {f"model.layers.{i}.attn": spec for i, spec in enumerate(specs)}


def _attention(**changes: Any) -> dict[str, Any]:
    return {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 4, "dtype": torch.bfloat16, **changes}


def _full(**changes: Any) -> KVCacheSpec:
    return FullAttentionSpec(**_attention(**changes))


def _window(tokens: int = 12, **changes: Any) -> KVCacheSpec:
    return SlidingWindowSpec(**_attention(sliding_window=tokens, **changes))


def _chunk(tokens: int = 16) -> KVCacheSpec:
    return ChunkedLocalAttentionSpec(**_attention(attention_chunk_size=tokens))


def _mla(**changes: Any) -> KVCacheSpec:
    return MLAAttentionSpec(
        **_attention(**{"num_kv_heads": 1, "head_size": 18, "max_tp_shards": 1, **changes})
    )


def _mamba(mode: str = "align", size: int = 40, **changes: Any) -> KVCacheSpec:
    given = {
        "block_size": BLOCK,
        "shapes": ((3, 4), (2, size // 2)),
        "dtypes": (torch.bfloat16, torch.float32),
    }
    return MambaSpec(**given | {"mamba_cache_mode": mode, "page_size_padded": 256} | changes)


def packed(cells: np.ndarray, scales: int) -> np.ndarray:
    """[blocks, heads, positions, content] as a kernel packs them: all values of a block, then all scales."""
    parts = (cells[..., : cells.shape[-1] - scales], cells[..., cells.shape[-1] - scales :])
    made: np.ndarray = np.concatenate([one.reshape(len(cells), -1) for one in parts], axis=1)
    return made


_GQA = _layers(_full(), _full(), _full())
#: Two windows for each full layer, as Gemma has more of them than of full ones.
_GEMMA = _layers(_window(), _window(), _full(), _window(), _window(), _full())
_GDN = _layers(_mamba(), _mamba(), _full())

LAYOUTS: dict[str, Layout] = {
    **{f"gqa {order}": Layout(_GQA, order) for order in
       ("LBNHC", "LBHNC", "BLHNC", "BLNHC", "BHLNC", "LHBNC")},
    "gqa kernel blocks": Layout(_layers(*[_full(block_size=16)] * 2), kernel_tokens=8, blocks=22),
    "fp8": Layout(_layers(*[_full(dtype=torch.uint8)] * 3)),
    "packed": Layout(
        _layers(*[_full(dtype=torch.uint8, num_head_slots=2, state_content_bytes=18)] * 2), "LBHNC", scales=2
    ),
    "gqa and a draft": Layout(_GQA, drafts=("model.layers.2.attn",)),
    "mla": Layout(_layers(_mla(), _mla())),
    "mla indexer": Layout(_layers(_mla(), _mla(head_size=12, dtype=torch.uint8), _mla()), "BLNHC"),
    "windows": Layout(_layers(_window(), _window())),
    "windows and full": Layout(_GEMMA, blocks=80),
    "windows and full BLHNC": Layout(_GEMMA, "BLHNC", blocks=80),
    "chunks and full": Layout(_layers(_chunk(), _chunk(), _full()), blocks=70),
    "mamba all": Layout(_layers(_mamba("all"), _mamba("all")), mamba_mode="all"),
    "mamba align": Layout(_layers(_mamba(), _mamba()), mamba_mode="align", blocks=14),
    "gdn and full": Layout(_GDN, mamba_mode="align", blocks=60),
    "gdn and full BLHNC": Layout(_GDN, "BLHNC", mamba_mode="align", blocks=60),
}  # fmt: skip
