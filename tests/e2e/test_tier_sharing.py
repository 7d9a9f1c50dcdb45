"""Two engines and a third process save, load and evict in one local folder in front of one bucket."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import ROOT, Engine
from tests.e2e.sharing import check_store, full_blocks, prompt, worker_counters
from tests.waiting import PATIENCE_S

pytestmark = [pytest.mark.engine, pytest.mark.servers]

#: How long they are at it, at least.
SECONDS = float(os.environ.get("TIER_TEST_SECONDS", "8"))
PROMPTS = [prompt(320 + 32 * i, 500 + i) for i in range(12)]
#: A block of the model is 128 KiB; the prompts are 20 MiB, so the folder can't hold them all.
CAPACITY = 8 << 20
SEGMENT = 8 * (128 << 10) + (64 << 10)
PROCESSES = 3


class Watch:
    """Adds up, from outside, what is in a folder; keeps the largest sum seen."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.most = self.looks = 0

    def _run(self) -> None:
        while not self._stop.is_set():
            total, paths = 0, [*self._folder.glob("*/??/*"), *self._folder.glob(".tmp/*")]
            listed = time.time_ns()
            for path in paths:
                with suppress(FileNotFoundError):
                    found = path.stat()
                    # What was evicted meanwhile and came again is there in place of others.
                    total += found.st_size if found.st_ctime_ns <= listed else 0
            self.most = max(self.most, total)
            self.looks += 1
            time.sleep(0.003)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()


@pytest.fixture(scope="module")
def expected(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    log = tmp_path_factory.mktemp("reference") / "engine.log"
    with Engine(text_model, log_path=log) as engine:
        return [engine.generate([one])[0].token_ids for one in PROMPTS]


@pytest.mark.timeout(900 + 2 * SECONDS)
@pytest.mark.parametrize("write", ["through", "back"])
def test_two_engines_and_a_third_process_in_one_folder(
    write: str, text_model: Path, expected: list[list[int]], tmp_path: Path, store_config: Any
) -> None:
    config = store_config("tiered") | {"segment": {"max_blocks": 8, "target_bytes": "2MiB"}}
    config["payloads"] |= {"fast_capacity": CAPACITY, "write": write}
    folder = tmp_path / "fast"
    settings = tmp_path / "settings.json"
    settings.write_text(json.dumps(config))
    engines = [Engine(text_model, kv=config, log_path=tmp_path / f"{i}.log") for i in range(2)]
    for engine in engines:
        engine.wait_ready()
    command = [sys.executable, "-m", "tests.e2e.tier_writer", str(settings), "1"]
    writer = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    wrong: list[int] = []
    external = [0, 0]
    counted: list[dict[str, int]] = [{}, {}]

    def lacking(number: int) -> list[str]:
        """What has not come about yet for an engine, and for both."""
        # Which of them comes to what within a few seconds is up to the machine.
        names = ["tier_hits_fast", "tier_evictions", *(["tier_uploads"] if write == "back" else [])]
        lacks = [name for name in names if not any(counts.get(name) for counts in counted)]
        lacks += ["hits"] if external[number] < full_blocks(PROMPTS[0]) else []
        lacks += ["looks"] if watch.looks <= 50 else []
        return lacks + (["payloads"] if watch.most <= CAPACITY // 2 else [])

    def work(number: int) -> None:
        began = time.monotonic()
        turn = 0
        while (spent := time.monotonic() - began) < SECONDS or (spent < 3 * PATIENCE_S and lacking(number)):
            # Each begins elsewhere, so that one finds what the other has saved.
            which = (turn + 6 * number) % len(PROMPTS)
            if turn % 3 == 2:
                engines[number].reset_prefix_cache()
            [result] = engines[number].generate([PROMPTS[which]])
            if result.token_ids != expected[which]:
                wrong.append(which)
            external[number] += result.external_tokens
            counted[number] = worker_counters(engines[number])
            turn += 1

    try:
        with Watch(folder) as watch:
            threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            Path(f"{settings}.stop").touch()
            out, _ = writer.communicate(timeout=PATIENCE_S)
            counted = [worker_counters(engine) for engine in engines]
            for engine in engines:
                engine.close()
    finally:
        writer.kill()
        for engine in engines:
            engine.kill()
    assert writer.returncode == 0
    counted.append(json.loads(out))
    assert not wrong
    assert not [*lacking(0), *lacking(1)]
    print(f"{watch.looks} looks, most {watch.most / CAPACITY:.2f} of the capacity; {counted}")
    assert watch.most <= CAPACITY + PROCESSES * SEGMENT
    for counts in counted:
        assert "tier_fast_errors" not in counts
        assert not any(name.startswith(("save_failures", "miss_blocks{corrupt")) for name in counts), counts
    if write == "through":
        check_store(config)
