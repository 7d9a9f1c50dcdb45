"""The EC connector's scheduler half without vLLM: requests, and what vLLM's scheduler does with them."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from connectors.ec.engine import ECEngine
from connectors.ec.messages import StagedItem
from connectors.ec.scheduler import ECScheduler
from connectors.engine.contents import HANDLE, content_digest
from connectors.engine.media import Media
from kvstore.format.segment import Slot
from kvstore.keys import ContentKey, item_key, salt_id
from kvstore.store.space import Space
from kvstore.store.store import Store
from tests.fake_vllm import FakeData, FakeFeature, FakeField, FakePlace, FakeRequest, FakeStep
from tests.store.world import open_space
from tests.waiting import PATIENCE_S

ROWS, WIDTH = 4, 8
#: An image that only `grid` describes brings no pixels.
MEDIA = Media({"image": {"grid"}})
DESCRIPTION = {"grid": (1, 2, 2)}
PIXELS = {"pixels": b"...", **DESCRIPTION}


def pixels(name: str) -> dict[str, Any]:
    """What the picture of this name is, where clients are honest."""
    return {**PIXELS, "pixels": name.encode()}


def content(name: str) -> bytes:
    """The digest of the picture of this name."""
    return content_digest("image", pixels(name))


def key(name: str, salt: str = "") -> ContentKey:
    """The content key of the picture of this name."""
    return item_key(content(name), salt)


def told(*names: str) -> dict[str, dict[str, Any]]:
    """What a producer has told of these pictures, as far as it says what they are."""
    return {name: {HANDLE: content(name).hex()} for name in names}


class ItemRequest(FakeRequest):
    """A request of multimodal items. What it only describes comes with what a producer has told of it."""

    def __init__(
        self,
        request_id: str,
        identifiers: list[str],
        *,
        brings: dict[str, Any] = PIXELS,
        rows: int = ROWS,
        pictures: list[str] | None = None,
        **more: Any,
    ) -> None:
        """`brings` is what comes with each item: fields and what is in them; `pictures` are their names, if
        they are others than what the client calls them."""
        fields = [pixels(one) if brings is PIXELS else brings for one in pictures or identifiers]
        if brings is DESCRIPTION:
            params = more.get("ec_transfer_params") or {}
            more["ec_transfer_params"] = {
                one: entry | params.get(one, {}) for one, entry in told(*identifiers).items()
            }
        super().__init__(
            request_id,
            [],
            mm_features=[
                FakeFeature(
                    one,
                    data=FakeData({name: FakeField(value) for name, value in data.items()}),
                    mm_position=FakePlace(10 * i, rows),
                )
                for i, (one, data) in enumerate(zip(identifiers, fields, strict=True))
            ],
            **more,
        )


@dataclass
class Step:
    """What one pass of vLLM's scheduler made of a request."""

    loads: dict[str, StagedItem]
    encoded: set[str]
    #: What is saved of what this step encodes, and of what the workers hold.
    saves: set[str]
    keys: dict[str, ContentKey]


class FakeEngine:
    """One engine: vLLM's encoder cache and its scheduler's way of asking, around a real `ECScheduler`."""

    def __init__(self, store: Store, **changes: Any) -> None:
        options: dict[str, Any] = {
            "dtype": "F32",
            "hidden": WIDTH,
            "widths": dict,
            "media": MEDIA,
            "consumer": True,
            "producer": True,
            "tower_lora": False,
        }
        self.half = ECScheduler(store, open_space(store), ECEngine(**options | changes))
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
        output = FakeStep(free_encoder_mm_hashes=list(self._freed))
        self._freed.clear()
        meta = self.half.build_connector_meta(output)  # type: ignore[arg-type]
        keys = {**meta.saves, **meta.held}
        return Step(meta.loads, encoded, set(keys), keys) if ready else None

    def run(self, request: FakeRequest, *, within_s: float = PATIENCE_S) -> Step:
        """Passes until the request goes on."""
        until = time.monotonic() + within_s
        while time.monotonic() < until:
            if (step := self.step(request)) is not None:
                return step
            time.sleep(0.001)
        raise AssertionError("the request still waits")

    def fails(self, request: FakeRequest, *, within_s: float = PATIENCE_S) -> float:
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


def put(space: Space, name: str, rows: int = ROWS, salt: str = "") -> None:
    """Store the output of the picture of this name, as a producer would."""
    data = memoryview(bytearray(rows * WIDTH * 4))
    space.save([Slot(key(name, salt), data, "F32", (rows, WIDTH))], salt=salt_id(salt))
