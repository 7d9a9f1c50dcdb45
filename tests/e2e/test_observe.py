"""Engines that only observe: the same tokens as without a store, nothing stored, and a recording of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.advise.traces import Assumed, Trace, read_traces
from kvstore.admin.progress import Silent
from tests.e2e.engine import Engine, random_image
from tests.e2e.sharing import extended, full_blocks, prompt
from tools.models import IMAGE_TOKEN

pytestmark = pytest.mark.engine

PICTURE = {"prompt": f"w20 w30 {IMAGE_TOKEN['image']} w40", "images": [random_image(1)]}
OTHER = {"prompt": f"w20 w30 {IMAGE_TOKEN['image']} w40", "images": [random_image(2)]}


def config(folder: Path, section: str) -> dict[str, Any]:
    return {section: {"observe": True}, "trace": {"folder": str(folder)}}


def read(folder: Path) -> Trace:
    return read_traces([folder], Assumed(), Silent())


def test_an_engine_serves_as_without_a_store(text_model: Path, tmp_path: Path) -> None:
    first = prompt(640, 80)
    prompts = [first, extended(first, 320, 81), prompt(100, 82)]
    traces = tmp_path / "traces"
    with (
        Engine(text_model, kv=config(traces, "kv"), log_path=tmp_path / "observes.log") as engine,
        Engine(text_model, log_path=tmp_path / "bare.log") as bare,
    ):
        for one in prompts:
            [found], [expected] = engine.generate([one], max_tokens=4), bare.generate([one], max_tokens=4)
            assert found.token_ids == expected.token_ids
            assert (found.external_tokens, found.local_tokens) == (0, expected.local_tokens)
    trace = read(traces)
    assert [len(one.chain) for one in trace.requests] == [full_blocks(one) // 32 for one in prompts]
    assert [one.local for one in trace.requests] == [0, 20, 0]
    assert trace.costs and all(cost.token_us > 0 for cost in trace.costs)
    assert {path.name for path in tmp_path.iterdir()} == {"traces", "observes.log", "bare.log"}
    assert "observes only" in (tmp_path / "observes.log").read_text()


def test_items_are_recorded_as_they_are_encoded(image_model: Path, tmp_path: Path) -> None:
    traces = tmp_path / "traces"
    with Engine(
        image_model, ec=config(traces, "ec"), log_path=tmp_path / "engine.log", enable_prefix_caching=False
    ) as engine:
        for one in (PICTURE, OTHER, PICTURE):
            engine.generate([one], max_tokens=2)
        assert engine.encoder_calls() == 2  # its own cache has what it saw
        engine.reset_mm_cache()
        engine.generate([PICTURE], max_tokens=2)
    trace = read(traces)
    assert [one.chain for one in trace.requests] == [[0], [1], [0]]
    assert [one.local for one in trace.requests] == [0, 0, 0]
    [space] = trace.spaces
    assert (space.kind, space.parts) == ("ec", 1) and space.block_bytes > 1000
