"""A prompt that waits behind a full engine starts with its payloads in the node's folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import Engine, random_image
from tests.e2e.sharing import BLOCK, full_blocks, prompt, scheduler_counters, segment_files, worker_counters
from tests.waiting import until
from tools.models import IMAGE_TOKEN

pytestmark = [pytest.mark.engine, pytest.mark.servers]

#: Four segments, of eight blocks at most.
PROMPT = prompt(32 * 30 + 5, 900)
#: Longer than anything takes here; it is aborted. Without a whole block it is looked up nowhere, so that it
#: starts first, however late answers are.
LONG = prompt(BLOCK - 1, 901, max_tokens=3900)
#: A session's: two segments.
TALK = prompt(BLOCK * 16 + 5, 905) | {"session": "talk"}
#: Nothing is looked up of it.
TINY = prompt(3, 906, max_tokens=1) | {"session": "talk", "kv_hints": {"prefetch": True}}
OUTCOMES = ("brought", "used", "wasted", "failed", "hinted")


def ahead(engine: Engine) -> list[int]:
    """Segments that were brought ahead, used, wasted, that failed to come, and that a hint has brought."""
    counts = scheduler_counters(engine)
    return [counts.get(f"prefetch_segments{{{one}}}", 0) for one in OUTCOMES]


@pytest.fixture
def written(text_model: Path, tmp_path: Path, store_config: Callable[[str], dict[str, Any]]) -> Any:
    """The settings of a node whose folder is empty, the prompts in its bucket, and the first one's tokens."""
    config = store_config("tiered") | {"segment": {"max_blocks": 8}}
    other = config | {"payloads": config["payloads"]["slow"]}
    with Engine(text_model, log_path=tmp_path / "plain.log") as engine:
        expected = engine.generate([PROMPT])[0].token_ids
    with Engine(text_model, kv=other, log_path=tmp_path / "writer.log") as engine:
        assert engine.generate([PROMPT])[0].token_ids == expected
        engine.generate([TALK])
    return config, expected


def test_a_prompt_that_waits_starts_with_its_payloads_on_the_node(
    written: Any, text_model: Path, tmp_path: Path
) -> None:
    config, expected = written
    with Engine(text_model, kv=config, log_path=tmp_path / "engine.log", max_num_seqs=1) as engine:
        _, waited = engine.generate([LONG, PROMPT], abort_after={0: "prefetched"})
        assert waited.token_ids == expected
        assert waited.external_tokens == full_blocks(PROMPT)
        assert ahead(engine) == [4, 4, 0, 0, 0]
        counts = worker_counters(engine)
        assert counts["tier_hits_fast"] >= 4
        assert "tier_hits_slow" not in counts, "the load went to the bucket"
        # One that has no folder's worth of time is aborted while it waits, and nothing is kept for it.
        engine.reset_prefix_cache()
        engine.generate([prompt(40, 902, max_tokens=64), PROMPT], abort_after={1: "waiting"})
        engine.idle(0.1)
        assert not any(engine.held().values()), engine.held()


def test_a_prompt_that_starts_at_once_fetches_nothing_ahead_and_a_hint_what_its_session_has(
    written: Any, text_model: Path, tmp_path: Path
) -> None:
    config, expected = written
    with Engine(text_model, kv=config, log_path=tmp_path / "engine.log", max_num_seqs=1) as engine:
        [result] = engine.generate([PROMPT])
        assert result.token_ids == expected and result.external_tokens == full_blocks(PROMPT)
        assert ahead(engine) == [0, 0, 0, 0, 0]
        before = worker_counters(engine)["tier_hits_slow"]
        assert before >= 4
        engine.generate([TINY])
        until(lambda: ahead(engine) == [2, 0, 0, 0, 2])
        [result] = engine.generate([TALK])
        assert result.external_tokens == full_blocks(TALK)
        assert ahead(engine) == [2, 2, 0, 0, 2]
        assert worker_counters(engine)["tier_hits_slow"] == before, "the load went to the bucket"
        assert not any(engine.held().values()), engine.held()
        # What was loaded is what was computed elsewhere.
        engine.reset_prefix_cache()
        assert engine.generate([TALK | {"cache_salt": "nobody's"}])[0].token_ids == result.token_ids


def test_nothing_is_fetched_ahead_without_a_budget(written: Any, text_model: Path, tmp_path: Path) -> None:
    config, expected = written
    config = config | {"payloads": config["payloads"] | {"prefetch_bytes": 0}}
    with Engine(text_model, kv=config, log_path=tmp_path / "engine.log", max_num_seqs=1) as engine:
        _, waited = engine.generate([prompt(40, 901, max_tokens=200), PROMPT])
        assert waited.token_ids == expected and ahead(engine) == [0, 0, 0, 0, 0]
        assert worker_counters(engine)["tier_hits_slow"] >= 4
        assert len(segment_files(tmp_path / "fast")) >= 4


def test_an_image_that_waits_is_on_the_node_when_its_request_starts(
    image_model: Path, tmp_path: Path, store_config: Callable[[str], dict[str, Any]]
) -> None:
    config = store_config("tiered")
    other = config | {"payloads": config["payloads"]["slow"]}
    asked = {"prompt": f"w20 w30 {IMAGE_TOKEN['image']} w40", "images": [random_image(7)]}
    long = {"prompt": "w20 w30 w40", "max_tokens": 900}
    with Engine(image_model, ec=other, log_path=tmp_path / "writer.log", max_model_len=1024) as engine:
        expected = engine.generate([asked])[0].token_ids
    with Engine(
        image_model,
        kv=config,
        ec=config,
        log_path=tmp_path / "engine.log",
        max_num_seqs=1,
        max_model_len=1024,
    ) as engine:
        _, waited = engine.generate([long, asked], abort_after={0: "prefetched"})
        assert waited.token_ids == expected
        assert engine.encoder_calls() == 0
        counts = scheduler_counters(engine, "ec")
        assert [counts.get(f"prefetch_segments{{{one}}}", 0) for one in OUTCOMES] == [1, 1, 0, 0, 0]
        assert counts["tier_hits_slow"] == 1, "it was fetched once, ahead"
