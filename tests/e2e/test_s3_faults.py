"""A bucket that misbehaves, behind a proxy in front of the real server: the same tokens, the engine alive,
deadlines kept, the loss counted by kind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import Engine
from tests.e2e.sharing import check_store, full_blocks, prompt, scheduler_counters, worker_counters

pytestmark = [pytest.mark.engine, pytest.mark.servers]

PROMPTS = [prompt(320 + 64 * i, 300 + i) for i in range(3)]

#: fault -> what the blocks that are not loaded, and those that are not saved, are counted as.
FAULTS: dict[str, tuple[str, ...]] = {
    "status500": ("unavailable", "breaker_open"),
    "hang": ("deadline", "breaker_open"),
    "hang_body": ("deadline", "unavailable", "breaker_open"),
    "reset": ("unavailable", "breaker_open"),
    "reset_before": ("unavailable", "breaker_open"),
    "truncate": ("unavailable", "breaker_open"),
    "short": ("unavailable", "breaker_open"),
    "flip": ("corrupt",),
    "forbid": ("permission",),
    "no_bucket": ("unavailable", "breaker_open"),
    "html404": ("unavailable", "breaker_open"),
    "no_key": ("missing",),
    "refuse": ("unavailable", "breaker_open"),
    # The last one, since reads are slowed down for most of a minute after it.
    "status503": ("throttled", "breaker_open"),
}


@pytest.fixture(scope="module")
def expected(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    log = tmp_path_factory.mktemp("reference") / "engine.log"
    with Engine(text_model, log_path=log) as engine:
        return [engine.generate([one])[0].token_ids for one in PROMPTS]


def answers(engine: Engine) -> list[list[int]]:
    """All prompts, one by one, from an empty engine cache."""
    engine.reset_prefix_cache()
    return [engine.generate([one])[0].token_ids for one in PROMPTS]


def counted(engine: Engine) -> Callable[[], dict[str, int]]:
    """What both halves count from now on."""
    before = [scheduler_counters(engine), worker_counters(engine)]

    def since() -> dict[str, int]:
        out: dict[str, int] = {}
        for old, new in zip(before, [scheduler_counters(engine), worker_counters(engine)], strict=True):
            for name, value in new.items():
                out[name] = out.get(name, 0) + value - old.get(name, 0)
        return {name: value for name, value in out.items() if value}

    return since


def config_for(store_config: Any, bucket: Any) -> dict[str, Any]:
    config: dict[str, Any] = store_config("redis")
    config["payloads"] = bucket.url
    config["s3"] = bucket.settings["s3"] | {
        "read_timeout_s": 1.0,
        "write_timeout_s": 1.0,
        "attempts": 2,
        "backoff_s": 0.01,
    }
    config["breaker"] = {"failures": 3, "backoff_s": 0.1, "max_backoff_s": 0.2}
    return config


def settle(engine: Engine) -> None:
    """Let saves end and breakers close."""
    engine.idle(0.5)
    engine.reset_prefix_cache()
    engine.generate([PROMPTS[0]], max_tokens=1)
    engine.idle(0.5)


def test_one_engine_lives_through_everything_a_bucket_can_do(
    text_model: Path, expected: list[list[int]], tmp_path: Path, store_config: Any, s3_proxy: Any
) -> None:
    bucket, proxy = s3_proxy
    config = config_for(store_config, bucket)
    blocks = sum(full_blocks(one) for one in PROMPTS) // 32
    with Engine(text_model, kv=config, log_path=tmp_path / "engine.log") as engine:
        assert answers(engine) == expected
        engine.idle(0.3)
        assert worker_counters(engine)["save_blocks{stored}"] == blocks
        for fault, reasons in FAULTS.items():
            since = counted(engine)
            if fault == "refuse":
                proxy.refuse()
            else:
                # Only reads find nothing: a save that fails keeps its claim, and the others out, for a while.
                proxy.inject(fault, methods=("GET",) if fault == "no_key" else None)
            began = time.monotonic()
            assert answers(engine) == expected, fault
            # Two attempts of a second each for what is under way at once, then the breaker.
            assert time.monotonic() - began < 60, fault
            counts = since()
            missed = {name for name in counts if name.startswith("miss_blocks")}
            assert missed & {f"miss_blocks{{{reason}}}" for reason in reasons}, (fault, counts)
            assert missed <= {f"miss_blocks{{{reason}}}" for reason in (*reasons, "absent")}, (fault, counts)
            if fault not in ("flip", "no_key"):
                # Nothing was evicted for it: what can't be reached is not gone.
                assert "quarantined_segments" not in counts, (fault, counts)
            proxy.heal()
            settle(engine)
            assert answers(engine) == expected, fault
            engine.idle(0.3)
            engine.reset_prefix_cache()
            [warm] = engine.generate([PROMPTS[2]])
            assert (warm.token_ids, warm.external_tokens) == (expected[2], full_blocks(PROMPTS[2])), fault
    assert check_store(config)["blocks"] >= blocks


def test_objects_damaged_in_the_bucket_are_recomputed_and_replaced(
    text_model: Path, expected: list[list[int]], tmp_path: Path, store_config: Any, s3_bucket: Any
) -> None:
    config = store_config("s3") | {"segment": {"max_blocks": 4}}
    with Engine(text_model, kv=config, log_path=tmp_path / "engine.log") as engine:
        assert answers(engine) == expected
        engine.idle(0.3)
        for damage in ("flipped", "truncated", "deleted", "another's"):
            since = counted(engine)
            previous = None
            for key in s3_bucket.keys():
                data = bytearray(s3_bucket.get(key))
                if damage == "deleted":
                    s3_bucket.delete(key)
                    continue
                if damage == "flipped":
                    data[len(data) // 2] ^= 1
                elif damage == "truncated":
                    del data[-1]
                else:
                    data, previous = bytearray(previous or data[:100]), data
                s3_bucket.put(key, bytes(data))
            assert answers(engine) == expected, damage
            counts = since()
            assert counts["quarantined_segments"] > 0, (damage, counts)
            engine.idle(0.3)
            engine.reset_prefix_cache()
            [warm] = engine.generate([PROMPTS[2]])
            assert (warm.token_ids, warm.external_tokens) == (expected[2], full_blocks(PROMPTS[2])), damage


def test_a_bucket_that_is_down_does_not_keep_the_local_tier_from_serving(
    text_model: Path, expected: list[list[int]], tmp_path: Path, store_config: Any, s3_proxy: Any
) -> None:
    bucket, proxy = s3_proxy
    config = config_for(store_config, bucket)
    config["payloads"] = {"fast": f"file://{tmp_path}/fast", "slow": bucket.url, "fast_capacity": "256MiB"}
    with Engine(text_model, kv=config, log_path=tmp_path / "engine.log") as engine:
        assert answers(engine) == expected
        engine.idle(0.5)
        proxy.refuse()
        engine.reset_prefix_cache()
        warm = [engine.generate([one])[0] for one in PROMPTS]
        assert [one.token_ids for one in warm] == expected
        assert [one.external_tokens for one in warm] == [full_blocks(one) for one in PROMPTS]
        # A damaged copy: the bucket can't replace it now, so its blocks are computed.
        for path in (tmp_path / "fast").glob("*/??/*"):
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        assert answers(engine) == expected
        proxy.heal()
        settle(engine)
        since = counted(engine)
        assert answers(engine) == expected
        assert since()["load_blocks"] > 0
    check_store(config)
