"""The one place that touches tensors: staging memory, and copies between it and vLLM's paged cache.

A slot in staging holds one block in canonical order [layer, head, token, content]. On the CPU the
copies are plain and done when the call returns. On CUDA they run on side streams with pinned
staging, so that neither the engine's stream nor its thread waits for the bus:

    save  the blocks are gathered into a device buffer on the engine's own stream (tens of
          microseconds, and nothing later on that stream can overtake it), and go to the host on a
          side stream; `Copied.wait` says when they are there
    load  host bytes to a device buffer and scattered into the paged blocks on another stream; the
          transfer thread waits for the event, never the engine's
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch

from kvstore.errors import CapacityExceeded

SAFETENSORS_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
#: Paged block ids: block table -> one id per slot, as many in every table.
Blocks = Mapping[int, Sequence[int]]
TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


class Chunk:
    """Contiguous staging, cut into slots by its holder. Owned by one job between acquire and release."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor  # uint8 [bytes]
        self._flat = tensor.numpy().data.cast("B")

    def views(self, count: int, slot_bytes: int) -> list[memoryview]:
        """Writable byte views of the first `count` slots."""
        return [self._flat[i * slot_bytes : (i + 1) * slot_bytes] for i in range(count)]


class Staging:
    """A fixed set of equal chunks; never grows. Any thread."""

    def __init__(self, total_bytes: int, chunk_bytes: int, *, pin: bool) -> None:
        """As many chunks as `total_bytes` holds. Raises ValueError if it doesn't hold one."""
        count = total_bytes // chunk_bytes
        if count < 1:
            raise ValueError(
                f"staging_bytes = {total_bytes} is less than one block of {chunk_bytes} bytes; raise it"
            )
        memory = torch.empty((count, chunk_bytes), dtype=torch.uint8, pin_memory=pin)
        self._ready = threading.Condition()
        self._free = [Chunk(row) for row in memory]
        self.chunks = count
        self.chunk_bytes = chunk_bytes

    @property
    def free(self) -> int:
        """Chunks nobody holds."""
        return len(self._free)

    def try_acquire(self) -> Chunk | None:
        """A chunk, or None if all are in use. Never waits: for the engine's thread."""
        with self._ready:
            return self._free.pop() if self._free else None

    def acquire(self, end: float) -> Chunk:
        """A chunk, waiting until the `time.monotonic` time `end`; then CapacityExceeded."""
        with self._ready:
            while not self._free:
                left = end - time.monotonic()
                if left <= 0:
                    raise CapacityExceeded("no staging memory became free in time")
                self._ready.wait(left)
            return self._free.pop()

    def release(self, chunk: Chunk) -> None:
        """Give a chunk back."""
        with self._ready:
            self._free.append(chunk)
            self._ready.notify()


@dataclass(slots=True)
class Copied:
    """A gather under way. On the CPU both are None: everything is done already."""

    done: Any
    #: Keeps the device buffer alive until `done`.
    buffer: torch.Tensor | None

    def wait(self) -> None:
        """Block this (transfer) thread until the bytes are in host memory."""
        if self.done is not None:
            self.done.synchronize()
        self.buffer = None


class _Table:
    """The layers that share one block table, as slots of theirs."""

    def __init__(self, caches: Sequence[torch.Tensor], num_blocks: int) -> None:
        layers = [_by_block(cache, num_blocks) for cache in caches]
        shapes = {(layer.shape[1:], layer.dtype) for layer in layers}
        if len(shapes) != 1:
            raise ValueError(f"layers of one KV cache group differ in shape or dtype: {shapes}")
        self.dtype_name = SAFETENSORS_DTYPES.get(layers[0].dtype, str(layers[0].dtype))
        # Bits, not numbers: copies are exact for every value, and torch can index every dtype so.
        self.dtype = _BITS[layers[0].dtype.itemsize]
        self.layers = [layer.view(self.dtype) for layer in layers]
        self.inner = tuple(layers[0].shape[1:])  # (heads, tokens, content) or split further
        self.device = layers[0].device
        #: One strided [blocks, layers, ...] view of all layers, where their storage allows it.
        self._joined = _join(self.layers)

    def read(self, index: torch.Tensor, target: torch.Tensor) -> None:
        """Copy blocks `index` to `target` [count, layers, *inner]."""
        if self._joined is not None and target.is_contiguous():
            torch.index_select(self._joined, 0, index, out=target)
            return
        for i, layer in enumerate(self.layers):
            target[:, i].copy_(layer.index_select(0, index))

    def write(self, index: torch.Tensor, source: torch.Tensor) -> None:
        """Copy `source` [count, layers, *inner] to blocks `index`."""
        for i, layer in enumerate(self.layers):
            layer.index_copy_(0, index, source[:, i])


class PagedCache:
    """vLLM's paged KV cache of one group, as slots.

    `tables` are the group's block tables: the number by which vLLM calls it -> its layers' tensors in slot
    order, each logically [blocks, heads, tokens, content]; a tensor whose blocks are split into kernel blocks
    has `num_blocks * ratio` of them. A slot holds the layers of all tables, one table after the other, so
    one slot is one block id in each of them.
    """

    def __init__(self, tables: Mapping[int, Sequence[torch.Tensor]], num_blocks: int) -> None:
        self._tables = {number: _Table(caches, num_blocks) for number, caches in tables.items()}
        first = next(iter(self._tables.values()))
        shapes = {(table.inner, table.dtype_name) for table in self._tables.values()}
        if len(shapes) != 1:
            raise ValueError(f"layers of one KV cache group differ in shape or dtype: {shapes}")
        self.num_blocks = num_blocks
        self.device = first.device
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"KV cache on a device of type {self.device.type!r}; supported: cpu, cuda")
        self.dtype_name, self.dtype = first.dtype_name, first.dtype
        self._inner = first.inner
        self._count = sum(len(table.layers) for table in self._tables.values())
        self._cuda = self.device.type == "cuda"
        if self._cuda:
            self._save_stream = torch.cuda.Stream(self.device)
            self._load_stream = torch.cuda.Stream(self.device)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of a slot: (layers, heads, tokens, content)."""
        heads, *tokens, content = self._inner
        return self._count, heads, prod(tokens), content

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block of all layers."""
        return self._count * prod(self._inner) * self.dtype.itemsize

    def _as_slots(self, staged: torch.Tensor, count: int) -> torch.Tensor:
        """uint8 [bytes] as [count, layers, *inner] of the cache's dtype."""
        whole = staged[: count * self.slot_bytes].view(self.dtype)
        return whole.view(count, self._count, *self._inner)

    def _parts(self, slots: torch.Tensor) -> Iterator[tuple[int, _Table, torch.Tensor]]:
        """Each table with its layers' part of [count, layers, *inner]."""
        at = 0
        for number, table in self._tables.items():
            yield number, table, slots[:, at : at + len(table.layers)]
            at += len(table.layers)

    def gather(self, blocks: Blocks, chunk: Chunk) -> Copied:
        """Copy paged blocks into the chunk's first slots. Call on the engine's thread, after the
        forward pass was launched; on CUDA it only enqueues."""
        target = self._as_slots(chunk.tensor, _count(blocks))
        if not self._cuda:
            for number, table, part in self._parts(target):
                table.read(torch.tensor(blocks[number]), part)
            return Copied(None, None)
        buffer = torch.empty(target.shape, dtype=self.dtype, device=self.device)
        for number, table, part in self._parts(buffer):
            table.read(self._index(blocks[number]), part)
        self._save_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._save_stream):
            target.copy_(buffer, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._save_stream)
        return Copied(done, buffer)

    def scatter(self, blocks: Blocks, chunk: Chunk, after: Any) -> None:
        """Copy the chunk's first slots into paged blocks; returns when they are there.

        For a transfer thread. `after` is what `mark` returned when the engine handed out the blocks.
        """
        source = self._as_slots(chunk.tensor, _count(blocks))
        if not self._cuda:
            for number, table, part in self._parts(source):
                table.write(torch.tensor(blocks[number]), part)
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._load_stream):
            self._load_stream.wait_event(after)
            for number, table, part in self._parts(source.to(self.device, non_blocking=True)):
                table.write(self._index(blocks[number]), part)
            done = torch.cuda.Event()
            done.record(self._load_stream)
        done.synchronize()

    def _index(self, blocks: Sequence[int]) -> torch.Tensor:
        return torch.tensor(blocks).pin_memory().to(self.device, non_blocking=True)

    def mark(self) -> Any:
        """Where the engine's stream is now: a load may write its blocks after this point."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def first_blocks(self) -> dict[int, list[int]]:
        """A block for every table, each another: tables may lie over one another in the same memory."""
        return {number: [i] for i, number in enumerate(self._tables)}

    def layers_hold(self, blocks: Blocks, slot: torch.Tensor) -> bool:
        """Whether every layer's own tensor holds its part of one slot's bytes (uint8 [slot_bytes]): the check
        of the joined views against the tensors that vLLM gave."""
        return all(
            torch.equal(layer[blocks[number][0]].cpu(), part[0, i])
            for number, table, part in self._parts(self._as_slots(slot, 1))
            for i, layer in enumerate(table.layers)
        )


def _count(blocks: Blocks) -> int:
    return len(next(iter(blocks.values())))


def _by_block(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """[blocks, heads, tokens, content], also where the attention kernel uses smaller blocks."""
    if cache.shape[0] == num_blocks:
        return cache
    if cache.shape[0] % num_blocks:
        raise ValueError(f"cache of {cache.shape[0]} kernel blocks, {num_blocks} blocks")
    # [blocks * ratio, heads, n, content] -> [blocks, heads, ratio, n, content]: tokens stay in order.
    return cache.unflatten(0, (num_blocks, -1)).transpose(1, 2)


def _join(layers: Sequence[torch.Tensor]) -> torch.Tensor | None:
    first = layers[0]
    pointers = [layer.data_ptr() for layer in layers]
    steps = {b - a for a, b in pairwise(pointers)}
    same = all(
        layer.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        and layer.stride() == first.stride()
        for layer in layers
    )
    if not same or len(steps) > 1 or any(step <= 0 or step % first.itemsize for step in steps):
        return None
    step = steps.pop() // first.itemsize if steps else first.stride(0)
    return first.as_strided(
        (first.shape[0], len(layers), *first.shape[1:]),
        (first.stride(0), step, *first.stride()[1:]),
        first.storage_offset(),
    )


class HostCopy:
    """A private host copy of one tensor view, under way on CUDA, done on the CPU.

    Copies the view, never its storage: items that were encoded together share one.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        view = tensor.detach()
        self._event: Any = None
        if view.device.type == "cuda":
            self._host = torch.empty(view.shape, dtype=view.dtype, pin_memory=True)
            # On the engine's own stream: the copy is small and its source may be freed right after.
            self._host.copy_(view, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(view.device))
        else:
            self._host = view.clone(memory_format=torch.contiguous_format)

    def wait(self) -> tuple[memoryview, str, tuple[int, ...]]:
        """Bytes, safetensors dtype and shape; blocks until the copy is there."""
        if self._event is not None:
            self._event.synchronize()
        raw = self._host.view(-1).view(torch.uint8).numpy()
        return raw.data, SAFETENSORS_DTYPES[self._host.dtype], tuple(self._host.shape)
