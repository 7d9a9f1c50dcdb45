"""The harness itself, without a connector: what the other engine tests take for granted.

"Same tokens" means something only if other prompts and other images give other tokens, and "not encoded
again" only if an encoder call is counted when there is one.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.engine import ROOT, Engine, EngineError, group_members, random_image, random_tokens
from tests.waiting import PATIENCE_S
from tools.models import IMAGE_TOKEN

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("kind", ["text", "mla"])
def test_tokens_depend_on_the_prompt_and_on_nothing_else(kind: str, model, tmp_path: Path) -> None:
    prompts = [{"prompt_token_ids": random_tokens(300, seed)} for seed in (1, 2)]
    # One token changed at the very start must show at the end.
    prompts.append({"prompt_token_ids": [17, *prompts[0]["prompt_token_ids"][1:]]})
    with Engine(model(kind), log_path=tmp_path / "engine.log") as engine:
        first = engine.generate(prompts)
        again = [engine.generate([prompt])[0] for prompt in prompts]
        assert [r.token_ids for r in again] == [r.token_ids for r in first]
        assert len({tuple(r.token_ids) for r in first}) == len(prompts)
        for result in first:
            assert len(result.token_ids) == 16
            assert len(set(result.token_ids)) > 8, "a repeating model proves nothing"
            assert (result.prompt_tokens, result.cached_tokens, result.external_tokens) == (300, 0, 0)
            assert result.ttft_s is not None
            assert result.ttft_s > 0
        # vLLM's CPU backend has no prefix caching for MLA.
        expected = 288 if kind == "text" else 0
        assert [r.local_tokens for r in again] == [expected] * 3
        assert [r.cached_tokens for r in again] == [expected] * 3
        assert engine.encoder_calls() == 0


@pytest.mark.parametrize("kind", ["image", "deepstack"])
def test_images_change_tokens_and_encoder_runs_are_counted(kind: str, model, tmp_path: Path) -> None:
    image, other = random_image(1), random_image(2)
    token = IMAGE_TOKEN[kind]
    one = f"w20 w30 {token} w40 w50"
    two = f"w20 {token} w30 {token} w40"
    with Engine(model(kind), log_path=tmp_path / "engine.log", limit_mm_per_prompt={"image": 2}) as engine:
        [a, b] = engine.generate([{"prompt": one, "images": [i]} for i in (image, other)])
        assert a.token_ids != b.token_ids
        assert engine.encoder_calls() == 2
        [ab, ba] = engine.generate([{"prompt": two, "images": i} for i in ([image, other], [other, image])])
        assert ab.token_ids != ba.token_ids
        assert engine.encoder_calls() == 2, "both images are in the engine's own encoder cache"
        engine.reset_mm_cache()
        engine.reset_prefix_cache()
        [again] = engine.generate([{"prompt": one, "images": [image]}])
        assert again.token_ids == a.token_ids
        assert engine.encoder_calls() == 3


def test_external_tokens_and_skipped_encodings_show(deepstack_model: Path, tmp_path: Path) -> None:
    """With vLLM's own example connectors, so that the counts are known to be right before ours use them."""
    words = " ".join(f"w{token}" for token in random_tokens(100, 1))
    prompt = {"prompt": f"{words} {IMAGE_TOKEN['deepstack']} w20", "images": [random_image(1)]}
    seen = []
    for run in (1, 2):
        with Engine(
            deepstack_model,
            kv={"shared_storage_path": str(tmp_path / "kv")},
            kv_config={"kv_connector": "ExampleConnector", "kv_connector_module_path": None},
            ec={"shared_storage_path": str(tmp_path / "ec")},
            ec_config={"ec_connector": "ECExampleConnector", "ec_connector_module_path": None},
            log_path=tmp_path / f"{run}.log",
        ) as engine:
            [result] = engine.generate([prompt])
            assert engine.metrics()["vllm:external_prefix_cache_hits_total"] == result.external_tokens
            seen.append((result.token_ids, result.external_tokens, engine.encoder_calls()))
    (tokens, *cold), (same_tokens, *warm) = seen
    assert same_tokens == tokens
    assert (cold, warm) == ([0, 1], [96, 0])


def test_the_engine_survives_what_it_refuses_and_dies_when_told(text_model: Path, tmp_path: Path) -> None:
    engine = Engine(text_model, log_path=tmp_path / "engine.log", max_model_len=512)
    with engine:
        with pytest.raises(EngineError, match="512"):
            engine.generate([{"prompt_token_ids": random_tokens(600, 1)}])
        batch = [{"prompt_token_ids": random_tokens(100, seed)} for seed in range(3)]
        kept, aborted, also_kept = engine.generate(batch, abort_after={1: 2}, max_tokens=8)
        assert (len(kept.token_ids), len(also_kept.token_ids)) == (8, 8)
        assert aborted.finish_reason == "abort"
        assert engine.metrics()["vllm:prompt_tokens_total"] >= 200
        engine.kill()
        assert not engine.alive


@pytest.mark.parametrize("multiprocess", [False, True])
def test_no_engine_outlives_its_parent(multiprocess: bool, text_model: Path, tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from tests.e2e.engine import Engine\n"
        f"e = Engine(Path({str(text_model)!r}), log_path=Path({str(tmp_path / 'engine.log')!r}),"
        f" multiprocess={multiprocess})\n"
        "e.wait_ready(); print(e.pid, flush=True); time.sleep(600)"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert parent.stdout is not None
        group = int(parent.stdout.readline())
        members = group_members(group)
        assert len(members) >= (2 if multiprocess else 1)
    finally:
        parent.send_signal(signal.SIGKILL)
        parent.wait()
        if parent.stdout is not None:
            parent.stdout.close()
    until = time.monotonic() + PATIENCE_S
    while (left := group_members(group)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not left
