"""Page-locked host memory through which encoder outputs pass to and from a GPU, and the stream of its copies.

The engine's thread waits for no copy. It queues one, and what needs it is ordered behind it:

    load    a staged file is read into page-locked memory (it is in the page cache), and goes to the device on
            a side stream, beside the step before; the engine's stream waits for it
    save    the output goes to page-locked memory on the side stream, behind what computes it; its write is
            queued when it is there

All of it is locked once, at the start. On the CPU there is none of this (connectors.ec.worker).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

import torch

from connectors.engine.tensors import SAFETENSORS_DTYPES, TORCH_DTYPES, Chunk, Staging, awaited_event
from kvstore.errors import ConfigError

if TYPE_CHECKING:
    from connectors.ec.messages import StagedItem
    from schemas.settings import Settings

#: Steps of encoder outputs as wide as the language model that there is room for, in each direction: two in
#: flight, of up to twice that width.
_STEPS: Final = 4


class ItemMemory:
    """The memory of one rank. For the engine's thread, but for `ItemCopy`."""

    def __init__(self, device: torch.device, size_bytes: int) -> None:
        """Lock `size_bytes` for loads and as many for saves. Raises ConfigError if the driver refuses."""
        self._device = device
        self._stream = torch.cuda.Stream(device)
        try:
            self._loads = Staging(size_bytes, 1, pin=True)
            self._saves = Staging(size_bytes, 1, pin=True)
        except ValueError as exc:
            raise ConfigError(f"kvstore: ec.{exc}") from None
        #: Chunks that a copy to the device may still read, and its event.
        self._read: deque[tuple[Any, Chunk]] = deque()

    def load(self, item: StagedItem) -> torch.Tensor | None:
        """Returns a staged item on the device, or None if there is no room. The item is complete once the
        engine's stream comes to it. Raises OSError if its file can't be read."""
        while self._read and self._read[0][0].query():
            self._loads.release(self._read.popleft()[1])
        if (chunk := self._loads.try_acquire(item.nbytes)) is None:
            return None
        done = None
        try:
            with item.open() as file:
                if file.readinto(chunk.views(1, item.nbytes)[0]) != item.nbytes:
                    raise OSError(f"{item.path} is shorter than it was")
            host = chunk.tensor.view(TORCH_DTYPES[item.dtype]).view(item.rows, item.width)
            with torch.cuda.stream(self._stream):
                tensor = host.to(self._device, non_blocking=True)
                done = awaited_event()
                done.record(self._stream)
        finally:
            if done is None:
                self._loads.release(chunk)
            else:
                self._read.append((done, chunk))
        engine = torch.cuda.current_stream(self._device)
        engine.wait_event(done)
        # It was allocated on the side stream, and is freed by the engine.
        tensor.record_stream(engine)
        return tensor

    def save(self, tensor: torch.Tensor) -> ItemCopy | None:
        """Returns a copy that is under way to the host, or None if there is no room.

        It copies the view, never its storage: items that were encoded together share one."""
        view = tensor.detach()
        if (chunk := self._saves.try_acquire(view.numel() * view.element_size())) is None:
            return None
        host = chunk.tensor.view(view.dtype).view(view.shape)
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            host.copy_(view, non_blocking=True)
            done = awaited_event()
            done.record(self._stream)
        view.record_stream(self._stream)
        return ItemCopy(self._saves, chunk, done, host)


class ItemCopy:
    """One output on its way to the host, as HostCopy is. For a transfer thread."""

    under_way = True

    def __init__(self, staging: Staging, chunk: Chunk, done: Any, host: torch.Tensor) -> None:
        self._staging, self._chunk, self._done, self._host = staging, chunk, done, host

    def wait(self) -> tuple[memoryview, str, tuple[int, ...]]:
        """Returns bytes, safetensors dtype and shape; blocks until the copy is there. The bytes hold until
        `release`."""
        self._done.synchronize()
        [raw] = self._chunk.views(1, self._host.numel() * self._host.element_size())
        return raw, SAFETENSORS_DTYPES[self._host.dtype], tuple(self._host.shape)

    def release(self) -> None:
        """Give its memory back; the copy must be there."""
        self._staging.release(self._chunk)


def memory_of(vllm_config: Any, settings: Settings, device: torch.device) -> ItemMemory | None:
    """Returns the memory of an engine's rank, or None on the CPU. Raises ConfigError if it can't be locked.

    There is room for what the steps in flight encode, within `ec.staging_bytes`."""
    if device.type != "cuda":
        return None
    model = vllm_config.model_config
    row_bytes = model.get_inputs_embeds_size() * model.dtype.itemsize
    step_bytes = vllm_config.scheduler_config.max_num_encoder_input_tokens * row_bytes
    return ItemMemory(device, min(_STEPS * step_bytes, settings.ec.staging_bytes))
