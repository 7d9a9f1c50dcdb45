"""The one place that touches tensors: staging memory, and copies between it and vLLM's paged cache.

A slot in staging holds one block in canonical order [layer, head, token, content]. On the CPU the
copies are plain and done when the call returns. On CUDA they run on side streams with pinned
staging, so that neither the engine's stream nor its thread waits for the bus:

    save  the blocks are gathered into a device buffer on the engine's own stream (by one
          operation, which nothing later on that stream can overtake), and go to the host on a
          side stream; `Copied.wait` returns when they are there
    load  the host's bytes go to a device buffer and are scattered into the paged blocks on another
          stream, behind the step in which the blocks were handed out; `Copied.wait` as above
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from connectors.arena import Arena
from connectors.engine.paging.ids import Upload
from connectors.engine.paging.pages import BITS, GroupPages
from kvstore.errors import CapacityExceeded

SAFETENSORS_DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32",
    torch.float64: "F64", torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2",
}  # fmt: skip
#: Paged block ids: block table -> one id per slot, equally many in every table.
Blocks = Mapping[int, Sequence[int]]
TORCH_DTYPES = {name: dtype for dtype, name in SAFETENSORS_DTYPES.items()}


class Chunk:
    """A run of staging memory, cut into slots by its holder. One job owns it from acquire to release."""

    def __init__(self, tensor: torch.Tensor, start: int = 0) -> None:
        """`start` is where it begins in its arena."""
        self.tensor = tensor  # uint8 [bytes]
        self.start = start
        self._flat = tensor.numpy().data.cast("B")

    def views(self, count: int, slot_bytes: int) -> list[memoryview]:
        """Returns writable views of the first `count` slots."""
        return [self._flat[i * slot_bytes : (i + 1) * slot_bytes] for i in range(count)]


class Staging:
    """Memory that never grows, in chunks of as many bytes as their holders need. Any thread may call."""

    def __init__(self, total_bytes: int, least_bytes: int, *, pin: bool) -> None:
        """Make room for `total_bytes`, in page-locked memory if `pin`. Raises ValueError if that doesn't hold
        a chunk of `least_bytes`, or can't be locked."""
        if total_bytes < least_bytes:
            raise ValueError(
                f"staging_bytes = {total_bytes} is less than one block of {least_bytes} bytes; raise it"
            )
        self._arena = Arena(Arena.room(total_bytes))
        self._memory = torch.empty(self._arena.size, dtype=torch.uint8)
        if pin:
            _lock_pages(self._memory)
        self._ready = threading.Condition()
        #: Calls that wait for a chunk, in their order.
        self._waiting: deque[object] = deque()

    @property
    def size_bytes(self) -> int:
        """Returns how many bytes there are."""
        return self._arena.size

    @property
    def used_bytes(self) -> int:
        """Returns how many bytes are held."""
        return self._arena.used

    def try_acquire(self, nbytes: int) -> Chunk | None:
        """Returns a chunk of `nbytes`, or None if there is no room for it. Never waits, so the engine's
        thread may call it."""
        with self._ready:
            return self._take(nbytes)

    def acquire(self, nbytes: int, end: float) -> Chunk:
        """Returns a chunk of `nbytes`, waiting for room until the `time.monotonic` time `end`, each in turn.
        Raises CapacityExceeded if there was none by then."""
        me = object()
        with self._ready:
            self._waiting.append(me)
            try:
                while self._waiting[0] is not me or (chunk := self._take(nbytes)) is None:
                    left = end - time.monotonic()
                    if left <= 0 or nbytes > self._arena.size:
                        raise CapacityExceeded("no staging memory became free in time")
                    self._ready.wait(left)
                return chunk
            finally:
                self._waiting.remove(me)
                self._ready.notify_all()

    def release(self, chunk: Chunk) -> None:
        """Give a chunk back."""
        with self._ready:
            self._arena.give(chunk.start)
            self._ready.notify_all()

    def _take(self, nbytes: int) -> Chunk | None:
        start = self._arena.take(nbytes)
        return None if start is None else Chunk(self._memory[start : start + nbytes], start)


def _lock_pages(memory: torch.Tensor) -> None:
    """Lock the pages of host memory, for copies by the GPU, as long as it lives. Raises ValueError if the
    driver refuses.

    torch's own pinned memory is rounded up to a power of two."""
    runtime = torch.cuda.cudart()
    answer = runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0)
    if int(answer) != 0:
        raise ValueError(
            f"staging_bytes: {memory.nbytes} bytes of host memory can't be locked for the GPU (CUDA error "
            f"{int(answer)}); is `ulimit -l` or the container's memory too small?"
        )
    # Freed memory that is still locked can't be locked again by the next owner of its addresses.
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False


@dataclass(slots=True)
class Copied:
    """A gather or a scatter that is under way. On the CPU it is done already."""

    #: CUDA event that is recorded after the copy, or None on the CPU.
    done: Any = None
    #: A gather's device buffer, kept alive until `done`.
    buffer: torch.Tensor | None = None
    #: Why not all of it was enqueued.
    failure: Exception | None = None

    @property
    def under_way(self) -> bool:
        """Returns whether there is anything to wait for."""
        return self.done is not None

    def wait(self) -> None:
        """Block this thread until the copy has ended, which takes as long as the steps before it; raises what
        has failed. Again it returns, or raises, at once. For threads that `Transfers` has for this."""
        if self.done is not None:
            self.done.synchronize()
        self.buffer = None
        if self.failure is not None:
            raise self.failure


class PagedCache:
    """vLLM's paged KV cache of one group, as slots.

    `tables` are the group's block tables: vLLM's number for each -> its layers' tensors in slot order, each
    logically [blocks, heads, tokens, content]; a tensor whose blocks are split into kernel blocks has
    `num_blocks * ratio` of them. A slot holds the layers of all tables, one table after the other, so one
    slot is one block id in each of them. Raises ValueError for tensors that don't fit together.
    """

    def __init__(self, tables: Mapping[int, Sequence[torch.Tensor]], num_blocks: int) -> None:
        by_table = {
            number: [_by_block(one, num_blocks) for one in caches] for number, caches in tables.items()
        }
        layers = [layer for layers in by_table.values() for layer in layers]
        shapes = {(layer.shape[1:], layer.dtype) for layer in layers}
        if len(shapes) != 1:
            raise ValueError(f"layers of one KV cache group differ in shape or dtype: {shapes}")
        self.num_blocks = num_blocks
        self.device = layers[0].device
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"KV cache on a device of type {self.device.type!r}; supported: cpu, cuda")
        self.dtype_name = SAFETENSORS_DTYPES.get(layers[0].dtype, str(layers[0].dtype))
        self.dtype = BITS[layers[0].dtype.itemsize]
        self._layers = [layer.view(self.dtype) for layer in layers]
        #: The block table of each layer.
        self._tables = [number for number, layers in by_table.items() for _ in layers]
        self._inner = tuple(layers[0].shape[1:])  # (heads, tokens, content) or split further
        self._pages = GroupPages(self._layers, self._tables)
        self._cuda = self.device.type == "cuda"
        if self._cuda:
            self._save_stream = torch.cuda.Stream(self.device)
            self._load_stream = torch.cuda.Stream(self.device)
            self._saved, self._loaded = Upload(self.device), Upload(self.device)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Returns a slot's (layers, heads, tokens, content)."""
        heads, *tokens, content = self._inner
        return len(self._layers), heads, prod(tokens), content

    @property
    def kernel_block(self) -> str:
        """Returns the tokens of a kernel's block, and which of heads (H) and tokens (N) is outermost in it:
        `16HN`, `8NH`."""
        layer = self._layers[0]
        heads, tokens = layer.stride(1), layer.stride(-2)
        order = "NH" if self._inner[0] > 1 and tokens > heads else "HN"
        return f"{self._inner[-2]}{order}"

    @property
    def slot_bytes(self) -> int:
        """Returns how many bytes one block of all layers has."""
        return len(self._layers) * prod(self._inner) * self.dtype.itemsize

    def _words(self, blocks: Blocks, chunk: Chunk) -> torch.Tensor:
        """Returns the chunk's first slots as pages."""
        return self._pages.words(chunk.tensor[: len(next(iter(blocks.values()))) * self.slot_bytes])

    def gather(self, blocks: Blocks, chunk: Chunk) -> Copied:
        """Copy paged blocks into the chunk's first slots. Call on the engine's thread, after the
        forward pass was launched; on CUDA it only enqueues."""
        target, numbers = self._words(blocks, chunk), self._pages.numbers(blocks)
        if not self._cuda:
            self._pages.read(torch.from_numpy(numbers), target)
            return Copied()
        buffer = torch.empty(target.shape, dtype=target.dtype, device=self.device)
        self._pages.read(self._saved.send(numbers), buffer)
        self._save_stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._save_stream):
            target.copy_(buffer, non_blocking=True)
            done = awaited_event()
            done.record(self._save_stream)
        return Copied(done, buffer)

    def scatter(self, blocks: Blocks, chunk: Chunk, after: Any) -> Copied:
        """Copy the chunk's first slots into paged blocks; on CUDA it only enqueues. The chunk and the blocks
        are in use until the copy has ended, even if it has failed half-way.

        For a transfer thread. `after` is what `mark` returned when the engine handed out the blocks.
        """
        source, numbers = self._words(blocks, chunk), self._pages.numbers(blocks)
        if not self._cuda:
            self._pages.write(torch.from_numpy(numbers), source)
            return Copied()
        with torch.cuda.device(self.device), torch.cuda.stream(self._load_stream):
            self._load_stream.wait_event(after)
            failure = None
            try:
                there = source.to(self.device, non_blocking=True)
                self._pages.write(self._loaded.send(numbers), there)
            except Exception as exc:  # noqa: BLE001 - `Copied.wait` raises it
                # Not here: what is queued already would land when the blocks belong to another request.
                failure = exc
            done = awaited_event()
            done.record(self._load_stream)
        return Copied(done, failure=failure)

    def mark(self) -> Any:
        """Returns where the engine's stream is now: a load may write its blocks after this point."""
        if not self._cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def first_blocks(self) -> dict[int, list[int]]:
        """Returns one block id for every table, all different: tables may overlap in memory."""
        return {number: [i] for i, number in enumerate(dict.fromkeys(self._tables))}

    def layers_hold(self, blocks: Blocks, slot: torch.Tensor) -> bool:
        """Returns whether every layer's own tensor holds its part of one slot's bytes (uint8 [slot_bytes]).

        That checks how pages are reached against the tensors that vLLM gave."""
        parts = slot[: self.slot_bytes].view(self.dtype).view(len(self._layers), *self._inner)
        return all(
            torch.equal(layer[blocks[table][0]].cpu(), part)
            for layer, table, part in zip(self._layers, self._tables, parts, strict=True)
        )


def awaited_event() -> Any:
    """Returns an event that threads sleep for. Waiting for any other spins and holds the driver's lock."""
    return torch.cuda.Event(blocking=True)


def accelerator_id() -> str:
    """Returns the UUID of the accelerator that this process computes on: the same after a restart, in any
    container. "" if it uses none, or hasn't begun to, or its driver names none. Engine thread."""
    # Asking any further would begin to use one, which the scheduler's process must not.
    if not torch.cuda.is_initialized():
        return ""
    return str(getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", ""))


def _by_block(cache: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Returns a view [blocks, heads, tokens, content], even if the attention kernel uses smaller blocks."""
    if cache.shape[0] == num_blocks:
        return cache
    if cache.shape[0] % num_blocks:
        raise ValueError(f"got {cache.shape[0]} kernel blocks, expected a multiple of {num_blocks}")
    # [blocks * ratio, heads, n, content] -> [blocks, heads, ratio, n, content]: tokens stay in order.
    return cache.unflatten(0, (num_blocks, -1)).transpose(1, 2)


class HostCopy:
    """A private host copy of one tensor view. On CUDA it is under way at first, on the CPU it is done.

    It copies the view, never its storage: items that were encoded together share one.
    """

    def __init__(self, tensor: torch.Tensor) -> None:
        view = tensor.detach()
        self._event: Any = None
        if view.device.type == "cuda":
            self._host = torch.empty(view.shape, dtype=view.dtype, pin_memory=True)
            # On the engine's own stream: the copy is small and its source may be freed right after.
            self._host.copy_(view, non_blocking=True)
            self._event = awaited_event()
            self._event.record(torch.cuda.current_stream(view.device))
        else:
            self._host = view.clone(memory_format=torch.contiguous_format)

    @property
    def under_way(self) -> bool:
        """Returns whether there is anything to wait for."""
        return self._event is not None

    def wait(self) -> tuple[memoryview, str, tuple[int, ...]]:
        """Returns bytes, safetensors dtype and shape; blocks until the copy is there."""
        if self._event is not None:
            self._event.synchronize()
        raw = self._host.view(-1).view(torch.uint8).numpy()
        return raw.data, SAFETENSORS_DTYPES[self._host.dtype], tuple(self._host.shape)

    def release(self) -> None:
        """Does nothing: it shares its memory with nobody."""
