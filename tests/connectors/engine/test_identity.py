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

from connectors.engine.allowed.loaders import FORMATS
from connectors.engine.identity import kv_namespace, with_release
from connectors.engine.version import vllm_release
from connectors.weights import UNNAMED
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
    load: dict[str, Any] | None = None,
    draft_load: dict[str, Any] | None = None,
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
        load_config=SimpleNamespace(**{"load_format": "auto"} | (load or {})),
        speculative_config=SimpleNamespace(
            draft_model_config=draft, draft_load_config=SimpleNamespace(**draft_load) if draft_load else None
        )
        if draft
        else None,
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


def test_weights_that_cannot_be_sampled_have_no_name_but_a_label(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target = model(tmp_path / "target", 1)
    remote = SimpleNamespace(**vars(target) | {"model": "somebody/draft-that-is-not-here"})
    one, other = namespace(target, remote), namespace(target, remote)
    assert one.weights.startswith(UNNAMED) and other.weights.startswith(UNNAMED)
    assert one.weights != other.weights
    assert "the files of somebody/draft-that-is-not-here are not on this machine's disk" in caplog.text
    assert namespace(target, remote, settings={"identity": {"weights": "mine"}}).weights == "mine"


def test_how_weights_are_loaded_decides_whether_they_have_a_name(tmp_path: Path) -> None:
    target = model(tmp_path / "target", 1)
    usual = namespace(target).weights
    named = {kind: namespace(target, load={"load_format": kind}).weights for kind in FORMATS}
    assert named["auto"] == usual
    # Formats that choose other files of the same folder are other names, and two that choose the same share.
    assert named["pt"] == f"{usual}/pt"
    assert named["fastsafetensors"] == named["safetensors"] != named["pt"]
    assert not any(name.startswith(UNNAMED) for name in named.values())
    quick = {"model_loader_extra_config": {"enable_multithread_load": True, "num_threads": 4}}
    assert namespace(target, load=quick).weights == usual
    for load in (
        {"load_format": "dummy"},
        {"load_format": "tensorizer"},
        {"load_format": "npcache"},
        {"load_format": "ipc_cache"},
        {"load_format": "one-that-nobody-knows"},
        {"load_format": "sharded_state", "model_loader_extra_config": {"pattern": "../other-{rank}"}},
    ):
        assert namespace(target, load=load).weights.startswith(UNNAMED), load
    elsewhere = SimpleNamespace(**vars(target) | {"model_weights": "s3://bucket/model"})
    assert namespace(elsewhere).weights.startswith(UNNAMED)


def test_every_format_of_vllms_is_known_or_left_out_on_purpose() -> None:
    from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER

    left_out = {"dummy", "tensorizer", "modelexpress", "ipc_cache", "npcache"}
    assert set(_LOAD_FORMAT_TO_MODEL_LOADER) == set(FORMATS) | left_out, "look up what the format reads"


def test_a_loader_of_somebody_elses_under_a_known_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor import model_loader

    class Other(model_loader.DefaultModelLoader): ...

    target = model(tmp_path / "target", 1)
    monkeypatch.setitem(model_loader._LOAD_FORMAT_TO_MODEL_LOADER, "auto", Other)
    assert namespace(target).weights.startswith(UNNAMED)


def test_a_label_names_what_was_loaded_however_but_no_random_numbers(tmp_path: Path) -> None:
    target, draft = model(tmp_path / "target", 1), model(tmp_path / "draft", 2)
    mine = {"identity": {"weights": "mine"}}
    assert namespace(target, settings=mine, load={"load_format": "tensorizer"}).weights == "mine"
    drawn = {"load_format": "dummy"}
    assert namespace(target, settings=mine, load=drawn).weights.startswith(UNNAMED)
    assert namespace(target, draft, settings=mine, draft_load=drawn).weights.startswith(UNNAMED)
    assert namespace(target, draft, draft_load=drawn).weights.startswith(UNNAMED)


def test_code_that_comes_with_a_model_counts_if_it_may_run(tmp_path: Path) -> None:
    target = model(tmp_path / "target", 1)
    plain, trusting = namespace(target), SimpleNamespace(**vars(target) | {"trust_remote_code": True})
    assert namespace(trusting) == plain, "there is no code"
    folder = Path(target.model)
    (folder / "inner").mkdir()
    (folder / "inner" / "modeling.py").write_text("x = 1")
    assert namespace(target) == plain
    one = namespace(trusting)
    assert one.weights == plain.weights and one.config != plain.config
    (folder / "inner" / "modeling.py").write_text("x = 2")
    assert namespace(trusting).config not in (one.config, plain.config)
    elsewhere = SimpleNamespace(**vars(trusting) | {"code_revision": "main"})
    assert namespace(elsewhere).weights.startswith(UNNAMED)
    (folder / "config.json").write_text(json.dumps({"auto_map": {"AutoModel": "somebody/repo--code.Model"}}))
    assert namespace(trusting).weights.startswith(UNNAMED)
    assert not namespace(target).weights.startswith(UNNAMED)


def test_a_models_class_that_reads_more_than_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm import ModelRegistry

    target = model(tmp_path / "target", 1)

    def of(architecture: str) -> str:
        return namespace(SimpleNamespace(**vars(target), architectures=[architecture])).weights

    assert of("LlamaForCausalLM") == of("OneThatNobodyKnows") == namespace(target).weights
    assert of("UltravoxModel").startswith(UNNAMED), "its towers are in repositories of their own"
    monkeypatch.setattr(ModelRegistry, "models", dict(ModelRegistry.models))
    ModelRegistry.register_model("LlamaForCausalLM", "somebodys_plugin.models:Llama")
    assert of("LlamaForCausalLM").startswith(UNNAMED)


def test_what_chooses_among_the_weight_files_counts(tmp_path: Path) -> None:
    target = model(tmp_path / "target", 1)
    before = namespace(target)
    index = {"weight_map": {"w": "model.safetensors"}}
    (Path(target.model) / "model.safetensors.index.json").write_text(json.dumps(index))
    assert namespace(target) != before
