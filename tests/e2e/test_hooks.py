"""vLLM's hooks around a KV connector: metrics, events, resets and new weights, MultiConnector."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import Engine, EngineError
from tests.e2e.sharing import check_store, full_blocks, prompt, segment_files

pytestmark = pytest.mark.engine

LONG = prompt(1000, 1)
OTHER = prompt(500, 2)
PREFIX = "vllm:kvstore_kv_"
#: By its name alone: vLLM finds the plug-in.
BY_NAME = {"kv_connector_module_path": None}
_SCHEDULER = "llm.llm_engine.engine_core.engine_core.scheduler"
_CONNECTOR = f"{_SCHEDULER}.connector._scheduler"


def stats(engine: Engine) -> dict[str, float]:
    """Our metrics, without those that are 0."""
    return {
        name.removeprefix(PREFIX): value
        for name, value in engine.metrics().items()
        if name.startswith(PREFIX) and value
    }


def namespace(engine: Engine) -> str:
    return str(engine.evaluate(f"{_CONNECTOR}.space.namespace.weights"))


def events(engine: Engine, medium: str) -> list[list[Any]]:
    """Kind, hashes, tokens, ownership of what was published for one medium."""
    return list(
        engine.evaluate(
            "[[type(e).__name__, list(e.block_hashes), list(getattr(e, 'token_ids', [])), e.ownership]"
            f" for b in served.batches for e in b.events if getattr(e, 'medium', '') == {medium!r}]"
        )
    )


def test_metrics_events_resets_and_new_weights(
    model: Callable[..., Path], tmp_path: Path, store_config: Any
) -> None:
    config, trained = store_config("sqlite"), model("text", seed=1)
    first = Engine(
        model("text"),
        kv=config | {"identity": {"model": "text"}},
        kv_config=BY_NAME,
        log_path=tmp_path / "1.log",
        worker_extension_cls="tests.e2e.hooks_worker.Named",
        kv_events_config={"enable_kv_cache_events": True, "publisher": "null"},
    )
    # Was started with what the other one is going to be given.
    second = Engine(
        trained, kv=config | {"identity": {"weights": "step-1", "model": "text"}}, log_path=tmp_path / "2.log"
    )
    with second:
        [new] = second.generate([LONG])
        [new_other] = second.generate([OTHER])
        second.idle(0.2)
    with first as engine:
        engine.evaluate(
            f"setattr({_SCHEDULER}.kv_event_publisher, 'publish', "
            "served.__dict__.setdefault('batches', []).append)"
        )
        start = namespace(engine)
        [cold] = engine.generate([LONG])
        assert cold.token_ids != new.token_ids
        engine.idle(0.2)
        engine.reset_prefix_cache()
        [warm] = engine.generate([LONG])
        assert (warm.token_ids, warm.external_tokens) == (cold.token_ids, 992)
        [other] = engine.generate([OTHER])

        # ---- metrics
        seen = stats(engine)
        assert seen["matches_total"] == 3
        assert seen["asked_tokens_total"] == 2 * 992 + 480
        assert (
            seen["matched_tokens_total"]
            == seen["promised_tokens_total"]
            == seen["loaded_tokens_total"]
            == 992
        )
        assert seen["loads_total"] == 1
        assert seen["loaded_blocks_total"] == 31
        assert seen["saved_tokens_total"] >= 992
        assert seen["misses_total"] == 31 + 15
        assert seen["match_seconds_count"] == 3 and seen["load_seconds_count"] == 1
        assert seen["save_seconds_count"] >= 1
        assert not any(name.endswith("_down") or name.startswith("save_failures") for name in seen), seen
        hits = engine.evaluate(
            "[(s.labels, s.value) for m in __import__('prometheus_client').REGISTRY.collect() for s in "
            "m.samples if 'source' in s.labels and s.value and s.name.endswith('_total')]"
        )
        assert any(labels.get("source") == "disk" for labels, _ in hits), hits

        # ---- events
        engine.idle(0.2)
        engine.generate([prompt(40, 9)])
        stored = [one for one in events(engine, "STORAGE") if one[0] == "BlockStored"]
        on_device = {h: t for _, hashes, _, _ in events(engine, "GPU") for h in hashes for t in [1]}
        blocks = [h for _, hashes, _, _ in stored for h in hashes]
        assert blocks[:31] == [h for h in blocks[:31] if h in on_device] and len(blocks) == 31 + 15 + 1
        assert [t for _, _, tokens, _ in stored for t in tokens][:992] == LONG["prompt_token_ids"][:992]
        assert len({owner for *_, owner in stored}) == 1

        # ---- a reset: nothing old is served, and the store goes on under another name
        assert engine.reset_prefix_cache(reset_connector=True)
        assert namespace(engine) != start
        [again] = engine.generate([LONG])
        assert (again.token_ids, again.external_tokens) == (cold.token_ids, 0)
        engine.idle(0.2)
        engine.reset_prefix_cache()
        [again] = engine.generate([LONG])
        assert (again.token_ids, again.external_tokens) == (cold.token_ids, 992)
        removed = {
            h for kind, hashes, _, _ in events(engine, "STORAGE") if kind == "BlockRemoved" for h in hashes
        }
        assert removed >= set(blocks)

        # ---- new weights, unnamed: computed anew; then named: shared with the engine that had them
        with pytest.raises(EngineError, match="printable"):
            engine.evaluate("llm.collective_rpc('name_weights', args=('',) and ('unnamed-1',))")
        reload_ = "llm.collective_rpc('reload_weights', kwargs={'weights_path': %r})"
        engine.evaluate(reload_ % str(trained))
        assert engine.reset_prefix_cache(reset_connector=True)
        [after] = engine.generate([LONG])
        assert (after.token_ids, after.external_tokens) == (new.token_ids, 0)
        assert engine.reset_prefix_cache(reset_connector=True)
        assert engine.evaluate("llm.collective_rpc('name_weights', args=('step-1',))") == [1]
        engine.generate([prompt(40, 10)])
        assert namespace(engine) == "step-1"
        [named] = engine.generate([LONG])
        assert (named.token_ids, named.external_tokens) == (new.token_ids, 992)

        # ---- requests under way when the weights change: what they have computed is nobody's
        before = check_store(config)
        underway = (
            "(llm.enqueue([{'prompt_token_ids': %r}], __import__('vllm').SamplingParams(max_tokens=40, "
            "ignore_eos=True, detokenize=False, temperature=0), use_tqdm=False), "
            "[llm.llm_engine.step() for _ in range(5)], llm.reset_prefix_cache(reset_connector=True), "
            "[llm.llm_engine.step() for _ in range(60)])[2]"
        )
        assert engine.evaluate(underway % prompt(600, 11)["prompt_token_ids"]) is False
        assert engine.evaluate(f"{_CONNECTOR}.requests.retired") is True
        engine.generate([prompt(600, 12)])
        engine.idle(0.2)
        assert check_store(config)["blocks"] <= before["blocks"] + 600 // 32
        assert engine.reset_prefix_cache(reset_connector=True)
        assert engine.evaluate(f"{_CONNECTOR}.requests.retired") is False

        # ---- asleep and awake with the first weights again, which somebody says
        engine.evaluate(reload_ % str(model("text")))
        engine.evaluate("(llm.sleep(level=1), llm.wake_up())[0]")
        assert namespace(engine).startswith("unnamed-")
        assert engine.evaluate("llm.collective_rpc('name_weights', args=('',))") == [1]
        engine.generate([prompt(40, 13)])
        assert namespace(engine) == start
        engine.reset_prefix_cache()
        [back] = engine.generate([LONG])
        assert (back.token_ids, back.external_tokens) == (cold.token_ids, 992)
        assert engine.generate([OTHER])[0].token_ids == other.token_ids != new_other.token_ids
        seen = stats(engine)
        assert seen["resets_total"] >= 5
        # Of all that there were, one namespace is the engine's.
        assert seen["namespace"] == seen["info"] == 1
        engine.idle(0.3)
    # What nobody has named is gone with the engine that had it.
    assert check_store(config)["segments"] > 0
    assert len({file.parts[-3] for file in segment_files(tmp_path / "payloads")}) == 2


OFFLOADING = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {
        "spec_name": "HostTieringSpec",
        "spec_module_path": "tests.e2e.host_offloading",
        "cpu_bytes_to_use": 128 * 4 * 2 * 32 * 128 * 4,
        "blocks_per_chunk": 1,
        "secondary_tiers": [],
    },
}


def multi(config: dict[str, Any], *, first: str) -> dict[str, Any]:
    """Arguments of an engine with both connectors, one of them first."""
    ours = {
        "kv_connector": "KVStoreConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": config,
    }
    children = [ours, OFFLOADING] if first == "store" else [OFFLOADING, ours]
    return {
        "kv": {"connectors": children},
        "kv_config": {**BY_NAME, "kv_connector": "MultiConnector"},
    }


def test_with_vllms_own_cpu_offloading(text_model: Path, tmp_path: Path, store_config: Any) -> None:
    config = store_config("sqlite")
    before = Engine(text_model, kv=None, log_path=tmp_path / "0.log")
    first = Engine(text_model, log_path=tmp_path / "1.log", **multi(config, first="store"))
    with before as engine:
        expected = [engine.generate([one])[0].token_ids for one in (LONG, OTHER)]
    with first as engine:
        assert [engine.generate([one])[0].token_ids for one in (LONG, OTHER)] == expected
        engine.idle(0.3)
        engine.reset_prefix_cache()
        [near] = engine.generate([LONG])
        assert (near.token_ids, near.external_tokens) == (expected[0], 992)
        engine.generate([prompt(40, 9)])
        assert stats(engine)["loaded_tokens_total"] == 992
        shared = {file.parts[-3] for file in segment_files(tmp_path / "payloads")}
        assert check_store(config)["blocks"] == (992 + 480) // 32 + 1
        # Nobody serves anything from before a reset.
        assert engine.reset_prefix_cache(reset_connector=True)
        [fresh] = engine.generate([LONG])
        assert (fresh.token_ids, fresh.external_tokens) == (expected[0], 0)
        engine.idle(0.3)
        # What it has stored since goes bad: the request is computed, whatever the other one has of it.
        for file in segment_files(tmp_path / "payloads"):
            if file.parts[-3] not in shared:
                data = bytearray(file.read_bytes())
                data[-1] ^= 1
                file.write_bytes(data)
        engine.reset_prefix_cache()
        [bad] = engine.generate([LONG])
        assert bad.token_ids == expected[0]
        assert stats(engine)["loads_total"] == 2

    # Another engine, and the other order: only the store can know; afterwards, the CPU tier is asked first.
    # In processes of its own, so that statistics travel.
    options = multi(config, first="offloading") | {"multiprocess": True}
    with Engine(text_model, log_path=tmp_path / "2.log", **options) as engine:
        warm = [engine.generate([one])[0] for one in (LONG, OTHER)]
        assert [one.token_ids for one in warm] == expected
        assert [one.external_tokens for one in warm] == [full_blocks(LONG), full_blocks(OTHER)]
        engine.reset_prefix_cache()
        [near] = engine.generate([LONG])
        assert (near.token_ids, near.external_tokens) == (expected[0], 992)
        assert stats(engine)["promised_tokens_total"] == full_blocks(LONG) + full_blocks(OTHER)
        assert engine.metrics()["vllm:kv_offload_load_bytes_total"] >= 0
        assert engine.reset_prefix_cache(reset_connector=True)
        [fresh] = engine.generate([LONG])
        assert (fresh.token_ids, fresh.external_tokens) == (expected[0], 0)
