"""Minutes of everything at once on one engine: no wrong answer, and nothing left over.

In the suite it takes half a minute; `make soak` gives it five.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import Engine, random_tokens
from tests.e2e.storm import MOST_TOKENS

pytestmark = [pytest.mark.engine, pytest.mark.slow]

SECONDS = float(os.environ.get("STORM_SECONDS", "12"))
#: A pool of less than two of the longest requests, so that twelve preempt one another.
OPTIONS = {
    "max_num_batched_tokens": 256,
    "max_num_seqs": 12,
    "max_model_len": 1024,
    "kv_cache_memory_bytes": 6 << 20,
}


def prompts() -> list[list[int]]:
    """Some with a common head, some that end with a block, some shorter than one."""
    source = random.Random(7)
    heads = [random_tokens(length, 100 + length) for length in (96, 320, 500)]
    made = [[*source.choice(heads), *random_tokens(source.randint(1, 300), i)] for i in range(16)]
    return [*made, *(random_tokens(length, length) for length in (20, 32, 64, 640, 900))]


@pytest.mark.timeout(int(900 + 3 * SECONDS))
@pytest.mark.parametrize("kind", ["text", "window"])
def test_a_storm_leaves_nothing_behind(
    kind: str, model: Callable[..., Path], tmp_path: Path, store_config: Any
) -> None:
    config = store_config("sqlite")
    config |= {
        "kv": config["kv"] | {"save_decode": True, "staging_bytes": "8MiB"},
        "segment": {"max_blocks": 8},
    }
    script = tmp_path / "script.json"
    with Engine(
        model(kind), log_path=tmp_path / "0.log", **OPTIONS | {"kv_cache_memory_bytes": 256 << 20}
    ) as engine:
        asked = prompts()
        answers = engine.generate([{"prompt_token_ids": one} for one in asked], max_tokens=MOST_TOKENS)
        script.write_text(
            json.dumps(
                [
                    {"prompt": one, "answer": answer.token_ids}
                    for one, answer in zip(asked, answers, strict=True)
                ]
            )
        )
    with Engine(model(kind), kv=config, log_path=tmp_path / "1.log", **OPTIONS) as engine:
        call = (
            "__import__('tests.e2e.storm', fromlist=['x'])"
            f".run(served, {str(script)!r}, {str(tmp_path / 'payloads')!r}, {SECONDS}, 1)"
        )
        seen = engine.evaluate(call, within_s=600 + 2 * SECONDS)
    print(json.dumps(seen, indent=2))
    assert seen["wrong"] == []
    assert seen["left"] == {}
    # It was a storm.
    for name in ("finished", "aborted", "preempted", "evicted", "damaged", "loaded_blocks", "stored_blocks"):
        assert seen[name] > 0, name
