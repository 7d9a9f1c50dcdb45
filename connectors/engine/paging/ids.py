"""Numbers on their way to the device, through host memory that is page-locked once."""

from __future__ import annotations

import threading
from collections import deque
from typing import Any, Final

import numpy as np
import torch

from connectors.arena import Arena

#: Bytes of host memory: the page numbers of more than fits into any staging, unless pages are tiny.
_ROOM: Final = 1 << 20


class Upload:
    """Sends arrays to a device, for one stream, without a wait. Any thread may call.

    The memory of one is used again when its copy has passed. If none is left, torch pins some, which it keeps
    for the next time.
    """

    def __init__(self, device: torch.device, room: int = _ROOM) -> None:
        """`room` is in bytes."""
        self._device = device
        self._memory = torch.empty(room // 8, dtype=torch.int64, pin_memory=True)
        self._arena = Arena(room)
        #: Events that are recorded behind the copies under way, in their order, and where these begin.
        self._under_way: deque[tuple[Any, int]] = deque()
        self._lock = threading.Lock()

    def send(self, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> torch.Tensor:
        """Returns int64 [n] on the device, for use on the current stream, which is the same at every call."""
        with self._lock:
            while self._under_way and self._under_way[0][0].query():
                self._arena.give(self._under_way.popleft()[1])
            start = self._arena.take(numbers.nbytes)
            if start is None:
                return torch.from_numpy(numbers).pin_memory().to(self._device, non_blocking=True)
            event = torch.cuda.Event()
            host = self._memory[start // 8 : start // 8 + len(numbers)]
            host.numpy()[:] = numbers
            try:
                there = host.to(self._device, non_blocking=True)
            except Exception:
                self._arena.give(start)
                raise
            event.record(torch.cuda.current_stream(self._device))
            self._under_way.append((event, start))
            return there
