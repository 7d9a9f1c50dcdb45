"""Pools of pages to copy: as vLLM lays them out, and odd ones that nobody lays out."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ORDERS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "BHLNC", "LHBNC")


class Operations(TorchDispatchMode):
    """Counts what torch runs, but for views, which move nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(str(func))
        return func(*args, **kwargs or {})


@dataclass
class Pool:
    """Layers by table, each [blocks * ratio, heads, tokens / ratio, content]."""

    tables: dict[int, list[torch.Tensor]]
    blocks: int

    @property
    def layers(self) -> list[torch.Tensor]:
        return [layer for layers in self.tables.values() for layer in layers]

    def fill(self, seed: int) -> None:
        torch.manual_seed(seed)
        for storage in {layer.untyped_storage().data_ptr(): layer for layer in self.layers}.values():
            raw = torch.empty(0, dtype=torch.uint8).set_(storage.untyped_storage())
            raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8))

    def bytes(self) -> list[bytes]:
        """All that the layers' memory holds, what is between their pages too."""
        whole = {layer.untyped_storage().data_ptr(): layer.untyped_storage() for layer in self.layers}
        raw = [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in whole.values()]
        return [one.numpy().tobytes() for one in raw]

    def slot(self, ids: dict[int, int]) -> bytes:
        """A slot's bytes, page by page and without the code under test."""
        return b"".join(self._page(layer, ids[t]) for t, layers in self.tables.items() for layer in layers)

    def _page(self, layer: torch.Tensor, block: int) -> bytes:
        ratio = layer.shape[0] // self.blocks
        parts = layer[block * ratio : (block + 1) * ratio]
        tokens = torch.cat(list(parts), dim=1).contiguous()
        return tokens.view(torch.uint8).numpy().tobytes()


def strided(
    order: str,
    sizes: dict[str, int],
    dtype: torch.dtype,
    *,
    ratio: int = 1,
    gap: int = 0,
    start: int = 0,
) -> list[torch.Tensor]:
    """Layers in one storage that begin `start` elements into it; `gap` elements follow each page where
    layers or blocks are outermost, or each of the outermost dimension."""
    sizes = sizes | {"B": sizes["B"] * ratio, "N": sizes["N"] // ratio}
    strides, step = {}, 1
    for place, name in reversed(list(enumerate(order))):
        if place == 1 or (place == 0 and set(order[:2]) != {"L", "B"}):
            step += gap
        strides[name], step = step, step * sizes[name]
    raw = torch.zeros(start + step, dtype=dtype)
    shape, stride = [sizes[name] for name in "BHNC"], [strides[name] for name in "BHNC"]
    return [raw.as_strided(shape, stride, start + i * strides["L"]) for i in range(sizes["L"])]


def odd(seed: int, *, separate: bool = False) -> Pool:
    """Pages of any size, at any place: several tables or one, in one storage or in one for each layer."""
    chance = random.Random(seed)
    dtype = chance.choice([torch.uint8, torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.int64])
    ratio = chance.choice([1, 1, 2, 3])
    sizes = {
        "B": chance.randrange(6, 12),
        "H": chance.choice([1, 2, 3]),
        "N": ratio * chance.randrange(1, 5),
        "C": chance.choice([1, 3, 4, 6, 8, 16]),
        "L": chance.randrange(1, 6),
    }
    order = chance.choice(ORDERS)
    gap = chance.choice([0, 0, 1, 4, 8]) if ratio == 1 else 0
    start = chance.choice([0, 0, 1, 8])
    if ratio > 1 and order[0] == "B":
        order = "LBNHC"
    if separate:
        one = sizes | {"L": 1}
        layers = [
            layer
            for _ in range(sizes["L"])
            for layer in strided(order, one, dtype, ratio=ratio, gap=gap, start=start)
        ]
    else:
        layers = strided(order, sizes, dtype, ratio=ratio, gap=gap, start=start)
    cut = chance.randrange(1, len(layers) + 1)
    tables = {3: layers[:cut], 7: layers[cut:]} if cut < len(layers) else {5: layers}
    if not separate and chance.random() < 0.3:
        # As vLLM's groups of a hybrid: two tables over the same memory, whose blocks are never the same.
        tables = {1: layers, 2: list(reversed(layers))}
    return Pool(tables, sizes["B"])


def ids(pool: Pool, seed: int, count: int) -> dict[int, list[int]]:
    """Different blocks for all tables."""
    chance = random.Random(seed)
    drawn = chance.sample(range(pool.blocks), count * len(pool.tables))
    return {table: drawn[i * count : (i + 1) * count] for i, table in enumerate(pool.tables)}


def each(blocks: dict[int, list[int]]) -> Sequence[dict[int, int]]:
    """The blocks of one slot after the other."""
    return [
        {table: chosen[i] for table, chosen in blocks.items()}
        for i in range(len(next(iter(blocks.values()))))
    ]
