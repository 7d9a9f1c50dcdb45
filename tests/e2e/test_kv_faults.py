"""Whatever happens to the store: the same tokens, the engine alive, the loss counted."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import Engine
from tests.e2e.sharing import (
    check_store,
    full_blocks,
    prompt,
    scheduler_counters,
    segment_files,
    worker_counters,
)

pytestmark = pytest.mark.engine

PROMPTS = [prompt(320 + 64 * i, 100 + i) for i in range(4)]


@pytest.fixture(scope="module")
def expected(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    log = tmp_path_factory.mktemp("reference") / "engine.log"
    with Engine(text_model, log_path=log) as engine:
        return [engine.generate([one])[0].token_ids for one in PROMPTS]


def answers(engine: Engine) -> list[list[int]]:
    """All prompts, one by one, from an empty engine cache."""
    engine.reset_prefix_cache()
    return [engine.generate([one])[0].token_ids for one in PROMPTS]


def flip(path: Path, position: float) -> None:
    data = bytearray(path.read_bytes())
    data[int(position * (len(data) - 1))] ^= 0x40
    path.write_bytes(data)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "header flipped": lambda path: flip(path, 0.001),
    "first slot flipped": lambda path: flip(path, 0.1),
    "last byte flipped": lambda path: flip(path, 1.0),
    "truncated by one byte": lambda path: path.write_bytes(path.read_bytes()[:-1]) and None,
    "truncated in the header": lambda path: path.write_bytes(path.read_bytes()[:900]) and None,
    "empty": lambda path: path.write_bytes(b"") and None,
    "deleted": lambda path: path.unlink(),
}


def test_damaged_segments_are_recomputed_and_replaced(
    text_model: Path, expected: list[list[int]], tmp_path: Path, store_config: Any
) -> None:
    """One engine lives through every kind of damage to every segment."""
    config = store_config("sqlite") | {"segment": {"max_blocks": 4}}
    payloads = tmp_path / "payloads"
    with Engine(text_model, kv=config, log_path=tmp_path / "1.log") as engine:
        assert answers(engine) == expected
        engine.idle(0.1)
        pristine = tmp_path / "pristine"
        shutil.copytree(payloads, pristine)
    assert check_store(config)["blocks"] == sum(full_blocks(one) for one in PROMPTS) // 32
    for kind, damage in DAMAGE.items():
        shutil.rmtree(payloads)
        shutil.copytree(pristine, payloads)
        for path in segment_files(payloads):
            damage(path)
        with Engine(text_model, kv=config, log_path=tmp_path / f"{kind}.log") as engine:
            assert answers(engine) == expected, kind
            counts = worker_counters(engine)
            reason = "missing" if kind == "deleted" else "corrupt"
            assert counts[f"miss_blocks{{{reason}}}"] > 0, kind
            assert counts["quarantined_segments"] > 0, kind
            engine.idle(0.2)
            # What was recomputed has been saved again: the next time everything is there.
            engine.reset_prefix_cache()
            [again] = engine.generate([PROMPTS[3]])
            assert (again.token_ids, again.external_tokens) == (expected[3], full_blocks(PROMPTS[3])), kind


def test_one_bad_segment_in_the_middle_costs_only_what_follows(
    text_model: Path, expected: list[list[int]], tmp_path: Path, store_config: Any
) -> None:
    config = store_config("sqlite") | {"segment": {"max_blocks": 2}}
    with Engine(text_model, kv=config, log_path=tmp_path / "1.log") as engine:
        assert answers(engine) == expected
    draw = random.Random(5)
    with Engine(text_model, kv=config, log_path=tmp_path / "2.log") as engine:
        for _ in range(6):
            flip(draw.choice(segment_files(tmp_path / "payloads")), draw.random())
            assert answers(engine) == expected
            engine.idle(0.1)
        assert worker_counters(engine)["load_blocks"] > 0
        assert worker_counters(engine)["miss_blocks{corrupt}"] > 0


def test_redis_down_at_the_start_gone_in_the_middle_and_back_empty(
    text_model: Path, expected: list[list[int]], tmp_path: Path, store_config: Any, private_redis: Any
) -> None:
    config = store_config("sqlite") | {
        "index": private_redis.url,
        "redis": {"timeout_s": 1.0, "connect_timeout_s": 1.0},
        "breaker": {"failures": 2, "backoff_s": 0.2, "max_backoff_s": 0.5},
        "kv": {"match_deadline_s": 10.0},
    }
    private_redis.stop()
    with Engine(text_model, kv=config, log_path=tmp_path / "engine.log") as engine:
        assert answers(engine) == expected  # never seen a Redis
        assert scheduler_counters(engine)["miss_blocks{unavailable}"] > 0
        assert worker_counters(engine)["save_blocks{failed}"] > 0

        private_redis.start()
        time.sleep(0.6)  # the breaker lets the next call through
        assert answers(engine) == expected
        engine.idle(0.1)
        assert worker_counters(engine)["save_blocks{stored}"] > 0
        engine.reset_prefix_cache()
        [warm] = engine.generate([PROMPTS[3]])
        assert (warm.token_ids, warm.external_tokens) == (expected[3], full_blocks(PROMPTS[3]))

        private_redis.pause()  # accepts connections, answers nothing
        began = time.monotonic()
        assert answers(engine) == expected
        assert time.monotonic() - began < 60
        private_redis.resume()

        private_redis.kill()
        assert answers(engine) == expected
        private_redis.start()  # empty
        time.sleep(0.6)
        assert answers(engine) == expected
        engine.idle(0.2)
        engine.reset_prefix_cache()
        [warm] = engine.generate([PROMPTS[3]])
        assert (warm.token_ids, warm.external_tokens) == (expected[3], full_blocks(PROMPTS[3]))


def test_an_unwritable_or_vanished_folder_only_costs_hits(
    text_model: Path, expected: list[list[int]], tmp_path: Path, store_config: Any
) -> None:
    config = store_config("sqlite") | {"index": f"sqlite://{tmp_path}/elsewhere/index.sqlite"}
    payloads = tmp_path / "payloads"
    with Engine(text_model, kv=config, log_path=tmp_path / "engine.log") as engine:
        assert answers(engine) == expected
        engine.idle(0.1)
        shutil.rmtree(payloads)
        payloads.write_text("a file where the folder was")
        assert answers(engine) == expected
        engine.idle(0.1)
        counts = worker_counters(engine)
        assert counts["save_blocks{failed}"] > 0
        assert sum(value for name, value in counts.items() if name.startswith("miss_blocks")) > 0


def test_tiny_staging_and_queues_lose_saves_and_stay_correct(
    text_model: Path, expected: list[list[int]], tmp_path: Path, store_config: Any
) -> None:
    config = store_config("sqlite")
    # One block of the model is 64 KiB in float32: staging holds two.
    config["kv"] |= {"staging_bytes": 2 * (4 * 2 * 32 * 128 * 4)}
    config["transfers"] = {"read_threads": 1, "write_threads": 1, "write_bytes": 1 << 20, "queue_jobs": 4}
    with Engine(text_model, kv=config, log_path=tmp_path / "1.log") as engine:
        for _ in range(3):
            assert answers(engine) == expected
        assert worker_counters(engine)["save_blocks{stored}"] > 0
    with Engine(text_model, kv=config, log_path=tmp_path / "2.log") as engine:
        assert [r.token_ids for r in engine.generate(PROMPTS)] == expected
        assert answers(engine) == expected
