"""With `admission` two real engines save what is used twice, and nothing else: blocks and items."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import Engine, random_image
from tests.e2e.sharing import BLOCK, check_store, prompt, scheduler_counters
from tools.models import IMAGE_TOKEN

pytestmark = pytest.mark.engine

LONG = prompt(1000, 1)  # 31 blocks
SHARED = 320
BRANCH = {"prompt_token_ids": LONG["prompt_token_ids"][:SHARED] + prompt(300, 2)["prompt_token_ids"]}
SHORT = prompt(100, 3)  # 3 blocks
PICTURE = {"prompt": f"w20 w30 {IMAGE_TOKEN['image']} w40", "images": [random_image(1)]}


def test_the_second_use_is_stored_and_the_third_is_served(
    image_model: Path, tmp_path: Path, store_config: Any
) -> None:
    config = store_config("redis") | {"admission": {"second_use": True, "min_blocks": 4}}

    def stored(engine: Engine) -> int:
        """Blocks and items in the store, all of them whole."""
        engine.idle(0.2)
        return check_store(config)["blocks"]

    with Engine(image_model, kv=config, ec=config, log_path=tmp_path / "1.log") as engine:
        [cold] = engine.generate([LONG])
        [picture] = engine.generate([PICTURE])
        for _ in range(2):
            # Long enough to be used twice, too short to be saved.
            engine.generate([SHORT])
            engine.reset_prefix_cache()
        assert stored(engine) == 0
        assert scheduler_counters(engine)["save_blocks{not_admitted}"] == 31 + 2 * 3
        assert scheduler_counters(engine, "ec")["save_blocks{not_admitted}"] == 1
        # A client can't have its prompt stored by asking as a proxy would: this engine hands nothing over.
        [asked] = engine.generate(
            [prompt(700, 5)], max_tokens=1, extra_args={"kv_transfer_params": {"do_remote_decode": True}}
        )
        assert asked.kv_params is None
        assert stored(engine) == 0
        # Another prompt uses the head of the first: that much of it is stored, though its only step
        # may be over before the index has answered.
        [branch] = engine.generate([BRANCH], max_tokens=1)
        assert (branch.external_tokens, branch.local_tokens) == (0, 0)
        assert stored(engine) == SHARED // BLOCK

    with Engine(image_model, kv=config, ec=config, log_path=tmp_path / "2.log") as engine:
        # What the first engine has noted counts here: the whole prompt, and the picture.
        [second] = engine.generate([LONG])
        assert (second.token_ids, second.external_tokens) == (cold.token_ids, SHARED)
        assert stored(engine) == 31
        [again] = engine.generate([PICTURE])
        assert again.token_ids == picture.token_ids
        assert engine.encoder_calls() == 1
        assert stored(engine) == 31 + 1
        engine.reset_prefix_cache()
        [third] = engine.generate([LONG])
        assert (third.token_ids, third.external_tokens) == (cold.token_ids, 31 * BLOCK)
        # A prompt that begins with it, for the first time: what it adds isn't worth saving yet.
        longer = {"prompt_token_ids": LONG["prompt_token_ids"] + prompt(200, 4)["prompt_token_ids"]}
        engine.generate([longer])
        assert stored(engine) == 31 + 1
        assert "note_failures" not in scheduler_counters(engine)
