"""What an EC connector that only observes records of an item."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from connectors.observing.ec import EncodedItems
from kvstore.admin.advise.traces import Assumed, read_traces
from kvstore.admin.progress import Silent
from kvstore.build import load_settings, open_recording
from schemas.namespace import Namespace

pytestmark = pytest.mark.engine  # the full set-up, not an engine


def test_an_item_is_recorded_as_one_that_the_engine_lacks(tmp_path: Path) -> None:
    settings = load_settings({"ec": {"observe": True}, "trace": {"folder": str(tmp_path)}}, {})
    eyes = Namespace(kind="ec", model="eyes", weights="w", dtype="bfloat16")
    engine: Any = SimpleNamespace(
        media=SimpleNamespace(is_output=lambda _: False),
        tower_lora=False,
        widths=dict,
        hidden=64,
        dtype="BF16",
    )
    items = EncodedItems(open_recording(settings), eyes, engine, gpus=4)
    feature = SimpleNamespace(identifier="picture", modality="image")
    view: Any = SimpleNamespace(
        mm_features=[feature], lora_request=None, cache_salt="", get_num_encoder_embeds=lambda _: 10
    )
    items.add(view, 0)
    items.close()
    trace = read_traces([tmp_path], Assumed(), Silent())
    [request], [space] = trace.requests, trace.spaces
    assert (request.chain, request.local) == ([0], 0)
    assert (space.kind, space.block_bytes, space.gpus) == ("ec", 10 * 64 * 2, 4)
