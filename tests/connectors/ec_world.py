"""The EC connector's scheduler half without vLLM: requests, and what vLLM's scheduler does with them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch

from connectors.ec_media import Media
from connectors.ec_scheduler import ECScheduler
from connectors.ec_types import StagedItem
from kvstore.codec import Slot
from kvstore.keys import item_key
from kvstore.store import Space, Store
from tests.store.world import open_space

ROWS, WIDTH = 4, 8
#: An image that only `grid` describes brings no pixels.
MEDIA = Media({"image": {"grid"}})
DESCRIPTION = {"grid": (1, 2, 2)}
PIXELS = {"pixels": b"...", **DESCRIPTION}


@dataclass
class FakeRequest:
    """As much of vLLM's `Request` as the connector reads."""

    request_id: str
    identifiers: list[str]
    mm_features: list[Any] = field(init=False)
    lora_request: Any = None
    ec_transfer_params: Any = None
    #: What each item brings: fields and what is in them.
    brings: dict[str, Any] = field(default_factory=lambda: PIXELS)
    rows: int = ROWS

    def __post_init__(self) -> None:
        self.mm_features = [
            SimpleNamespace(
                identifier=one,
                modality="image",
                data={name: SimpleNamespace(data=value) for name, value in self.brings.items()},
                mm_position=SimpleNamespace(offset=10 * i, length=self.rows),
            )
            for i, one in enumerate(self.identifiers)
        ]

    def get_num_encoder_embeds(self, index: int) -> int:
        return self.rows


@dataclass
class Step:
    """What one pass of vLLM's scheduler made of a request."""

    loads: dict[str, StagedItem]
    encoded: set[str]
    saves: set[str]


class FakeEngine:
    """One engine: vLLM's encoder cache and its scheduler's way of asking, around a real `ECScheduler`."""

    def __init__(self, store: Store, **changes: Any) -> None:
        options: dict[str, Any] = {
            "dtype": torch.float32,
            "hidden": WIDTH,
            "widths": dict,
            "media": MEDIA,
            "consumer": True,
            "producer": True,
            "tower_lora": False,
        }
        self.half = ECScheduler(store, open_space(store), **options | changes)
        self.cached: set[str] = set()
        self._freed: set[str] = set()

    def step(self, request: FakeRequest) -> Step | None:
        """One pass; None if the request has to wait."""
        encoded = set()
        ready = self.half.ensure_cache_available(request, 0)  # type: ignore[arg-type]
        for index, feature in enumerate(request.mm_features if ready else ()):
            if feature.identifier in self.cached:
                continue
            if not self.half.has_cache_item(feature.identifier):
                encoded.add(feature.identifier)
            self.cached.add(feature.identifier)
            self.half.update_state_after_alloc(request, index)  # type: ignore[arg-type]
        output = SimpleNamespace(free_encoder_mm_hashes=list(self._freed))
        self._freed.clear()
        meta = self.half.build_connector_meta(output)  # type: ignore[arg-type]
        return Step(meta.loads, encoded, meta.saves) if ready else None

    def run(self, request: FakeRequest, *, within_s: float = 10.0) -> Step:
        """Passes until the request goes on."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            if (step := self.step(request)) is not None:
                return step
            time.sleep(0.001)
        raise AssertionError("the request still waits")

    def fails(self, request: FakeRequest, *, within_s: float = 10.0) -> float:
        """Passes until the request is failed; how long that took."""
        began = time.monotonic()
        while time.monotonic() < began + within_s:
            assert self.step(request) is None, "the request goes on"
            if request.request_id in self.half.take_unavailable_requests():
                return time.monotonic() - began
            time.sleep(0.001)
        raise AssertionError("the request still waits")

    def drop(self, *identifiers: str) -> None:
        """The encoder cache gives items up for others, and says so."""
        self.cached.difference_update(identifiers)
        self._freed.update(identifiers)

    def finish(self, request: FakeRequest) -> dict[str, Any] | None:
        """The request is over, however it ended."""
        return self.half.request_finished(request)  # type: ignore[arg-type]


def put(space: Space, identifier: str, rows: int = ROWS) -> None:
    """Store an item as a producer would."""
    data = memoryview(bytearray(rows * WIDTH * 4))
    space.save([Slot(item_key(identifier), data, "F32", (rows, WIDTH))])
