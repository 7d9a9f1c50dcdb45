"""Where each layer keeps each block, and copies of many such pages at once.

A page is one layer's part of one block; a slot is a block's pages, in the order of layers. vLLM cuts all
pages from one allocation, so one strided view has them all, at multiples of the largest step that their
places have in common. The windows of that view overlap, which a gather doesn't mind, and a scatter neither:
pages themselves don't. So one operation copies any blocks of any layers and tables, in every layout. Where
layers have memory of their own, a kernel does so on CUDA (`connectors.engine.paging.kernel`), and torch layer
by layer.

Bits are moved, never numbers, in words as wide as strides and places allow.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from math import gcd, prod
from types import ModuleType
from typing import Any

import numpy as np
import torch

from connectors.engine.guard import guarded

log = logging.getLogger(__name__)

#: Integer dtypes by size in bytes: copies move bits, never numbers.
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: The widest access of a device, in bytes.
_WIDEST = 16
_Numbers = np.ndarray[Any, np.dtype[np.int64]]


class GroupPages:
    """The pages of layers that differ in place only."""

    def __init__(self, layers: Sequence[torch.Tensor], tables: Sequence[int]) -> None:
        """`layers` are [blocks, ...], the rest of one shape, as integers of their elements' size, in slot
        order; `tables` is the number of each one's block table."""
        self._layers = _widest([_merged(layer) for layer in layers])
        first = self._layers[0]
        #: Words of a page, as its strides divide it, and their dtype.
        self.inner, self.dtype = tuple(first.shape[1:]), first.dtype
        self.tables = tuple(tables)
        self._numbers = sorted(set(tables))
        self._row = np.array([self._numbers.index(table) for table in tables])
        self._alike = len({(layer.shape, layer.stride()[1:]) for layer in self._layers}) == 1
        #: Number of each layer's first page, and from one block's page to the next's. Copies count pages of
        #: the view, bytes for the kernel, or blocks.
        self._first, self._step = np.zeros(len(layers), np.int64), np.ones(len(layers), np.int64)
        self._kernel: ModuleType | None = None
        self._aligned = 1
        self._view = self._joined()
        if self._view is None and first.is_cuda:
            self._kernel = self._launched()

    @property
    def operations(self) -> int:
        """Returns how many operations a copy in one direction takes."""
        return 1 if self._view is not None or self._kernel is not None else len(self._layers)

    def numbers(self, blocks: Mapping[int, Sequence[int]]) -> _Numbers:
        """Returns what `read` and `write` take for blocks of each table, equally many: one for each page."""
        given = np.array([blocks[number] for number in self._numbers], dtype=np.int64)
        found: _Numbers = (self._first + given[self._row].T * self._step).ravel()
        return found

    def words(self, slots: torch.Tensor) -> torch.Tensor:
        """Returns contiguous slots, uint8 [bytes], as pages [blocks * layers, *inner]."""
        return slots.view(self.dtype).view(-1, *self.inner)

    def read(self, numbers: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy pages to `slots` (what `words` returns). On CUDA it enqueues."""
        if self._view is not None:
            torch.index_select(self._view, 0, numbers, out=slots)
        elif self._kernel is not None:
            self._launch(self._kernel, numbers, slots, into=False)
        else:
            for layer, blocks, part in self._by_layer(numbers, slots):
                torch.index_select(layer, 0, blocks, out=part)

    def write(self, numbers: torch.Tensor, slots: torch.Tensor) -> None:
        """Copy `slots` (what `words` returns) to pages. On CUDA it enqueues."""
        if self._view is not None:
            self._view.index_copy_(0, numbers, slots)
        elif self._kernel is not None:
            self._launch(self._kernel, numbers, slots, into=True)
        else:
            for layer, blocks, part in self._by_layer(numbers, slots):
                layer.index_copy_(0, blocks, part)

    def _by_layer(
        self, numbers: torch.Tensor, slots: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yields each layer, its numbers and its part of `slots`, for torch where there is no view."""
        count = len(self._layers)
        parts = slots.view(-1, count, prod(self.inner))
        blocks = numbers.view(-1, count).T.contiguous()
        for i, layer in enumerate(self._layers):
            # Layers may be merged in other ways, if their strides differ.
            yield layer, blocks[i], parts[:, i].view(-1, *layer.shape[1:])

    def _joined(self) -> torch.Tensor | None:
        """Returns one view [pages, *inner] of all layers, if their storage is the same."""
        first, *others = self._layers
        storage = first.untyped_storage().data_ptr()
        if not self._alike or any(other.untyped_storage().data_ptr() != storage for other in others):
            return None
        places = [layer.storage_offset() for layer in self._layers]
        steps = [layer.stride(0) for layer in self._layers]
        start = min(places)
        unit = gcd(*(place - start for place in places), *steps)
        self._first = np.array([place - start for place in places], np.int64) // unit
        self._step = np.array(steps, np.int64) // unit
        count = int((self._first + (first.shape[0] - 1) * self._step).max()) + 1
        return first.as_strided((count, *self.inner), (unit, *first.stride()[1:]), start)

    @guarded(otherwise=None)
    def _launched(self) -> ModuleType | None:
        """Returns the module whose kernel copies these pages, if it can. Makes their numbers addresses."""
        if not self._alike or len(self.inner) > 3:
            return None
        try:
            import connectors.engine.paging.kernel as kernel
        except ImportError as exc:
            log.warning(
                "kvstore: no kernel for copies of KV blocks (%s): torch makes them layer by layer", exc
            )
            return None
        size, first = self.dtype.itemsize, self._layers[0]
        places = np.array([layer.data_ptr() for layer in self._layers], np.int64)
        steps = np.array([layer.stride(0) * size for layer in self._layers], np.int64)
        # The innermost stride is one word, which says nothing.
        strides = [stride * size for stride in first.stride()[1:-1]]
        self._aligned = gcd(_WIDEST, prod(self.inner) * size, *places.tolist(), *steps.tolist(), *strides)
        # Compiled here and now, both ways, so that no step waits for it; and if that fails, torch serves.
        one = torch.from_numpy(places[:1]).to(first.device)
        page = torch.empty((1, *self.inner), dtype=self.dtype, device=first.device)
        for into in (False, True):
            self._launch(kernel, one, page, into=into)
        self._first, self._step = places, steps
        return kernel

    def _launch(self, kernel: ModuleType, numbers: torch.Tensor, slots: torch.Tensor, *, into: bool) -> None:
        aligned = gcd(self._aligned, slots.data_ptr())
        kernel.copy_pages(numbers, slots, self._layers[0].stride()[1:], into=into, aligned=aligned)


def _merged(layer: torch.Tensor) -> torch.Tensor:
    """Returns a layer with as few dimensions within a block as its strides allow."""
    sizes: list[int] = []
    strides: list[int] = []
    for size, stride in zip(layer.shape[1:], layer.stride()[1:], strict=True):
        if sizes and strides[-1] == size * stride:
            sizes[-1], strides[-1] = sizes[-1] * size, stride
        elif size > 1:
            sizes.append(size)
            strides.append(stride)
    return layer.as_strided(
        (layer.shape[0], *(sizes or [1])), (layer.stride(0), *(strides or [1])), layer.storage_offset()
    )


def _widest(layers: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Returns layers as the widest integers as which all of them can be viewed."""
    least = layers[0].element_size()
    width = max(size for size in BITS if size == least or all(_fits(layer, size) for layer in layers))
    return [layer.view(BITS[width]) for layer in layers]


def _fits(layer: torch.Tensor, width: int) -> bool:
    size = layer.element_size()
    counted = (layer.shape[-1], layer.storage_offset(), *layer.stride()[:-1])
    return (
        width >= size
        and layer.stride(-1) == 1
        and layer.untyped_storage().data_ptr() % width == 0
        and all(one * size % width == 0 for one in counted)
    )
