"""Encoder outputs on the fake accelerator: made-up pictures, and the encoder cache of a model runner.

An output is a view of what a step's encoder makes for all its items together, and is freed when the scheduler
says that it leaves the cache. What a request reads of it is checked on the engine's stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.outputs import ECConnectorOutput

import connectors.ec.connector
from connectors.engine.contents import content_digest
from kvstore.keys import item_key
from tests.fake_vllm import FakeData, FakeField
from trials.accelerator.contents import pattern
from trials.accelerator.device import CUDA, Accelerator

ROWS = 4
#: Number of different pictures, and of rows that an engine's encoder cache holds.
PICTURES, CACHED_ROWS = 12, 20
DTYPE = torch.bfloat16
_PIXELS = [FakeData({"pixel_values": FakeField(f"picture {number}".encode())}) for number in range(PICTURES)]
#: Content key -> picture.
KEYS = {
    item_key(content_digest("image", {name: one.data for name, one in data.items()})): number
    for number, data in enumerate(_PIXELS)
}


def feature(number: int, offset: int) -> MultiModalFeatureSpec:
    """A picture in a request."""
    data: Any = _PIXELS[number]
    return MultiModalFeatureSpec(data, "image", f"picture-{number}", PlaceholderRange(offset, ROWS))


def expected(number: int, width: int) -> np.ndarray:
    """The one right output of a picture: uint8 [rows, bytes]."""
    states = np.arange(ROWS, dtype=np.uint64) + np.uint64(1000 * (number + 1))
    made: np.ndarray = pattern(states, "encoder", range(1), width * DTYPE.itemsize)[0]
    return made


@dataclass(frozen=True)
class Budget:
    """In the place of vLLM's, which asks a processor."""

    encoder_compute_budget: int = 4 * ROWS
    encoder_cache_size: int = CACHED_ROWS


def on_device() -> list[Any]:
    """Patches that make an EC connector's worker half the first rank of one on the device."""
    return [
        mock.patch.object(connectors.ec.connector, "current_device", lambda: CUDA),
        mock.patch.object(connectors.ec.connector, "is_first_rank", lambda: True),
        mock.patch("vllm.v1.core.sched.scheduler.MultiModalBudget", lambda *_: Budget()),
    ]


class Encoder:
    """The encoder of a model runner and its cache, with the calls to the connector in vLLM's order."""

    def __init__(self, accelerator: Accelerator, connector: Any, width: int) -> None:
        self._accelerator, self._connector, self._width = accelerator, connector, width
        self._cache: dict[str, Any] = {}
        self._features: dict[str, list[MultiModalFeatureSpec]] = {}
        self.loads = self.checked = self.wrong_bytes = 0

    def prepare(self, output: Any) -> None:
        """Forget what the scheduler says is gone."""
        for identifier in output.free_encoder_mm_hashes:
            self._cache.pop(identifier, None)

    def knows(self, request_id: str, features: list[MultiModalFeatureSpec]) -> None:
        self._features[request_id] = features

    def step(self, output: Any) -> ECConnectorOutput:
        """Load, encode and save the items of one step."""
        connector, metadata = self._connector, output.ec_connector_metadata
        connector.bind_connector_metadata(metadata)
        connector.start_save_caches(encoder_cache=self._cache)
        connector.start_load_caches(self._cache)
        self.loads += len(metadata.loads)
        items = [
            self._features[name][i] for name, some in output.scheduled_encoder_inputs.items() for i in some
        ]
        if items:
            made = self._accelerator.allocate(torch.empty((len(items) * ROWS, self._width), dtype=DTYPE))
            contents = np.concatenate([expected(_number(one), self._width) for one in items])
            raw = made.raw.view(torch.uint8).numpy()
            self._accelerator.run(lambda: np.copyto(raw, contents))
            for i, one in enumerate(items):
                self._cache[one.identifier] = made[i * ROWS : (i + 1) * ROWS]
            del made
            for one in items:
                connector.save_caches(encoder_cache=self._cache, mm_hash=one.identifier)
        told = ECConnectorOutput()
        told.finished_sending, told.finished_recving = connector.get_finished(output.finished_req_ids)
        told.ec_connector_worker_meta = connector.build_connector_worker_meta()
        connector.clear_connector_metadata()
        return told

    def read(self, request_id: str, start: int, end: int) -> None:
        """Queue checks of the items that a request's positions `start` to `end - 1` look at."""
        for one in self._features[request_id]:
            at = one.mm_position
            if at.offset < end and at.offset + at.length > start:
                raw = self._cache[one.identifier].raw.view(torch.uint8).numpy()
                self._accelerator.run(partial(self._check, one, raw))

    def _check(self, one: MultiModalFeatureSpec, raw: np.ndarray) -> None:
        wrong = int((raw != expected(_number(one), self._width)).sum())
        self.checked += 1
        if wrong:
            self.wrong_bytes += wrong
            self._accelerator.report(f"a forward pass has read a wrong {one.identifier}: {wrong} bytes")


def _number(one: MultiModalFeatureSpec) -> int:
    return int(one.identifier.rpartition("-")[2])
