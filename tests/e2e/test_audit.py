"""KV blocks that were stored wrong, with right checksums, and an engine that computes one load in so many.

The writer is patched: its attention state is right in the engine and wrong in what it hands to the store, as
with a copy that takes the wrong stream or the wrong stride.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.backends import Cache
from kvstore.admin.explain.explain import explain_tokens
from kvstore.admin.explain.lookup import Lookup
from kvstore.build import load_settings
from tests.e2e.engine import Engine
from tests.e2e.sharing import full_blocks, prompt, scheduler_counters, segment_files
from tests.waiting import until

pytestmark = pytest.mark.engine

EVERY = 4
PROMPTS = [prompt(256, 40 + i) for i in range(2)]
#: Run in the writer's process.
SPOIL = "__import__('tests.e2e.engine_patches', fromlist=['x']).store_wrong_bytes()"


def test_blocks_that_were_stored_wrong_are_found_evicted_and_explained(
    text_model: Path, tmp_path: Path, store_config: Any
) -> None:
    config = store_config("sqlite") | {"segment": {"max_blocks": 64}}
    with Engine(text_model, log_path=tmp_path / "none.log") as engine:
        expected = [one.token_ids for one in engine.generate(PROMPTS)]
    with Engine(text_model, kv=config, log_path=tmp_path / "writer.log") as engine:
        engine.evaluate(SPOIL)
        assert [one.token_ids for one in engine.generate(PROMPTS)] == expected, "the writer itself is right"
        engine.idle(0.5)
    spoiled = {path.name.split(".")[0] for path in segment_files(tmp_path / "payloads")}
    assert len(spoiled) == 2
    config["kv"] = config.get("kv", {}) | {"audit_every": EVERY}
    with Engine(text_model, kv=config, log_path=tmp_path / "reader.log") as engine:

        def served(number: int) -> tuple[bool, int]:
            """Whether the tokens are right, and how many of the prompt came from the store."""
            engine.reset_prefix_cache()
            [one] = engine.generate([PROMPTS[number]])
            engine.idle(0.3)
            return one.token_ids == expected[number], one.external_tokens

        full = full_blocks(PROMPTS[0])
        seen = [served(0) for _ in range(EVERY)]
        # Until the audit the checksums vouch for what is wrong: this is what it is there for.
        assert seen[:-1] == [(False, full)] * (EVERY - 1)
        # The one that is compared computes all of it.
        assert seen[-1] == (True, 0)
        until(lambda: "is not what this engine computes" in engine.log(), say=engine.log)
        # Never loaded again: computed, saved, and loaded as it is right.
        assert served(0) == (True, 0)
        assert served(0) == (True, full)
        # The second one is found as soon, and then the engine leaves the namespace alone.
        seen = [served(1) for _ in range(EVERY)]
        assert seen[-1] == (True, 0) and (False, full) in seen
        assert [served(number) for number in (0, 1, 0, 1)] == [(True, 0)] * 4
        assert scheduler_counters(engine)["miss_blocks{audited}"] == 2 * full // 32
        metrics = engine.metrics()
        # Two were declined, and two found wrong.
        assert metrics["vllm:kvstore_kv_audits_total"] == 4
        # What computing takes was not known before the first audit; of what came then there is regret.
        assert metrics["vllm:kvstore_kv_measured_regret_ratio_count"] >= 1
        assert metrics["vllm:kvstore_kv_regret_ratio_count"] >= EVERY - 1
    with Cache(load_settings(config, environ={})) as cache:
        report = explain_tokens(Lookup(cache, time.time(), verify=True), PROMPTS[1]["prompt_token_ids"])
    assert report.chain is not None
    [stop] = [group.stop for group in report.chain.groups]
    assert stop is not None
    causes = {one.cause: one.text for one in stop.findings}
    assert "differed from what the engine computed" in causes["wrong"] and "audit" in causes["evicted"], (
        causes
    )
    # What was stored, and what was computed in its place, both lie beside the payloads for whoever looks into
    # it, and no lister serves them.
    assert spoiled.isdisjoint(path.name.split(".")[0] for path in segment_files(tmp_path / "payloads"))
    there = {path.name.split(".")[0] for path in segment_files(tmp_path / "payloads" / "evidence")}
    assert spoiled <= there and len(there) >= 4
