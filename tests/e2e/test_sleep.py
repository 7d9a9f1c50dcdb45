"""An engine that sleeps, is given other weights and wakes up with a second handshake, as vLLM's do from 0.33
on: its connector goes on where it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine import Engine
from tests.e2e.sharing import check_store, full_blocks, prompt, segment_files

pytestmark = pytest.mark.engine

LONG = prompt(1000, 1)
UNDER_WAY = prompt(600, 2)
LATE = prompt(500, 3)
OTHER = prompt(400, 4)
_SCHEDULER = "llm.llm_engine.engine_core.engine_core.scheduler"
_HALF = f"{_SCHEDULER}.connector._scheduler"
_PATCHES = "__import__('tests.e2e.engine_patches', fromlist=['x'])"
_TOKENS = 40


def namespace(engine: Engine) -> str:
    return str(engine.evaluate(f"{_HALF}.space.namespace.weights"))


def stored(payloads: Path) -> dict[str, int]:
    """Segments by the id of their namespace."""
    found = [file.parts[-3] for file in segment_files(payloads)]
    return {one: found.count(one) for one in sorted(set(found))}


def give_weights(engine: Engine, folder: Path) -> None:
    """Puts a model's weights in place of the engine's, as a trainer does: no configuration names them."""
    file = str(folder / "model.safetensors")
    weights = f"iter(__import__('safetensors.torch', fromlist=['x']).load_file({file!r}).items())"
    engine.evaluate(f"llm.collective_rpc('reload_weights', kwargs={{'weights_iterator': {weights}}})")


def begin(engine: Engine, one: dict[str, Any]) -> list[int]:
    """Hands a prompt in and computes until some tokens are there, which are returned."""
    engine.evaluate(
        f"llm.enqueue([{one!r}], __import__('vllm').SamplingParams(max_tokens={_TOKENS}, ignore_eos=True, "
        "detokenize=False, temperature=0), use_tqdm=False)"
    )
    tokens: list[int] = []
    while len(tokens) < 5:
        tokens = engine.evaluate(
            f"(llm.llm_engine.step(), sum((list(r.output_token_ids) for r in {_SCHEDULER}.running), []))[1]"
        )
    return tokens


def end(engine: Engine) -> list[int]:
    """Tokens of the request that was begun, once it has ended."""
    while not (ended := engine.evaluate(_STEP)):
        pass
    [tokens] = ended
    return list(tokens)


_STEP = "[list(one.outputs[0].token_ids) for one in llm.llm_engine.step() if one.finished]"


def test_a_second_handshake_keeps_the_namespace_and_what_is_under_way(
    model: Callable[..., Path], tmp_path: Path, store_config: Any
) -> None:
    config, trained = store_config("sqlite"), model("text", seed=1)
    with Engine(
        model("text"),
        kv=config | {"identity": {"model": "text"}},
        log_path=tmp_path / "1.log",
        worker_extension_cls="tests.e2e.hooks_worker.Named",
    ) as engine:
        engine.evaluate(f"{_PATCHES}.repeat_handshakes()")
        start = namespace(engine)
        [old] = engine.generate([LONG])
        engine.idle(0.2)
        [first] = stored(tmp_path / "payloads")

        # ---- asleep with a request that decodes and a save that is being written, awake with other weights
        engine.delay_transfers(write_s=2.0)
        engine.generate([LATE], max_tokens=1)
        before = begin(engine, UNDER_WAY)
        engine.evaluate("llm.sleep(level=1, mode='keep')")
        give_weights(engine, trained)
        engine.evaluate("llm.wake_up()")
        engine.delay_transfers()
        assert namespace(engine).startswith("unnamed-")
        tokens = end(engine)
        assert len(tokens) == _TOKENS and tokens[: len(before)] == before
        engine.idle(0.2)
        held = engine.held()
        assert (held["requests"], held["staging"], held["tracked"]) == (0, 0, 0)
        # What was computed before is there, under its own name, and nothing that was computed after it.
        kept = stored(tmp_path / "payloads")
        assert set(kept) > {first}

        # ---- nothing old is loaded, and what was under way went on with the new weights alone
        [new] = engine.generate([LONG])
        assert new.external_tokens == 0 and new.token_ids != old.token_ids
        engine.reset_prefix_cache(reset_connector=True)
        rest = {"prompt_token_ids": [*UNDER_WAY["prompt_token_ids"], *before]}
        [again] = engine.generate([rest], max_tokens=_TOKENS - len(before))
        assert (again.external_tokens, again.token_ids) == (0, tokens[len(before) :])
        engine.idle(0.2)
        engine.reset_prefix_cache()
        [warm] = engine.generate([rest], max_tokens=_TOKENS - len(before))
        assert (warm.external_tokens, warm.token_ids) == (full_blocks(UNDER_WAY), again.token_ids)
        assert stored(tmp_path / "payloads")[first] == kept[first], "under the name of the old weights"
        assert engine.evaluate(f"{_HALF}.saving.under_way") == 0, "of what began before, and after"

        # ---- the old weights again: what was being written when it fell asleep is found, too
        engine.evaluate("llm.sleep(level=1)")
        give_weights(engine, model("text"))
        engine.evaluate("llm.wake_up()")
        assert engine.evaluate("llm.collective_rpc('name_weights', args=('',))") == [1]
        engine.generate([prompt(40, 13)])
        assert namespace(engine) == start
        [back, late] = engine.generate([LONG, LATE])
        assert (back.external_tokens, back.token_ids) == (full_blocks(LONG), old.token_ids)
        assert late.external_tokens == full_blocks(LATE)
        engine.idle(0.2)

        # ---- another handshake, of workers with other pages: the store is left alone for good
        kept = stored(tmp_path / "payloads")
        engine.evaluate(
            "[setattr(one, 'get_handshake_metadata', lambda said=one.get_handshake_metadata(): "
            "__import__('dataclasses').replace(said, page_format='other')) for one in "
            "[__import__('vllm.distributed.kv_transfer', fromlist=['x']).get_kv_transfer_group()]]"
        )
        engine.evaluate("(llm.sleep(level=1), llm.wake_up())[0]")
        assert engine.evaluate(f"{_HALF}.requests.retired") is True
        assert engine.evaluate("llm.collective_rpc('name_weights', args=('',))") == [1]
        [alone] = engine.generate([LONG])
        assert (alone.external_tokens, alone.token_ids) == (0, old.token_ids)
        assert engine.reset_prefix_cache(reset_connector=True)
        engine.generate([OTHER])
        engine.idle(0.2)
        assert stored(tmp_path / "payloads").get(first) == kept[first]
        assert "woken up with other pages" in engine.log()
    assert check_store(config)["segments"] > 0
