"""How long a step's encoder took, and what of it one item accounts for.

vLLM encodes all items of a step, then hands them over for saving one by one. So the time is that from the
moment the connector has done its part to the first item handed over; on CUDA that between two events of the
engine's stream, since the engine's thread only sends the work. The items share it by their rows, which is
exact for an encoder that takes as long for one row as for another, and near it for others.
"""

from __future__ import annotations

import time
from typing import Any

import torch


class Encoding:
    """One step's. The engine's thread calls all but `cost_us`."""

    def __init__(self, device: torch.device) -> None:
        """The encoder is about to start."""
        self._device = device
        self._rows = 0
        self._began = self._mark()
        self._ended: Any = None

    def made(self, rows: int) -> None:
        """The encoder has run, and this item of so many rows is one of those it made."""
        if self._ended is None:
            self._ended = self._mark()
        self._rows += rows

    def cost_us(self, rows: int) -> int:
        """The share of an item of so many rows, in microseconds. Any thread, after all were told of; waits
        for the device."""
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
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event
