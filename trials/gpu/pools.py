"""Pools of pages on the device, and beside each the same on the host, by which copies are judged."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from connectors.engine.paging.pages import BITS
from tests.connectors.engine.paging.pools import ORDERS, Pool, odd, strided
from trials.gpu.machine import Machine

#: vLLM's own layouts, of which tests/trials/test_gpu.py keeps this copy.
VLLM_LAYOUTS = Path(__file__).parent / "layouts.json"
#: Blocks of a pool: for copies of 100 blocks to others, in two tables.
BLOCKS = 408
_SIZES = {"B": BLOCKS, "H": 2, "N": 16, "C": 32, "L": 3}
_STATES = {"B": BLOCKS, "H": 1, "N": 1, "C": 1234, "L": 3}
_MLA = {"B": BLOCKS, "H": 1, "N": 16, "C": 576, "L": 2}


@dataclass
class Twin:
    """A pool on the device, and on the host what it must hold."""

    host: Pool
    device: Pool
    #: The device's memory, whole: uint8 [bytes], one for each storage of the host's.
    memory: list[Any]

    def refill(self, seed: int) -> None:
        """Give the host's pool other bytes, and the device's the same."""
        self.host.fill(seed)
        for there, raw in zip(self.memory, _storages(self.host), strict=True):
            there.copy_(raw)

    def differs(self, machine: Machine) -> str:
        """Returns where the two differ, in all that there is; "" if nowhere."""
        for number, (there, raw) in enumerate(zip(self.memory, _storages(self.host), strict=True)):
            found = (machine.down(there) != raw).nonzero()
            if len(found):
                return f"memory {number}: {len(found)} of {raw.numel()} bytes, the first at {int(found[0])}"
        return ""


def placed(pool: Pool, machine: Machine) -> Twin:
    """Returns a pool of the host with a copy of it on the device: the same strides in the same storages."""
    memory: dict[int, Any] = {}
    for layer, raw in zip(_firsts(pool), _storages(pool), strict=True):
        memory[layer.untyped_storage().data_ptr()] = machine.adopt(raw)

    def there(layer: torch.Tensor) -> Any:
        whole, size = memory[layer.untyped_storage().data_ptr()], layer.element_size()
        typed = whole[: whole.shape[0] // size * size].view(layer.dtype)
        return typed.as_strided(layer.shape, layer.stride(), layer.storage_offset())

    tables = {table: [there(layer) for layer in layers] for table, layers in pool.tables.items()}
    return Twin(pool, Pool(tables, pool.blocks), list(memory.values()))


def _firsts(pool: Pool) -> list[torch.Tensor]:
    return list({layer.untyped_storage().data_ptr(): layer for layer in pool.layers}.values())


def _storages(pool: Pool) -> list[torch.Tensor]:
    return [torch.empty(0, dtype=torch.uint8).set_(one.untyped_storage()) for one in _firsts(pool)]


def put(pool: Pool, ids: dict[int, int], slot: bytes) -> None:
    """Write a slot's bytes to its pages on the host, page by page and without the code under test."""
    raw, at = torch.frombuffer(bytearray(slot), dtype=torch.uint8), 0
    for table, layers in pool.tables.items():
        for layer in layers:
            # Bits, as a copy of numbers may change those that are none.
            bits = layer.view(BITS[layer.element_size()])
            ratio = layer.shape[0] // pool.blocks
            heads, tokens, content = layer.shape[1:]
            size = ratio * heads * tokens * content * layer.element_size()
            page = raw[at : at + size].clone().view(bits.dtype).view(heads, ratio, tokens, content)
            bits[ids[table] * ratio : (ids[table] + 1) * ratio].copy_(page.transpose(0, 1))
            at += size
    assert at == len(slot)


def separate(sizes: dict[str, int], dtype: torch.dtype, order: str = "LBNHC") -> list[torch.Tensor]:
    """Returns layers that have a memory of their own each."""
    return [strided(order, sizes | {"L": 1}, dtype)[0] for _ in range(sizes["L"])]


def _one(layers: list[torch.Tensor], blocks: int = BLOCKS) -> list[Pool]:
    return [Pool({0: layers}, blocks)]


def _tables(dtype: torch.dtype) -> list[Pool]:
    """Two tables over one memory, whose blocks are never the same, and two in a memory each."""
    one = strided("LBNHC", _SIZES, dtype)
    apart = [separate(_SIZES | {"L": 2}, dtype) for _ in range(2)]
    return [
        Pool({1: one, 2: list(reversed(one))}, BLOCKS),
        Pool({4: apart[0], 9: apart[1]}, BLOCKS),
    ]


def _groups(dtype: torch.dtype) -> list[Pool]:
    """Groups of other page sizes: attention, latents, states behind padding."""
    states = strided("LBNHC", _STATES, torch.uint8, gap=46)
    return [*_one(strided("LBNHC", _SIZES, dtype)), *_one(strided("BLNHC", _MLA, dtype)), *_one(states)]


#: Pools of each layout, of any dtype.
LAYOUTS: dict[str, Callable[[torch.dtype], list[Pool]]] = {
    **{order: (lambda dtype, order=order: _one(strided(order, _SIZES, dtype))) for order in ORDERS},
    "a memory for each layer": lambda dtype: _one(separate(_SIZES, dtype)),
    "a memory for each layer, heads outermost": lambda dtype: _one(separate(_SIZES, dtype, "LHBNC")),
    "split kernel blocks": lambda dtype: _one(strided("LBNHC", _SIZES, dtype, ratio=2)),
    "split kernel blocks, a memory for each layer": lambda dtype: _one(
        separate(_SIZES | {"B": 2 * BLOCKS, "N": 8}, dtype)
    ),
    "padded pages": lambda dtype: _one(strided("LBNHC", _SIZES, dtype, gap=8)),
    "MLA": lambda dtype: _one(strided("LBNHC", _MLA, dtype)),
    "fp8_ds_mla": lambda _: _one(strided("LBNHC", _MLA | {"C": 656}, torch.uint8)),
    "two tables": _tables,
    "groups of other page sizes": _groups,
    "states of a state-space model": lambda _: [
        *_one(strided("LBNHC", _STATES, torch.uint8, gap=46)),
        *_one(separate(_STATES, torch.uint8)),
    ],
}  # fmt: skip


def odd_pools(seeds: range) -> list[Pool]:
    """Pools that nobody lays out so."""
    return [odd(seed, separate=seed % 2 > 0) for seed in seeds]


def geometry(pool: Pool) -> dict[str, object]:
    """Returns all that there is to a pool but its bytes, for JSON."""
    firsts = _firsts(pool)
    places = [one.untyped_storage().data_ptr() for one in firsts]
    return {
        "blocks": pool.blocks,
        "storages": [one.untyped_storage().nbytes() for one in firsts],
        "tables": {
            str(table): [
                {
                    "dtype": str(layer.dtype).removeprefix("torch."),
                    "storage": places.index(layer.untyped_storage().data_ptr()),
                    "shape": list(layer.shape),
                    "stride": list(layer.stride()),
                    "offset": layer.storage_offset(),
                }
                for layer in layers
            ]
            for table, layers in pool.tables.items()
        },
    }


@functools.cache
def vllm_layouts() -> dict[str, list[dict[str, Any]]]:
    """Returns the geometry of each layout's pools, as vLLM has laid them out."""
    found: dict[str, list[dict[str, Any]]] = json.loads(VLLM_LAYOUTS.read_text())
    return found


def vllm_pools(layout: str) -> list[Pool]:
    """Returns a layout's pools."""
    made = []
    for given in vllm_layouts()[layout]:
        storages = [torch.zeros(size, dtype=torch.uint8) for size in given["storages"]]
        tables = {
            int(table): [
                storages[one["storage"]]
                .view(getattr(torch, one["dtype"]))
                .as_strided(one["shape"], one["stride"], one["offset"])
                for one in layers
            ]
            for table, layers in given["tables"].items()
        }
        made.append(Pool(tables, given["blocks"]))
    return made
