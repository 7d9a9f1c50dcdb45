"""A store that is slower than computing costs a real engine little, and one that is fast again is used."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvstore.conformance.faulty import Rule
from tests.e2e.engine import Engine, Result
from tests.e2e.sharing import full_blocks, prompt, scheduler_counters, worker_counters
from tests.e2e.worker_faults import EXTENSION, set_faults, settle
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.engine

PROMPTS = [prompt(2048 + 32 * i, 700 + i) for i in range(2)]
CUT = "miss_blocks{computing_is_faster}"


@pytest.mark.parametrize("kind", ["text", "window"])
def test_what_is_slow_is_computed_what_is_late_is_cut_and_what_is_back_is_loaded(
    kind: str, model: Callable[..., Path], tmp_path: Path, store_config: Any
) -> None:
    config = store_config("sqlite") | {
        "segment": {"max_blocks": 8},
        "kv": {"load": "adaptive", "load_deadline_s": 3 * PATIENCE_S, "audit_every": 0},
        "grace_s": 4 * PATIENCE_S,
    }
    log = tmp_path / "engine.log"
    with Engine(model(kind), kv=config, log_path=log, worker_extension_cls=EXTENSION) as engine:

        def ask(number: int) -> Result:
            engine.reset_prefix_cache()
            [result] = engine.generate([PROMPTS[number]])
            assert result.token_ids == expected[number]
            return result

        def loads(number: int) -> bool:
            return ask(number).external_tokens > 0

        expected = [engine.generate([one])[0].token_ids for one in PROMPTS]
        settle(engine)
        # What it takes is measured beside requests, if not at once by one.
        until(lambda: loads(0))
        until(lambda: ask(1).external_tokens > 0.9 * full_blocks(PROMPTS[1]) - 64)
        before = scheduler_counters(engine)
        # It hangs while it is believed to be fast: the load is cut.
        set_faults(engine, 0, Rule("delay", ("read",), delay_s=2 * PATIENCE_S))
        cut = ask(0)
        assert cut.ttft_s is not None and cut.ttft_s < PATIENCE_S
        counts = worker_counters(engine)
        assert counts[CUT] > 0 and "miss_blocks{deadline}" not in counts
        # It is known to be slow: nothing is promised, however often it is asked for.
        for number in (0, 1, 0):
            assert ask(number).external_tokens == 0
        assert scheduler_counters(engine)[CUT] > before.get(CUT, 0)
        assert worker_counters(engine).get("quarantined_segments", 0) == 0
        # It is back.
        set_faults(engine, 0)
        until(lambda: loads(0))
        until(lambda: loads(1))
