"""At the volume of a GPU: the KV cache of a model of 8 billion parameters, steps that compute more than the
staging memory holds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import Engine
from tests.e2e.sharing import BLOCK, check_store, full_blocks, prompt, worker_counters

pytestmark = pytest.mark.engine

#: In float32 a block is 8 MiB, so a step is up to 512 MiB.
STEP_TOKENS = 2048
PROMPTS = [prompt(2600, 1), *(prompt(300 + 40 * seed, seed) for seed in range(2, 6))]


def test_every_block_of_every_step_is_stored(
    model: Callable[..., Path], tmp_path: Path, store_config: Any
) -> None:
    config = store_config("sqlite")
    engine_config = {"max_num_batched_tokens": STEP_TOKENS, "kv_cache_memory_bytes": 2 << 30}
    with Engine(model("volume"), kv=config, log_path=tmp_path / "1.log", **engine_config) as engine:
        cold = engine.generate(PROMPTS, max_tokens=4)
        engine.idle(0.0)
        counters = worker_counters(engine)
    blocks = sum(full_blocks(one) for one in PROMPTS) // BLOCK
    assert check_store(config)["blocks"] == blocks, counters
    with Engine(model("volume"), kv=config, log_path=tmp_path / "2.log", **engine_config) as engine:
        warm = engine.generate(PROMPTS, max_tokens=4)
    assert [one.external_tokens for one in warm] == [full_blocks(one) for one in PROMPTS]
    assert [one.token_ids for one in warm] == [one.token_ids for one in cold]
