"""One launch that copies pages anywhere in a device's memory to or from contiguous slots.

For layers that have memory of their own, where torch would need operations for each of them. Import it on a
CUDA device only: Triton compiles at the first launch, and not every torch brings it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

#: Words that one program copies.
_TILE = 1024


def _copy_page(
    addresses: tl.tensor,
    slots: tl.tensor,
    into: tl.constexpr,
    words: tl.constexpr,
    size1: tl.constexpr,
    size2: tl.constexpr,
    stride0: tl.constexpr,
    stride1: tl.constexpr,
    stride2: tl.constexpr,
    aligned: tl.constexpr,
    tile: tl.constexpr,
) -> None:
    # 64 bits wherever a stride comes in: a head of one block may be gigabytes from its next.
    page = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * tile + tl.arange(0, tile)
    inside = at < words
    # That it is aligned makes the compiler move 16 bytes at once, where the innermost run is as long.
    start = tl.multiple_of(tl.load(addresses + page).to(tl.pointer_type(slots.dtype.element_ty)), aligned)
    cell = start + (at // (size1 * size2)).to(tl.int64) * stride0
    cell += (at // size2 % size1).to(tl.int64) * stride1 + (at % size2).to(tl.int64) * stride2
    slot = slots + page * words + at
    if into:
        tl.store(cell, tl.load(slot, mask=inside), mask=inside)
    else:
        tl.store(slot, tl.load(cell, mask=inside), mask=inside)


copy_page = triton.jit(_copy_page)


def copy_pages(
    addresses: torch.Tensor,
    slots: torch.Tensor,
    strides: tuple[int, ...],
    *,
    into: bool,
    aligned: int,
) -> None:
    """Copy pages to `slots`, contiguous [pages, *sizes] of at most three sizes; with `into`, slots to pages.

    `addresses` are the pages' own, int64 [pages]; `strides` are those within a page, in words of the dtype of
    `slots`. Everything is a multiple of `aligned` bytes. Enqueues on the current stream.
    """
    sizes = (1, 1, 1, *slots.shape[1:])[-3:]
    strides = (0, 0, 0, *strides)[-3:]
    words = sizes[0] * sizes[1] * sizes[2]
    grid = (slots.shape[0], triton.cdiv(words, _TILE))
    # All but the pointers are constants, so that a cache's first copy compiles what all others run.
    copy_page[grid](addresses, slots, into, words, *sizes[1:], *strides, aligned, _TILE)
