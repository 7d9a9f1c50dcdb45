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
from collections.abc import Sequence
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
TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


class Chunk:
    """Contiguous staging for up to `rows` slots. Owned by one job between acquire and release."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor  # uint8 [rows, slot_bytes]
        flat = tensor.numpy().data.cast("B")
        width = tensor.shape[1]
        self._rows = [flat[i * width : (i + 1) * width] for i in range(tensor.shape[0])]

    def views(self, count: int) -> list[memoryview]:
        """Writable byte views of the first `count` slots."""
        return self._rows[:count]


class Staging:
    """A fixed set of chunks; never grows. Any thread."""

    def __init__(self, total_bytes: int, slot_bytes: int, rows: int, *, pin: bool) -> None:
        """`rows` slots per chunk, fewer if `total_bytes` doesn't hold one such chunk.

        Raises ValueError if it doesn't hold one slot.
        """
        self.rows = min(rows, total_bytes // slot_bytes)
        if self.rows < 1:
            raise ValueError(
                f"staging_bytes = {total_bytes} is less than one block of {slot_bytes} bytes; raise it"
            )
        count = total_bytes // (self.rows * slot_bytes)
        memory = torch.empty((count * self.rows, slot_bytes), dtype=torch.uint8, pin_memory=pin)
        self._ready = threading.Condition()
        self._free = [Chunk(memory[i * self.rows : (i + 1) * self.rows]) for i in range(count)]
        self.chunks = count

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


class PagedCache:
    """vLLM's paged KV cache of one group, as slots.

    `caches` are the layers' tensors in slot order, each logically [blocks, heads, tokens, content];
    a tensor whose blocks are split into kernel blocks has `num_blocks * ratio` of them.
    """

    def __init__(self, caches: Sequence[torch.Tensor], num_blocks: int) -> None:
        layers = [_by_block(cache, num_blocks) for cache in caches]
        shapes = {(layer.shape[1:], layer.dtype) for layer in layers}
        if len(shapes) != 1:
            raise ValueError(f"layers of one KV cache group differ in shape or dtype: {shapes}")
        self.num_blocks = num_blocks
        self.device = layers[0].device
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"KV cache on a device of type {self.device.type!r}; supported: cpu, cuda")
        self.dtype_name = SAFETENSORS_DTYPES.get(layers[0].dtype, str(layers[0].dtype))
        # Bits, not numbers: copies are exact for every value, and torch can index every dtype so.
        self.dtype = _BITS[layers[0].dtype.itemsize]
        layers = [layer.view(self.dtype) for layer in layers]
        self._inner = tuple(layers[0].shape[1:])  # (heads, tokens, content) or split further
        self._layers = layers
        #: One strided [blocks, layers, ...] view of all layers, where their storage allows it.
        self._joined = _join(layers)
        self._cuda = self.device.type == "cuda"
        if self._cuda:
            self._save_stream = torch.cuda.Stream(self.device)
            self._load_stream = torch.cuda.Stream(self.device)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Of a slot: (layers, heads, tokens, content)."""
        heads, *tokens, content = self._inner
        return len(self._layers), heads, prod(tokens), content

    @property
    def slot_bytes(self) -> int:
        """Bytes of one block of all layers."""
        count = len(self._layers)
        for size in self._inner:
            count *= size
        return count * self.dtype.itemsize

    def _as_slots(self, staged: torch.Tensor, count: int) -> torch.Tensor:
        """uint8 [rows, slot_bytes] as [count, layers, *inner] of the cache's dtype."""
        return staged[:count].view(self.dtype).view(count, len(self._layers), *self._inner)

    def gather(self, blocks: Sequence[int], chunk: Chunk) -> Copied:
        """Copy paged blocks into the chunk's first slots. Call on the engine's thread, after the
        forward pass was launched; on CUDA it only enqueues."""
        target = self._as_slots(chunk.tensor, len(blocks))
        if not self._cuda:
            self._read(torch.tensor(blocks), target)
            return Copied(None, None)
        index = torch.tensor(blocks).pin_memory().to(self.device, non_blocking=True)
        buffer = torch.empty(target.shape, dtype=self.dtype, device=self.device)
        self._read(index, buffer)
        self._save_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._save_stream):
            target.copy_(buffer, non_blocking=True)
            done = torch.cuda.Event()
            done.record(self._save_stream)
        return Copied(done, buffer)

    def scatter(self, blocks: Sequence[int], chunk: Chunk, after: Any) -> None:
        """Copy the chunk's first slots into paged blocks; returns when they are there.

        For a transfer thread. `after` is what `mark` returned when the engine handed out the blocks.
        """
        source = self._as_slots(chunk.tensor, len(blocks))
        if not self._cuda:
            self._write(torch.tensor(blocks), source)
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._load_stream):
            self._load_stream.wait_event(after)
            index = torch.tensor(blocks).pin_memory().to(self.device, non_blocking=True)
            self._write(index, source.to(self.device, non_blocking=True))
            done = torch.cuda.Event()
            done.record(self._load_stream)
        done.synchronize()

    def mark(self) -> Any:
        """Where the engine's stream is now: a load may write its blocks after this point."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def layer_holds(self, block: int, slot: torch.Tensor) -> bool:
        """Whether every layer's own tensor holds its part of a slot's bytes at `block`: the check of
        the joined view against the tensors that vLLM gave."""
        parts = slot.view(self.dtype).view(len(self._layers), *self._inner)
        return all(
            torch.equal(layer[block].cpu(), part) for layer, part in zip(self._layers, parts, strict=True)
        )

    def _read(self, index: torch.Tensor, target: torch.Tensor) -> None:
        if self._joined is not None:
            torch.index_select(self._joined, 0, index, out=target)
            return
        for i, layer in enumerate(self._layers):
            target[:, i].copy_(layer.index_select(0, index))

    def _write(self, index: torch.Tensor, source: torch.Tensor) -> None:
        for i, layer in enumerate(self._layers):
            layer.index_copy_(0, index, source[:, i])


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
