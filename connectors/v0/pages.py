"""A v0 engine's paged KV caches and hidden states as bytes of the store, and back.

`kv_caches` is a list, one tensor per layer of the stage:
    FlashAttention   [2, blocks, tokens, heads, size]   keys, then values
    MLA              [blocks, tokens, size]             rows may be padded: then it isn't contiguous
Token t of a sequence is at slot_mapping[t] = block * tokens + offset; a slot of -1 is written nowhere. Other
layouts (PagedAttention's [2, blocks, tokens * heads * size] keeps a block's tokens interleaved) are refused.

In the store a run of tokens is [layer, head, token, content], content being key and value side by side, as
in every KV namespace. Bits are copied, never numbers, so an fp8 cache keeps its scale.

The pipeline's last stage ends with one tensor of hidden states, of which the sampler reads a prompt's last
row; the others end with several tensors for the next stage, which reads every row of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from connectors.engine.paging.pages import BITS
from connectors.engine.tensors import SAFETENSORS_DTYPES


class Unsupported(Exception):
    """Raised for tensors of the engine that this connector doesn't understand; the text says which."""


class Pages:
    """The layers' caches of one stage on one rank. Raises Unsupported for a layout it doesn't know."""

    def __init__(self, caches: Sequence[torch.Tensor], block_tokens: int, *, mla: bool) -> None:
        if not caches:
            raise Unsupported("no KV caches")
        first = caches[0]
        if any(
            (one.shape, one.dtype, one.device) != (first.shape, first.dtype, first.device) for one in caches
        ):
            raise Unsupported("layers whose KV caches differ in shape or dtype")
        shape = list(first.shape)
        if (mla and (len(shape) != 3 or shape[1] != block_tokens)) or (
            not mla and (len(shape) != 5 or shape[0] != 2 or shape[2] != block_tokens)
        ):
            wanted = "[blocks, tokens, size]" if mla else "[2, blocks, tokens, heads, size]"
            raise Unsupported(
                f"a KV cache of shape {shape}; {wanted} with {block_tokens} tokens is supported"
            )
        if first.dtype not in SAFETENSORS_DTYPES:
            raise Unsupported(f"a KV cache of {first.dtype}")
        self.dtype_name = SAFETENSORS_DTYPES[first.dtype]
        self.device = first.device
        self.mla = mla
        self.layers = len(caches)
        self.heads = 1 if mla else shape[3]
        self.content = shape[2] if mla else 2 * shape[4]
        self.slots = prod(shape[:2]) if mla else shape[1] * shape[2]
        self.token_bytes = self.layers * self.heads * self.content * first.itemsize
        self._block_tokens = block_tokens
        bits = BITS[first.itemsize]
        self._bits = bits
        # Never flattened: a padded cache would be copied, and what is written to the copy is lost.
        self._parts = [[one.view(bits)] if mla else [one[0].view(bits), one[1].view(bits)] for one in caches]

    def describe(self) -> str:
        """Returns words that differ for layouts that differ, within one process."""
        return f"{self.layers} {self.heads} {self.content} {self.dtype_name} {self.device} mla={self.mla}"

    def _at(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return slots // self._block_tokens, slots % self._block_tokens

    def read(self, slots: torch.Tensor, run: int) -> torch.Tensor:
        """Returns the KV of the tokens at `slots` in runs of `run` tokens: uint8 [runs, bytes of a run].

        It is a fresh tensor on the cache's device; on CUDA the copy is enqueued on the current stream.
        """
        block, offset = self._at(slots)
        count = slots.numel()
        layers = []
        for parts in self._parts:
            content = torch.cat([part[block, offset].view(count, self.heads, -1) for part in parts], dim=-1)
            layers.append(content.view(-1, run, self.heads, self.content))
        # [layer, runs, token, head, content] -> [runs, layer, head, token, content]
        made = torch.stack(layers).permute(1, 0, 3, 2, 4).contiguous()
        return made.view(made.shape[0], -1).view(torch.uint8)

    def write(self, slots: torch.Tensor, data: torch.Tensor, run: int) -> None:
        """Writes what `read` returns to the tokens at `slots`; it may be on any device."""
        block, offset = self._at(slots)
        count = slots.numel()
        # Copied first: a part of a larger buffer can't be viewed as another dtype at any offset.
        there = torch.empty(data.shape, dtype=torch.uint8, device=self.device).copy_(data).view(self._bits)
        there = there.view(-1, self.layers, self.heads, run, self.content)
        there = there.permute(1, 0, 3, 2, 4).reshape(self.layers, count, self.heads, self.content)
        for layer, parts in zip(there, self._parts, strict=True):
            for part, content in zip(parts, layer.chunk(len(parts), dim=-1), strict=True):
                part.index_put_((block, offset), content.reshape(count, *part.shape[2:]))


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that a stage hands on per token: the tensors' names, and the dtype and shape of a row of each."""

    names: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[tuple[int, ...], ...]
    #: Whether the stage is the last: one tensor without a name, and only a prompt's last row is stored.
    last: bool

    @classmethod
    def hidden(cls, width: int, dtype: torch.dtype) -> Rows:
        """Returns what the last stage hands on."""
        return cls(("",), (dtype,), ((width,),), True)

    @classmethod
    def between(cls, tensors: Mapping[str, torch.Tensor]) -> Rows:
        """Returns what another stage hands on, whose output looks like `tensors`."""
        names = tuple(sorted(tensors))
        return cls(
            names,
            tuple(tensors[name].dtype for name in names),
            tuple(tuple(tensors[name].shape[1:]) for name in names),
            False,
        )

    @property
    def row_bytes(self) -> int:
        """Returns how many bytes one token has in all tensors."""
        return sum(
            prod(shape) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )

    def describe(self) -> str:
        """Returns words for the namespace: engines whose stages hand on something else never share."""
        parts = [
            f"{name}:{str(dtype).removeprefix('torch.')}{list(shape)}"
            for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True)
        ]
        return ("last row " if self.last else "rows ") + " ".join(parts)

    def of(self, output: Any, rows: int) -> list[torch.Tensor]:
        """Returns the tensors of a stage's output. Raises Unsupported if it isn't what was expected."""
        if self.last:
            tensors = {"": output}
        else:
            tensors = getattr(output, "tensors", None) or {}
        if not all(isinstance(one, torch.Tensor) for one in tensors.values()):
            raise Unsupported(f"a stage's output of type {type(output).__name__}")
        found = {name: (one.dtype, tuple(one.shape)) for name, one in tensors.items()}
        wanted = {
            name: (dtype, (rows, *shape))
            for name, dtype, shape in zip(self.names, self.dtypes, self.shapes, strict=True)
        }
        if found != wanted:
            raise Unsupported(f"a stage's output of {found}; expected {wanted}")
        return [tensors[name] for name in self.names]

    def pack(self, tensors: Sequence[torch.Tensor], rows: range, runs: int) -> torch.Tensor:
        """Returns the bytes of some rows, in `runs` runs of equal length: uint8 [runs, bytes of a run]."""
        each = len(rows) // runs
        parts = [
            one[rows.start : rows.stop].contiguous().view(runs, each * prod(shape)).view(torch.uint8)
            for one, shape in zip(tensors, self.shapes, strict=True)
        ]
        return torch.cat(parts, dim=1)

    def unpack(self, data: torch.Tensor, into: Sequence[torch.Tensor], rows: range) -> None:
        """Puts one run of what `pack` returns, uint8 [bytes of a run], into some rows of these tensors."""
        at = 0
        for one, shape, dtype in zip(into, self.shapes, self.dtypes, strict=True):
            size = len(rows) * prod(shape) * dtype.itemsize
            part = data[at : at + size].to(one.device, copy=True).view(dtype)
            one[rows.start : rows.stop].copy_(part.view(len(rows), *shape))
            at += size
