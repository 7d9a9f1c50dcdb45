"""kill -9 at random moments of saving: nothing half-written is ever promised."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import ROOT, Engine
from tests.e2e.sharing import check_store, full_blocks, promised_blocks, prompt
from tests.waiting import until

pytestmark = [pytest.mark.engine, pytest.mark.servers, pytest.mark.timeout(1800)]

#: How many engines are killed for each kind of store; docs/contributing.md says how to kill more by hand.
KILLS = int(os.environ.get("CRASH_KILLS", "4"))


@pytest.mark.parametrize("kind", ["sqlite", "tiered"])
def test_no_false_hit_after_an_engine_was_killed_while_saving(
    kind: str, text_model: Path, tmp_path: Path, store_config: Any
) -> None:
    config = store_config(kind) | {"segment": {"max_blocks": 1}}
    prompts = [prompt(640, 1000 + i) for i in range(3 * KILLS)]
    draw = random.Random(kind)
    stored = 0
    pending = Engine(text_model, kv=config, log_path=tmp_path / "0.log")
    for number in range(KILLS):
        engine = pending
        engine.wait_ready()
        if number + 1 < KILLS:  # starts while this one works: the kill takes only its own
            pending = Engine(text_model, kv=config, log_path=tmp_path / f"{number + 1}.log")
        batch = prompts[3 * number : 3 * number + 3]
        files = len(list(tmp_path.glob("*/*/??/*")))
        engine.start_generate(batch, max_tokens=64)
        # Anywhere in the writing of its sixty payloads, by turns counted in payloads and in commits: that
        # is the same place on a busy machine.
        if number % 2:
            wanted = stored + draw.randint(1, 20)
            until(lambda: promised_blocks(config) >= wanted)
        else:
            wanted = files + draw.randint(0, 40)
            until(lambda: len(list(tmp_path.glob("*/*/??/*"))) >= wanted)
        time.sleep(draw.uniform(0.0, 0.01))  # they are written within a tenth of a second
        engine.kill()
        seen = check_store(config)
        assert seen["blocks"] >= stored, "what was committed stays"
        stored = seen["blocks"]
    assert 0 < stored < sum(full_blocks(one) for one in prompts) // 32, "the kills came too late or too early"

    with Engine(text_model, log_path=tmp_path / "reference.log") as engine:
        expected = [engine.generate([one])[0].token_ids for one in prompts]
    with Engine(text_model, kv=config, log_path=tmp_path / "after.log") as engine:
        results = [engine.generate([one])[0] for one in prompts]
    assert [r.token_ids for r in results] == expected
    assert sum(r.external_tokens for r in results) > 0
    seen = check_store(config)
    status = subprocess.run(
        [sys.executable, "-m", "kvstore.cli", "status", "--json"],
        cwd=ROOT,
        env={**os.environ, "KVSTORE_SETTINGS": str(_settings_file(config, tmp_path))},
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(status.stdout)
    total = report["total"]
    assert (total["segments"], total["blocks"]) == (seen["segments"], seen["blocks"])


def _settings_file(config: dict[str, Any], folder: Path) -> Path:
    path = folder / "settings.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    return path
