"""Ways in which an engine computes something else than its configuration says."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch


def _rounded(name: str, weight: torch.Tensor) -> torch.Tensor:
    """A broken dtype: weights that went through bfloat16."""
    return weight.bfloat16().to(weight.dtype)


def _quantised(name: str, weight: torch.Tensor) -> torch.Tensor:
    """Another quantisation: eight bits a weight."""
    step = weight.abs().max().clamp_min(1e-12) / 127
    return (weight / step).round() * step


def _dead_lane(name: str, weight: torch.Tensor) -> torch.Tensor:
    """A broken accelerator: one row of the first layer's products is zero."""
    changed = weight.clone()
    if name.endswith("layers.0.mlp.down_proj.weight"):
        changed[3] = 0
    return changed


WEIGHTS: dict[str, Callable[[str, torch.Tensor], torch.Tensor]] = {
    "rounded": _rounded,
    "quantised": _quantised,
    "dead_lane": _dead_lane,
}


def folder_of(model: Path, kind: str, made: Path, name: str = "") -> Path:
    """A copy of a model's folder, of the same name unless another is given, in the folder `made`: its weights
    are what such an engine would compute with."""
    from safetensors.torch import load_file, save_file

    made = made / (name or model.name)
    shutil.copytree(model, made)
    change = WEIGHTS.get(kind, lambda name, one: one)
    for path in made.glob("*.safetensors"):
        weights = {name: change(name, one).contiguous() for name, one in load_file(path).items()}
        save_file(weights, path, metadata={"format": "pt"})
    return made


def other_attention(model: Any) -> bool:
    """Another attention kernel, which scales otherwise. For `LLM.apply_model`."""
    kernels = [one.impl for one in model.modules() if hasattr(getattr(one, "impl", None), "scale")]
    for kernel in kernels:
        kernel.scale *= 1.05
    assert kernels
    return True
