"""Compares an encoder output that a worker has just made with what the store has under its name."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import torch

from connectors.distance import Tolerance, distances
from connectors.ec.memory import ItemCopy
from connectors.ec.messages import StagedItem
from connectors.engine.tensors import HostCopy
from kvstore.keys import ContentKey
from kvstore.threads.transfers import Transfers

log = logging.getLogger(__name__)


class ItemProofs:
    """The comparisons of one rank. `start` and `take` are the engine thread's; transfer threads compare."""

    def __init__(self, transfers: Transfers) -> None:
        self._transfers = transfers
        self._lock = threading.Lock()
        # The lock guards the field below it.
        self._compared: dict[ContentKey, bool | None] = {}

    def __bool__(self) -> bool:
        return bool(self._compared)

    def start(self, staged: StagedItem, copy: HostCopy | ItemCopy | None) -> None:
        """Queue the comparison of an output with the staged item; what finds no room is not compared."""
        if copy is None:
            self._ended(staged, None)
            return
        after = copy.wait if copy.under_way else None
        if not self._transfers.write(staged.nbytes, lambda: self._compare(staged, copy), after):
            # Not for this thread to wait for.
            self._transfers.in_turn(lambda: self._discard(staged, copy))

    def _discard(self, staged: StagedItem, copy: HostCopy | ItemCopy) -> None:
        copy.wait()
        copy.release()
        self._ended(staged, None)

    def take(self) -> dict[ContentKey, bool | None]:
        """Returns the items compared since the last call -> whether they are alike, or None if that can't be
        told."""
        with self._lock:
            compared, self._compared = self._compared, {}
        return compared

    def _compare(self, staged: StagedItem, copy: HostCopy | ItemCopy) -> None:
        alike: bool | None = None
        try:
            data, dtype, shape = copy.wait()
            stored = bytearray(Path(staged.path).read_bytes())
            if (dtype, shape, len(stored)) != (staged.dtype, (staged.rows, staged.width), data.nbytes):
                alike = False
            else:
                mine, theirs = (torch.frombuffer(bytearray(one), dtype=torch.uint8) for one in (data, stored))
                apart = distances(mine[None], theirs[None], dtype, (1, 1, staged.rows, staged.width))
                tolerance = Tolerance(dtype)
                if tolerance.proves(apart):
                    alike = True
                elif not tolerance.judge(apart):
                    alike = False
        except OSError as exc:
            log.debug("an item is not compared: %s", exc)
        finally:
            copy.release()
            self._ended(staged, alike)

    def _ended(self, staged: StagedItem, alike: bool | None) -> None:
        with self._lock:
            self._compared[staged.key] = alike
