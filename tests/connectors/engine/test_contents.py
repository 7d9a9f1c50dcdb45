"""What an item is: a digest of its processed input, made once, of vLLM's own objects."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

import torch
from vllm.multimodal.inputs import MultiModalBatchedField, MultiModalFieldElem, MultiModalKwargsItem

from connectors.engine.contents import HANDLE, Contents, content_digest
from connectors.engine.media import Media
from connectors.engine.step import RequestView
from tests.fake_vllm import FakeFeature, FakeRequest

pytestmark = pytest.mark.engine

PIXELS = torch.arange(24, dtype=torch.float32)


def item(**fields: Any) -> MultiModalKwargsItem:
    """vLLM's own object."""
    field = MultiModalBatchedField()
    return MultiModalKwargsItem({name: MultiModalFieldElem(value, field) for name, value in fields.items()})


def of(contents: Contents, data: Any, name: str = "cat", **more: Any) -> bytes | None:
    request = FakeRequest("r", [], mm_features=[FakeFeature(name, data=data)], **more)
    return contents.of(RequestView(request), 0)


def test_golden_digests() -> None:
    """A change makes every cache of items cold, and is one of the format's: docs/format.md."""
    made = content_digest("image", {"pixels": PIXELS.view(2, 12), "grid": [1, 2, None, True, 0.5, "x", b"y"]})
    assert made.hex() == "5440c9a68c4326a9d99b27280a1bcdc3c13761827c5319af31469aaa1795f858"


#: Every one another item than every other.
DIFFERENT: list[tuple[str, dict[str, Any]]] = [
    ("image", {"pixels": PIXELS}),
    ("video", {"pixels": PIXELS}),
    ("image", {"pixel": PIXELS}),
    ("image", {"pixels": PIXELS.view(2, 12)}),
    ("image", {"pixels": PIXELS.view(12, 2)}),
    ("image", {"pixels": PIXELS.view(torch.int32)}),
    ("image", {"pixels": PIXELS.to(torch.bfloat16)}),
    ("image", {"pixels": PIXELS.flip(0)}),
    ("image", {"pixels": [PIXELS]}),
    ("image", {"pixels": [PIXELS[:12], PIXELS[12:]]}),
    ("image", {"pixels": PIXELS, "grid": None}),
    ("image", {"pixels": PIXELS, "grid": torch.empty(0)}),
    ("image", {"pixels": PIXELS, "grid": torch.empty(0, 3)}),
    ("image", {"pixels": PIXELS, "grid": torch.tensor(1)}),
    ("image", {"pixels": PIXELS, "grid": torch.tensor([1])}),
    ("image", {"pixels": PIXELS, "grid": 1}),
    ("image", {"pixels": PIXELS, "grid": 1.0}),
    ("image", {"pixels": PIXELS, "grid": "1"}),
    ("image", {"pixels": PIXELS, "grid": b"1"}),
    ("image", {"pixels": PIXELS, "grid": [1, [2]]}),
    ("image", {"pixels": PIXELS, "grid": [[1], 2]}),
    ("image", {"pixels": PIXELS, "grid": {"a": 1}}),
    ("image", {"pixels": PIXELS.numpy()}),
    ("image", {"pixels": PIXELS.numpy().astype(np.float64)}),
    ("image", {}),
]


def test_whatever_differs_in_anything_is_another_item() -> None:
    made = [content_digest(modality, data) for modality, data in DIFFERENT]
    assert len(set(made)) == len(DIFFERENT)
    assert {len(one) for one in made} == {32}


def test_how_the_same_lies_in_memory_does_not_matter() -> None:
    strided = torch.stack([PIXELS, PIXELS], dim=1)[:, 0]
    assert not strided.is_contiguous()
    plain = content_digest("image", {"a": PIXELS, "b": 1})
    assert content_digest("image", {"b": 1, "a": strided}) == plain
    assert content_digest("image", {"b": 1, "a": PIXELS.clone().requires_grad_()}) == plain


def test_it_is_made_once_per_object_and_forgotten_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    contents, data = Contents(Media({})), item(pixels=PIXELS)
    first = of(contents, data)
    assert first == content_digest("image", {"pixels": PIXELS})
    monkeypatch.setattr("connectors.engine.contents.content_digest", lambda *_: pytest.fail("made again"))
    assert of(contents, data, "another name", cache_salt="s") == first
    assert len(contents) == 1
    del data
    gc.collect()
    assert len(contents) == 0


def test_a_description_is_no_picture() -> None:
    """Two pictures of one size have the same one."""
    contents = Contents(Media({"image": {"grid"}}))
    description, whole = item(grid=torch.tensor([1, 2, 2])), content_digest("image", {"pixels": PIXELS})
    assert of(contents, description) is None
    told: Any = {"cat": {HANDLE: whole.hex()}}
    assert of(contents, description, ec_transfer_params=told) == whole
    assert of(contents, description, "dog", ec_transfer_params=told) is None
    # What the request brings itself counts, whatever it says of it.
    assert of(contents, item(pixels=PIXELS[1:]), ec_transfer_params=told) != whole
    for odd in (None, 7, "x", whole.hex()[:-2], whole.hex()[:-1] + "x", " " * 64, [whole.hex()]):
        assert of(contents, description, ec_transfer_params={"cat": {HANDLE: odd}}) is None
    for odd in ([], "x", {"cat": whole.hex()}, {"cat": None}):
        assert of(contents, description, ec_transfer_params=odd) is None


def test_what_can_not_be_told_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    contents = Contents(Media({}))
    assert of(contents, None) is None
    assert of(contents, item(pixels=PIXELS), "x" * 1025) is None
    assert caplog.text == ""
    for _ in range(2):
        assert of(contents, item(address=1, monotonic_id=2, signature=[3])) is None
        assert of(contents, item(pixels={1, 2})) is None
    assert caplog.text.count("is not cached") == 1
    assert "--mm-processor-cache-type lru" in caplog.text
    assert len(contents) == 0
