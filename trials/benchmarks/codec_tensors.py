"""Tensors for bench_codec: what networks that were trained, if only briefly, leave in a cache.

The exponents of a KV cache are those of the weights' products, so random weights say nothing about a codec.
Without a model hub, two small networks are trained here: a Llama-like transformer over bytes, on the source
files of Python's standard library, and a vision transformer that rebuilds drawn pictures whose
patches are partly hidden. They are tiny and trained for seconds or minutes: what their tensors share with a
large model's is the arithmetic (RMSNorm, RoPE, grouped heads, bf16), not the outliers of a long training.
"""

from __future__ import annotations

import functools
import math
import sysconfig
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD = 256, 4, 4, 2, 64
CONTEXT = 256
SIDE, PATCH = 64, 8


@functools.cache
def corpus() -> tuple[Tensor, Tensor]:
    """Bytes to train on, and bytes of files that are not trained on."""
    folder = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in folder.rglob("*.py") if "site-packages" not in path.parts)
    kept = files[7::8]
    return _joined(path for path in files if path not in kept), _joined(kept)


def _joined(files: Iterable[Path]) -> Tensor:
    return torch.frombuffer(bytearray(b"".join(path.read_bytes() for path in files)), dtype=torch.uint8)


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight)


class Layer(nn.Module):
    """A transformer layer; causal with rotary positions, or neither."""

    def __init__(self, causal: bool, kv_heads: int = KV_HEADS) -> None:
        super().__init__()
        self.causal, self.kv_heads = causal, kv_heads
        self.before, self.between = Norm(WIDTH), Norm(WIDTH)
        self.qkv = nn.Linear(WIDTH, (HEADS + 2 * kv_heads) * HEAD, bias=False)
        self.out = nn.Linear(HEADS * HEAD, WIDTH, bias=False)
        self.gate_up = nn.Linear(WIDTH, 2 * 640, bias=False)
        self.down = nn.Linear(640, WIDTH, bias=False)

    def forward(self, x: Tensor, kept: list[Tensor] | None = None) -> Tensor:
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.before(x)).split(
            [HEADS * HEAD, self.kv_heads * HEAD, self.kv_heads * HEAD], dim=-1
        )
        q, k, v = (part.view(batch, tokens, -1, HEAD).transpose(1, 2) for part in (q, k, v))
        if self.causal:
            q, k = rotate(q), rotate(k)
        if kept is not None:
            kept.append(torch.cat([k, v], dim=-1))  # [batch, heads, tokens, content]
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, -1))
        gate, up = self.gate_up(self.between(x)).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions."""
    half = HEAD // 2
    angle = torch.arange(x.shape[2])[:, None] * 10000.0 ** (-torch.arange(half) / half)
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


class Language(nn.Module):
    """A Llama-like transformer over bytes: 2.8 million weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.layers = nn.ModuleList(Layer(causal=True) for _ in range(LAYERS))
        self.norm = Norm(WIDTH)

    def forward(self, text: Tensor, kept: list[Tensor] | None = None) -> Tensor:
        x = self.embed(text)
        for layer in self.layers:
            x = layer(x, kept)
        return F.linear(self.norm(x), self.embed.weight)

    def loss(self, text: Tensor) -> Tensor:
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())


class Vision(nn.Module):
    """A vision transformer that rebuilds pictures from a half of their patches."""

    def __init__(self) -> None:
        super().__init__()
        pixels = 3 * PATCH * PATCH
        self.embed = nn.Linear(pixels, WIDTH)
        self.positions = nn.Parameter(torch.randn((SIDE // PATCH) ** 2, WIDTH) * 0.02)
        self.hidden = nn.Parameter(torch.zeros(WIDTH))
        self.layers = nn.ModuleList(Layer(causal=False, kv_heads=HEADS) for _ in range(4))
        self.norm = Norm(WIDTH)
        self.rebuild = nn.Sequential(nn.ReLU(), nn.Linear(WIDTH, pixels))

    def forward(self, patches: Tensor, hide: Tensor | None = None) -> Tensor:
        x = self.embed(patches)
        if hide is not None:
            x = torch.where(hide[..., None], self.hidden.to(x.dtype), x)
        x = x + self.positions
        for layer in self.layers:
            x = layer(x)
        return self.norm(x)

    def loss(self, patches: Tensor) -> Tensor:
        hide = torch.rand(patches.shape[:2]) < 0.5
        return F.mse_loss(self.rebuild(self(patches, hide)), patches)


def pictures(count: int) -> Tensor:
    """Drawn pictures in patches [count, patches, pixels]: a gradient, five ellipses and a little noise."""

    def draw(*shape: int) -> Tensor:
        return torch.rand(count, *shape, 1, 1) * 2 - 1

    grid = torch.linspace(-1, 1, SIDE)
    y, x = grid[:, None], grid[None, :]
    image = draw(3) + draw(3) * x + draw(3) * y
    for _ in range(5):
        across, down = ((axis - draw()) / (draw().abs() + 0.1) for axis in (x, y))
        image = torch.where((across**2 + down**2 < 1)[:, None], draw(3), image)
    image = image + 0.02 * torch.randn(image.shape)
    rows = SIDE // PATCH
    patches = image.view(count, 3, rows, PATCH, rows, PATCH).permute(0, 2, 4, 1, 3, 5)
    return patches.reshape(count, rows**2, -1)


@dataclass(frozen=True)
class Training:
    """How far it went."""

    seconds: float
    steps: int
    #: Mean over the last 20 steps.
    loss: float


def train(model: Any, batch: Callable[[], Tensor], seconds: float, rate: float = 2e-3) -> Training:
    """Train for that long: AdamW, the rate under a cosine."""
    for layer in model.layers:
        for last in (layer.out, layer.down):
            nn.init.normal_(last.weight, std=0.02 / math.sqrt(2 * len(model.layers)))
    optimiser = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.1, betas=(0.9, 0.95))
    began = time.monotonic()
    losses: list[float] = []
    while (done := (time.monotonic() - began) / seconds) < 1:
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, len(losses) / 50) * (0.525 + 0.475 * math.cos(math.pi * done))
        with torch.autocast("cpu", torch.bfloat16):
            loss = model.loss(batch())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
    return Training(seconds, len(losses), sum(losses[-20:]) / max(1, len(losses[-20:])))


def texts(source: Tensor, count: int, tokens: int = CONTEXT) -> Tensor:
    """Random excerpts."""
    starts = torch.randint(0, len(source) - tokens, (count,))
    return torch.stack([source[start : start + tokens] for start in starts]).long()


def trained_language(seconds: float) -> tuple[Language, Training]:
    torch.manual_seed(0)
    model, source = Language(), corpus()[0]
    nn.init.normal_(model.embed.weight, std=0.02)
    return model, train(model, lambda: texts(source, 8, CONTEXT + 1), seconds)


def trained_vision(seconds: float) -> tuple[Vision, Training]:
    torch.manual_seed(0)
    model = Vision()
    return model, train(model, lambda: pictures(16), seconds)


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    # CPUs take seconds for a batch in fp16; rounding to it at the end leaves the same exponents.
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


@torch.no_grad()
def kv_slots(model: Language, dtype: torch.dtype, count: int, nbytes: int) -> list[Tensor]:
    """Slots [layer, head, token, content] of just under `nbytes`, of texts that were not trained on.

    The first layer is left out. Its values depend on one byte of text and nothing else: 256 different rows,
    which lz4 finds. In a large model that is one layer of dozens with a vocabulary of 100,000.
    """
    model = model.to(_computed_in(dtype))
    tokens = nbytes // ((LAYERS - 1) * KV_HEADS * 2 * HEAD * dtype.itemsize)
    slots = []
    for i in range(count):
        torch.manual_seed(1 + i)
        kept: list[Tensor] = []
        model(texts(corpus()[1], -(-tokens // CONTEXT)), kept)
        whole = torch.stack(kept[1:]).permute(0, 2, 1, 3, 4).flatten(2, 3)
        slots.append(whole[:, :, :tokens].to(dtype).contiguous())
    model.float()
    return slots


@torch.no_grad()
def encoder_slots(model: Vision, dtype: torch.dtype, count: int, nbytes: int) -> list[Tensor]:
    """Slots [token, width]: outputs for pictures that were not trained on, one after the other."""
    compute = _computed_in(dtype)
    model = model.to(compute)
    per_picture = (SIDE // PATCH) ** 2 * WIDTH * dtype.itemsize
    slots = []
    for i in range(count):
        torch.manual_seed(1 + i)
        outputs = model(pictures(nbytes // per_picture).to(compute))
        slots.append(outputs.flatten(0, 1).to(dtype))
    model.float()
    return slots
