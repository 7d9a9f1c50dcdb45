"""How long a step's encoder took, and each item's share of that.

vLLM encodes all items of a step, then hands them over for saving one by one. So the time is measured from the
end of the connector's own work to the first item handed over; on CUDA between two events on the engine's
stream, since the engine's thread only enqueues the work. The items share it by their rows. That is exact for
an encoder that takes as long for one row as for another, and close for other encoders.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class Encoding:
    """Times one step's encoder. The engine's thread calls all but `cost_us`."""

    def __init__(self, device: torch.device) -> None:
        """Starts the clock: the encoder is about to run."""
        self._device = device
        self._rows = 0
        self._began = self._mark()
        self._ended: Any = None

    def made(self, rows: int) -> None:
        """Counts an item of `rows` rows that the encoder has made. The first one stops the clock."""
        if self._ended is None:
            self._ended = self._mark()
        self._rows += rows

    def cost_us(self, rows: int) -> int:
        """Returns the share of an item of `rows` rows, in microseconds; 0 if the encoder made none.

        Any thread may ask once all of the step's items were counted. On CUDA it waits for the device.
        """
        if self._ended is None or not self._rows:
            return 0
        if self._device.type == "cuda":
            self._ended.synchronize()
            took_us = self._began.elapsed_time(self._ended) * 1e3
        else:
            took_us = (self._ended - self._began) * 1e6
        return int(took_us * rows / self._rows)

    def _mark(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True, blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
