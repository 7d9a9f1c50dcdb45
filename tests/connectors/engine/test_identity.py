"""What makes two engines' KV blocks interchangeable: fields that no shape shows."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from safetensors.numpy import save_file
from vllm.config.speculative import SpeculativeConfig

from connectors.engine.identity import kv_namespace, with_release
from connectors.engine.version import vllm_release
from kvstore.errors import ConfigError
from kvstore.keys import namespace_id
from schemas.namespace import GroupSpec, Namespace
from schemas.settings import IdentitySettings, Settings

pytestmark = pytest.mark.engine

FULL = GroupSpec(kind="full", block_tokens=16, dtype="BF16", shape=(2, 2, 16, 8))
STATE = GroupSpec(kind="mamba", block_tokens=16, dtype="I8", shape=(2, 1, 1, 64))


def model(folder: Path, seed: int) -> Any:
    folder.mkdir(exist_ok=True)
    values = np.random.default_rng(seed).random((64, 64), dtype=np.float32)
    save_file({"w": values}, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps({"hidden_size": 64}))
    return SimpleNamespace(
        model=str(folder), revision=None, dtype="torch.bfloat16", quantization=None, max_model_len=100
    )


def namespace(
    target: Any,
    draft: Any = None,
    groups: tuple[GroupSpec, ...] = (FULL,),
    *,
    settings: Any = None,
    **cache: Any,
) -> Namespace:
    config = SimpleNamespace(
        model_config=target,
        cache_config=SimpleNamespace(
            **{
                "prefix_caching_hash_algo": "sha256",
                "cache_dtype": "auto",
                "mamba_cache_dtype": "auto",
                "mamba_ssm_cache_dtype": "auto",
            }
            | cache
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=2, pipeline_parallel_size=1),
        speculative_config=SimpleNamespace(draft_model_config=draft) if draft else None,
    )
    made = Settings(payloads="file:///tmp/x", **(settings or {}))
    return kv_namespace(config, groups, made, hash_tokens=16, page_format="cpu/X")


def test_a_draft_models_weights_are_part_of_the_blocks(tmp_path: Path) -> None:
    """Its layers are in the same blocks as the target's."""
    target = model(tmp_path / "target", 1)
    one, other = model(tmp_path / "one", 2), model(tmp_path / "other", 3)
    ids = {namespace_id(namespace(target, draft)) for draft in (None, one, other)}
    assert len(ids) == 3
    # vLLM overrides a draft's configuration itself, from 0.33 on with what isn't a plain function.
    made = SpeculativeConfig.compose_draft_hf_overrides(None)
    for overrides in (made, functools.partial(made)):
        overridden = SimpleNamespace(**vars(one), hf_overrides=overrides)
        assert namespace(target, overridden) == namespace(target, one)
    # A drafter that is part of the target, as with MTP, has no weights of its own.
    assert namespace(target, target) == namespace(target)
    # An operator's label stands for all weights.
    labelled = {"identity": {"weights": "mine"}}
    assert namespace(target, one, settings=labelled).weights == "mine"


def test_states_are_bytes_whose_dtype_only_the_configuration_says(tmp_path: Path) -> None:
    target = model(tmp_path / "target", 1)
    plain = namespace(target, groups=(FULL, STATE))
    assert plain != namespace(target, groups=(FULL, STATE), mamba_ssm_cache_dtype="float16")
    assert plain != namespace(target, groups=(FULL, STATE), mamba_cache_dtype="float16")
    assert namespace(target) == namespace(target, mamba_ssm_cache_dtype="float16")


def test_engines_of_any_tp_size_share_only_if_told_to(tmp_path: Path) -> None:
    target = model(tmp_path / "target", 1)
    assert namespace(target).parallel.tp == 2
    assert namespace(target, settings={"identity": {"any_tp": True}}).parallel.tp == 0


def test_releases_of_vllm_share_only_if_told_to() -> None:
    usual = Settings(payloads="file:///tmp/x")
    trusting = Settings(payloads="file:///tmp/x", identity=IdentitySettings(any_vllm=True))
    assert with_release("cpu/X", usual) == f"vllm{vllm_release()}/cpu/X"
    assert with_release("cpu/X", trusting) == "cpu/X"


def test_weights_that_cannot_be_sampled_need_a_label(tmp_path: Path) -> None:
    target = model(tmp_path / "target", 1)
    remote = SimpleNamespace(**vars(target) | {"model": "somebody/draft-that-is-not-here"})
    with pytest.raises(ConfigError, match=r"identity\.weights"):
        namespace(target, remote)
