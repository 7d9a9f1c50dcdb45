"""A conversation that grows turn by turn, on one engine and then on another: same tokens, few segments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvstore.admin.backends import Cache
from kvstore.admin.repair.check import Depth
from kvstore.admin.repair.fsck import fsck
from kvstore.build import load_settings
from tests.e2e.engine import Engine
from tests.e2e.sharing import BLOCK, check_store, random_tokens, worker_counters
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.servers]

TURNS, TOKENS = 30, 100
CONVERSATION = random_tokens(TURNS * TOKENS, 70)


def turns(first: int, last: int) -> list[dict[str, Any]]:
    """The prompts of these turns."""
    ends = range(first * TOKENS, last * TOKENS + 1, TOKENS)
    return [{"prompt_token_ids": CONVERSATION[:end]} for end in ends]


def stored_after(engine: Engine, config: dict[str, Any]) -> int:
    """Lets an idle engine step; returns how many blocks are stored."""
    engine.idle(0.05)
    return check_store(config)["blocks"]


def test_a_conversation_lies_in_few_segments(text_model: Path, tmp_path: Path, store_config: Any) -> None:
    with Engine(text_model, log_path=tmp_path / "0.log") as engine:
        expected = [engine.generate([one])[0].token_ids for one in turns(1, TURNS)]
    config = store_config("redis")
    config["kv"]["load"] = "always"
    written = 0

    def speak(engine: Engine, first: int, last: int) -> None:
        nonlocal written
        for number, one in enumerate(turns(first, last), first):
            [answer] = engine.generate([one])
            assert answer.token_ids == expected[number - 1], number
            # The next turn finds all of this one, as after a client has read the answer.
            blocks = number * TOKENS // BLOCK
            until(
                lambda blocks=blocks: stored_after(engine, config) >= blocks,
                say=lambda number=number: (number, check_store(config), worker_counters(engine)),
            )
        written += worker_counters(engine)["save_segments"]

    with Engine(text_model, kv=config, log_path=tmp_path / "1.log") as engine:
        speak(engine, 1, 20)
    with Engine(text_model, kv=config, log_path=tmp_path / "2.log") as engine:
        speak(engine, 21, TURNS)
        counts = worker_counters(engine)
        assert not any(name.startswith(("miss", "save_failures")) for name in counts)
    # Not one for each of 30 turns: 93 blocks, of which 48 to 64 make a whole one.
    stored = check_store(config)
    assert (stored["blocks"], written) == (TURNS * TOKENS // BLOCK, TURNS)
    assert stored["segments"] <= 6
    with Cache(load_settings(config, environ={})) as cache:
        assert not fsck(cache, depth=Depth(percent=100.0, settled_s=0.0)).faults
