"""What makes two engines' chunks interchangeable, and which engines have none that are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm", reason="the connectors' tests need the full set-up: make setup")

from vllm.v1.kv_cache_interface import FullAttentionSpec

from connectors.tier import identity as tier_identity
from connectors.tier.identity import EngineConfig, engine_of, refuse_engine, tier_namespace
from kvstore.build import load_settings
from kvstore.errors import ConfigError
from kvstore.keys import namespace_id
from schemas.settings import Settings
from tests.connectors.tier.world import (
    ROW,
    changed,
    kv_cache_config,
    model_folder,
    offloading_spec,
    vllm_config,
)

pytestmark = pytest.mark.engine


@pytest.fixture
def settings() -> Settings:
    return load_settings({"payloads": "file:///x"}, environ={})


@pytest.fixture
def made(tmp_path: Path) -> EngineConfig:
    return EngineConfig(vllm_config(model_folder(tmp_path)), kv_cache_config(), offloading_spec())


def test_equal_engines_share(made: EngineConfig, tmp_path: Path, settings: Settings) -> None:
    again = EngineConfig(vllm_config(model_folder(tmp_path)), kv_cache_config(), offloading_spec())
    one, other = tier_namespace(made, settings, ROW), tier_namespace(again, settings, ROW)
    assert one == other
    assert one.page_order == "offloading"
    assert one.page_format.startswith("offloading1/cpu.")
    assert [group.kind for group in one.groups] == ["full", "sliding_window"]
    assert [group.window for group in one.groups] == [None, 100]
    assert all((g.slot_bytes, g.dtype, g.block_tokens) == (ROW, "BF16", 64) for g in one.groups)
    # One row has all workers' bytes: a segment is complete with one part.
    assert one.parts() == 1


def _offloading(**changes: Any) -> Callable[[EngineConfig], EngineConfig]:
    return lambda engine: replace(engine, offloading=changed(engine.offloading, **changes))


def _vllm(part: str, **changes: Any) -> Callable[[EngineConfig], EngineConfig]:
    def change(engine: EngineConfig) -> EngineConfig:
        inner = SimpleNamespace(**{**vars(getattr(engine.vllm, part)), **changes})
        return replace(engine, vllm=SimpleNamespace(**{**vars(engine.vllm), part: inner}))

    return change


def _heads(engine: EngineConfig) -> EngineConfig:
    config = kv_cache_config()
    spec = config.kv_cache_groups[0].kv_cache_spec
    config.kv_cache_groups[0].kv_cache_spec = FullAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=32, dtype=spec.dtype
    )
    return replace(engine, kv_cache=config)


_PARALLEL = offloading_spec().config.parallel
_CACHE = offloading_spec().config.cache


@pytest.mark.parametrize(
    "change",
    [
        _heads,
        _vllm("cache_config", cache_dtype="fp8"),
        _vllm("cache_config", mamba_ssm_cache_dtype="float32"),
        _vllm("cache_config", prefix_caching_hash_algo="sha256_cbor"),
        _vllm("parallel_config", tensor_parallel_size=2),
        _vllm("parallel_config", pipeline_parallel_size=2),
        _vllm("model_config", quantization="awq"),
        _vllm("model_config", hf_overrides={"rope_theta": 1.0}),
        _offloading(cache=replace(_CACHE, blocks_per_chunk=2)),
        _offloading(cache=replace(_CACHE, tokens_per_hash=8)),
        _offloading(canonical_layout=True),
        _offloading(replicated_layout=True),
        _offloading(kv_cache_layout="BLHNC"),
        _offloading(worker_kv_bytes_per_block=77),
        _offloading(parallel=replace(_PARALLEL, world_size=2)),
    ],
)
def test_whatever_changes_the_bytes_changes_the_namespace(
    change: Callable[[EngineConfig], EngineConfig], made: EngineConfig, settings: Settings
) -> None:
    before, after = tier_namespace(made, settings, ROW), tier_namespace(change(made), settings, ROW)
    assert namespace_id(before) != namespace_id(after)


def test_so_do_vllm_the_device_its_variables_and_its_kernels(
    made: EngineConfig, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def named() -> str:
        return namespace_id(tier_namespace(made, settings, ROW))

    seen = {named()}
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", "1")
        seen.add(named())
    with monkeypatch.context() as patch:
        patch.setattr("vllm.__version__", "0.32.1")
        seen.add(named())
    with monkeypatch.context() as patch:
        patch.setattr(tier_identity, "_device", lambda: ["cuda", "NVIDIA-H200", "9.0"])
        seen.add(named())
    with monkeypatch.context() as patch:
        patch.setattr(tier_identity, "_version", lambda package: "1.0")
        seen.add(named())
    assert len(seen) == 5
    # What is of one process or node only is none of it.
    with monkeypatch.context() as patch:
        for name in ("VLLM_DP_RANK", "VLLM_DP_RANK_LOCAL", "VLLM_NIXL_SIDE_CHANNEL_PORT", "VLLM_DP_SIZE"):
            patch.setenv(name, "3")
        patch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
        patch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "7")
        assert named() in seen


def test_the_cpus_attention_is_chosen_by_what_the_facts_hold(
    made: EngineConfig, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The instruction set that vLLM's CPU backend arranges a page for is a function of these facts."""
    import torch
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    seen: dict[str, set[str]] = {}
    for amx in (False, True):
        monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda amx=amx: amx)
        for dtype in (torch.float32, torch.bfloat16):
            for block in (16, 32):
                config = kv_cache_config()
                for group in config.kv_cache_groups:
                    group.kv_cache_spec = FullAttentionSpec(
                        block_size=block, num_kv_heads=2, head_size=64, dtype=dtype
                    )
                named = tier_namespace(replace(made, kv_cache=config), settings, ROW).page_format
                seen.setdefault(named, set()).add(_get_attn_isa(dtype, block, 64))
    assert all(len(sets) == 1 for sets in seen.values()), "one format, two arrangements"
    assert len({isa for sets in seen.values() for isa in sets}) > 1


def test_other_weights_or_another_tenant_never_match(
    made: EngineConfig, tmp_path: Path, settings: Settings
) -> None:
    seen = {namespace_id(tier_namespace(made, settings, ROW))}
    other = load_settings({"payloads": "file:///x", "identity": {"tenant": "b"}}, environ={})
    seen.add(namespace_id(tier_namespace(made, other, ROW)))
    (tmp_path / "model" / "model.bin").write_bytes(bytes(63) + b"\1")
    seen.add(namespace_id(tier_namespace(made, settings, ROW)))
    assert len(seen) == 3


def test_a_draft_models_weights_count(made: EngineConfig, tmp_path: Path, settings: Settings) -> None:
    folder = tmp_path / "draft"
    folder.mkdir()
    draft = vllm_config(model_folder(folder)).model_config
    made.vllm.speculative_config = SimpleNamespace(method="eagle", draft_model_config=draft)
    before = tier_namespace(made, settings, ROW)
    (Path(draft.model) / "model.bin").write_bytes(bytes(63) + b"\1")
    assert tier_namespace(made, settings, ROW) != before


@pytest.mark.parametrize(
    ("change", "given", "says"),
    [
        (lambda e: replace(e, vllm=SimpleNamespace(**{**vars(e.vllm), "lora_config": object()})), {},
         'identity.lora to "trust"'),
        (_vllm("model_config", multimodal_config=SimpleNamespace(mm_processor_cache_gb=4)),
         {"client_uuids": "refuse"}, "client_uuids"),
        (_offloading(parallel=replace(_PARALLEL, world_size=2)), {}, 'must be "mp"'),
    ],
)  # fmt: skip
def test_engines_whose_chunks_can_not_be_shared_are_refused(
    change: Callable[[EngineConfig], EngineConfig],
    given: dict[str, Any],
    says: str,
    made: EngineConfig,
    settings: Settings,
) -> None:
    refuse_engine(made, settings)
    asked = load_settings({"payloads": "file:///x", "identity": given}, environ={})
    with pytest.raises(ConfigError) as failure:
        refuse_engine(change(made), asked)
    assert says in str(failure.value)
    trusting = load_settings(
        {"payloads": "file:///x", "identity": {"lora": "trust", "client_uuids": "trust"}}, environ={}
    )
    if "mp" not in says:
        refuse_engine(change(made), trusting)


def test_several_workers_on_one_node_are_fine(made: EngineConfig, settings: Settings) -> None:
    two = _offloading(parallel=replace(_PARALLEL, world_size=2))(made)
    refuse_engine(_vllm("parallel_config", distributed_executor_backend="mp")(two), settings)
    with pytest.raises(ConfigError, match="one node"):
        nodes = _vllm("parallel_config", distributed_executor_backend="mp", nnodes_within_dp=2)
        refuse_engine(nodes(two), settings)


def test_a_tier_made_by_nobody_vllm_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="which engine it is made for"):
        engine_of(object())
    spec = object()
    vllm_config, kv_cache_config = object(), object()
    found = engine_of(spec)
    assert (found.vllm, found.kv_cache) == (vllm_config, kv_cache_config)
