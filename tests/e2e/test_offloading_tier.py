"""The store as a tier of vLLM's own OffloadingConnector: real engines, real scheduler, real CPU tier.

Only the copies between "GPU" and CPU tier are not vLLM's: its own need CUDA (tests.e2e.host_offloading).
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import Engine, EngineError
from tests.e2e.sharing import check_store, full_blocks, prompt, segment_files

pytestmark = pytest.mark.engine

#: float32: 4 layers, keys and values, 32 tokens, 2 heads of 64.
BLOCK_BYTES = 4 * 2 * 32 * 128 * 4
PROMPTS = [prompt(320 + 64 * i, 200 + i) for i in range(4)]
LONG = prompt(1500, 210)
OFFLOADING = {"kv_connector": "OffloadingConnector", "kv_connector_module_path": None}
#: vLLM's CPU tier is a file there, named after the engine, and outlives an engine that is killed.
MEMORY = Path("/dev/shm")
_TIER = "llm.llm_engine.engine_core.engine_core.scheduler.connector"
_TIER += ".connector_scheduler.manager.secondary_tiers[0]"


def start(
    model: Path,
    store: dict[str, Any],
    log: Path,
    *,
    blocks: int = 64,
    per_chunk: int = 1,
    tier: dict[str, Any] | None = None,
    **more: Any,
) -> Engine:
    """An engine under an OffloadingConnector with room for so many blocks in its CPU tier."""
    kv = {
        "spec_name": "HostTieringSpec",
        "spec_module_path": "tests.e2e.host_offloading",
        "cpu_bytes_to_use": blocks * BLOCK_BYTES,
        "blocks_per_chunk": per_chunk,
        "secondary_tiers": [
            {"type": "KVStoreTier", "module_path": "connectors.tier", **store, **(tier or {})}
        ],
    }
    config = OFFLOADING | {"engine_id": f"kvstore-e2e-{os.getpid()}-{log.stem}"}
    return Engine(model, kv=kv, kv_config=config, log_path=log, **more)


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    yield
    for path in MEMORY.glob(f"vllm_offload_kvstore-e2e-{os.getpid()}-*"):
        path.unlink()


def counters(engine: Engine) -> dict[str, int]:
    counts = engine.evaluate(f"{_TIER}._store.counters.snapshot()")
    return {name: value for name, value in counts.items() if value}


def answers(engine: Engine, prompts: list[dict[str, Any]] = PROMPTS) -> list[list[int]]:
    """All prompts, one by one, from an empty engine cache. The CPU tier keeps what it has."""
    engine.reset_prefix_cache()
    return [engine.generate([one])[0].token_ids for one in prompts]


@pytest.fixture(scope="module")
def expected(text_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What an engine without a connector answers."""
    log = tmp_path_factory.mktemp("reference") / "engine.log"
    with Engine(text_model, log_path=log) as engine:
        return {"prompts": answers(engine), "long": engine.generate([LONG])[0].token_ids}


def test_what_one_engine_offloads_another_loads(
    text_model: Path, expected: dict[str, Any], tmp_path: Path, store_config: Any
) -> None:
    config = store_config("sqlite")
    with start(text_model, config, tmp_path / "1.log") as engine:
        assert answers(engine) == expected["prompts"]
        # All of it is in the CPU tier as well, and comes from there.
        loaded = counters(engine).get("load_blocks", 0)
        engine.reset_prefix_cache()
        [near] = engine.generate([PROMPTS[0]])
        assert (near.token_ids, near.external_tokens) == (expected["prompts"][0], 320)
        assert counters(engine).get("load_blocks", 0) == loaded == 0
        assert engine.generate([LONG])[0].token_ids == expected["long"]
        engine.idle(0.5)
        assert counters(engine)["save_blocks{stored}"] == (sum(map(full_blocks, PROMPTS)) + 1472) // 32
        # Many chunks, one PUT.
        assert counters(engine)["save_segments"] == 5
    seen = check_store(config)
    assert (seen["namespaces"], seen["segments"], seen["blocks"]) == (1, 5, 98)

    # In processes of its own, whose scheduler sees no layers: the same namespace nevertheless. Its CPU tier
    # holds less than the longest prompt.
    with start(text_model, config, tmp_path / "2.log", blocks=24, multiprocess=True) as engine:
        warm = [engine.generate([one])[0] for one in PROMPTS]
        assert [r.token_ids for r in warm] == expected["prompts"]
        assert [r.external_tokens for r in warm] == [full_blocks(one) for one in PROMPTS]
        [long] = engine.generate([LONG])
        assert long.token_ids == expected["long"]
        assert 0 < long.external_tokens <= 24 * 32
        batch = engine.generate([*PROMPTS, LONG])
        assert [r.token_ids for r in batch] == [*expected["prompts"], expected["long"]]
        metrics = engine.metrics()
        assert metrics["vllm:kv_offload_tiering_read_bytes_total"] >= 52 * BLOCK_BYTES
        assert metrics["vllm:kvstore_tier_events_total"] > 0
        assert metrics.get("vllm:kv_offload_tiering_promotion_job_failures_total", 0) == 0
    assert check_store(config)["blocks"] == 98


def test_whatever_happens_to_the_store(
    text_model: Path, expected: dict[str, Any], tmp_path: Path, store_config: Any
) -> None:
    """One engine, whose CPU tier holds one prompt, so that each round loads from the store again.

    In chunks of two blocks.
    """
    config = store_config("sqlite") | {"index": f"sqlite://{tmp_path}/elsewhere/index.sqlite"}
    config["kv"] |= {"load_deadline_s": 5.0}
    tier = {
        "segment": {"max_blocks": 4},
        "breaker": {"backoff_s": 0.1, "max_backoff_s": 0.1},
        # For so long nobody saves what a save has claimed that then failed.
        "claim_ttl_s": 0.2,
    }
    payloads = tmp_path / "payloads"
    with start(text_model, config, tmp_path / "engine.log", blocks=18, per_chunk=2, tier=tier) as engine:

        def rounds(times: int = 1) -> dict[str, int]:
            before = counters(engine)
            for _ in range(times):
                assert answers(engine) == expected["prompts"]
                engine.idle(0.4)
            after = counters(engine)
            return {name: value - before.get(name, 0) for name, value in after.items()}

        rounds()
        assert rounds()["load_blocks"] > 15

        for number, path in enumerate(segment_files(payloads)):
            data = bytearray(path.read_bytes())
            data[-1 - number] ^= 0x10
            path.write_bytes(data)
        damaged = rounds()
        assert damaged["miss_blocks{corrupt}"] > 0
        assert damaged["quarantined_segments"] > 0
        # What was computed again has been stored again.
        rounds()
        assert rounds()["load_blocks"] > 15

        removed = segment_files(payloads)
        for path in removed:
            path.unlink()
        assert rounds()["miss_blocks{missing}"] > 0

        removed += segment_files(payloads)
        shutil.rmtree(payloads)
        payloads.write_text("a file where the folder was")
        gone = rounds(2)
        assert gone["save_blocks{failed}"] > 0
        payloads.unlink()
        engine.idle(0.3)
        rounds(2)
        assert rounds()["load_blocks"] > 15

        # Aborted in every state, with more asked for at once than the CPU tier holds.
        for steps in (0, 1, 2, 3, 5, 8):
            engine.reset_prefix_cache()
            engine.generate(PROMPTS, abort_after=dict.fromkeys((0, 2), steps))
        assert [r.token_ids for r in engine.generate(PROMPTS)] == expected["prompts"]
        engine.idle(0.6)
        assert not engine.evaluate(f"len({_TIER}._lookups)")
        assert not engine.evaluate(f"len({_TIER}._jobs._live)")

        # Whoever resets the connector may have changed the weights in place: nothing old is served.
        assert engine.reset_prefix_cache(reset_connector=True)
        before = counters(engine)
        assert [engine.generate([one])[0].token_ids for one in PROMPTS] == expected["prompts"]
        engine.idle(0.4)
        after = counters(engine)
        assert after.get("match_calls") == before.get("match_calls")
        assert after.get("save_segments") == before.get("save_segments")
    # The index goes on naming a payload that somebody deleted until a load asks for it, or fsck does.
    check_store(config, removed={path.relative_to(payloads).as_posix() for path in removed})


def test_what_can_not_work_is_refused_at_the_start_in_words(
    text_model: Path, tmp_path: Path, store_config: Any
) -> None:
    engine = start(
        text_model, store_config("sqlite"), tmp_path / "engine.log", tier={"kv": {"save_decode": True}}
    )
    with pytest.raises(EngineError) as failure, engine:
        pass
    assert "offload_prompt_only" in str(failure.value) + engine.log()
