"""From vLLM's configuration to a namespace: what makes two engines' bytes interchangeable.

Runs in the scheduler's process only; workers are told the namespace, so the two can't differ.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Any

from connectors.tensors import SAFETENSORS_DTYPES
from kvstore.errors import ConfigError
from kvstore.weights import weights_digest
from schemas.namespace import GroupSpec, Namespace, Parallel
from schemas.settings import Settings

#: Keys of a model's config.json that say nothing about its outputs.
_VOLATILE = {"_name_or_path", "transformers_version", "_commit_hash"}


def kv_namespace(vllm_config: Any, kv_cache_config: Any, settings: Settings) -> Namespace:
    """The namespace of an engine's KV blocks. Raises ConfigError for what can't be shared yet."""
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    _refuse_parallel(parallel)
    _refuse_unsupported(kv_cache_config)
    algo = cache.prefix_caching_hash_algo
    return Namespace(
        kind="kv",
        **_model_fields(model, settings),
        block_tokens=cache.block_size,
        hash_algo=algo,
        hash_root=_hash_root(algo),
        kv_dtype=str(cache.cache_dtype),
        page_order="LHNC",
        groups=tuple(group_spec(group, cache.block_size) for group in kv_cache_config.kv_cache_groups),
        parallel=Parallel(tp=parallel.tensor_parallel_size, pp=parallel.pipeline_parallel_size),
        codec=settings.segment.codec,
        epoch=settings.identity.epoch,
    )


def ec_namespace(vllm_config: Any, settings: Settings) -> Namespace:
    """The namespace of an engine's encoder outputs. Raises ConfigError for what can't be shared yet."""
    _refuse_parallel(vllm_config.parallel_config)
    return Namespace(
        kind="ec",
        **_model_fields(vllm_config.model_config, settings),
        codec=settings.segment.codec,
        epoch=settings.identity.epoch,
    )


def group_spec(group: Any, block_tokens: int) -> GroupSpec:
    """One KV cache group as a slot: [layers, heads, tokens, content]."""
    spec = group.kv_cache_spec
    specs = getattr(spec, "kv_cache_specs", None)
    if specs is not None:
        shapes = {_page_shape(one) for one in specs.values()}
        if len(shapes) != 1:
            raise ConfigError("kvstore: layers of one KV cache group differ in page shape; not supported yet")
        spec = next(iter(specs.values()))
    heads, tokens, content, dtype = _page_shape(spec)
    names = layer_order(group.layer_names)
    return GroupSpec(
        kind="mla" if type(spec).__name__ == "MLAAttentionSpec" else "full",
        block_tokens=block_tokens,
        dtype=dtype,
        shape=(len(names), heads, tokens, content),
        layers=hashlib.sha256("\n".join(names).encode()).hexdigest()[:16],
    )


def layer_order(names: list[str]) -> list[str]:
    """Layer names in slot order: by their numbers, so that `layers.10` follows `layers.9`."""
    return sorted(names, key=lambda name: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", name)])


def _page_shape(spec: Any) -> tuple[int, int, int, str]:
    dtype = SAFETENSORS_DTYPES.get(spec.dtype)
    if dtype is None:
        raise ConfigError(f"kvstore: KV cache dtype {spec.dtype} has no safetensors name; not supported")
    return spec.num_heads, spec.num_states, spec.state_content_size_bytes // spec.dtype.itemsize, dtype


def _refuse_parallel(parallel: Any) -> None:
    for name in ("tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size"):
        if (size := getattr(parallel, name, 1)) != 1:
            raise ConfigError(f"kvstore: {name} = {size} is not supported yet; only 1")


def _refuse_unsupported(kv_cache_config: Any) -> None:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"kvstore: this model has {len(groups)} KV cache groups; only models with full attention in "
            "every layer (one group, MLA included) are supported yet. --disable-hybrid-kv-cache-manager "
            "makes one group of sliding-window and full-attention layers."
        )
    kinds = {type(spec).__name__ for spec in _specs(groups[0].kv_cache_spec)}
    if not kinds <= {"FullAttentionSpec", "MLAAttentionSpec"}:
        raise ConfigError(f"kvstore: KV cache kind {', '.join(sorted(kinds))} is not supported yet")


def _specs(spec: Any) -> list[Any]:
    inner = getattr(spec, "kv_cache_specs", None)
    return [spec] if inner is None else list(inner.values())


def _hash_root(algo: str) -> str:
    """Digest of what the first block's hash starts from; engines that differ in it never share."""
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import resolve_none_hash_seed

    seed = resolve_none_hash_seed(get_hash_fn_by_name(algo))
    if "xxhash" in algo and os.getenv("PYTHONHASHSEED") is None:
        raise ConfigError(
            f"kvstore: with --prefix-caching-hash-algo {algo} vLLM draws a random hash root per process, so "
            "no engine would ever find another's blocks. Use sha256 (the default), or set PYTHONHASHSEED to "
            "one value for the whole fleet."
        )
    return hashlib.sha256(str(seed).encode()).hexdigest()[:16]


def _model_fields(model: Any, settings: Settings) -> dict[str, Any]:
    identity = settings.identity
    name = str(model.model)
    folder = Path(name)
    local = folder.exists()
    return {
        "tenant": identity.tenant,
        "model": identity.model or (folder.name if local else name),
        "revision": "" if local else str(model.revision or ""),
        "weights": identity.weights or _weights(model, folder if local else None),
        "config": _config_digest(model, folder if local else None),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization or ""),
    }


def _weights(model: Any, folder: Path | None) -> str:
    if folder is None:
        folder = _hub_folder(str(model.model), model.revision)
    if folder is None:
        raise ConfigError(
            f"kvstore: the weights of {model.model} are not on this machine's disk, so they can't be told "
            "from others; set identity.weights (KVSTORE_IDENTITY__WEIGHTS) to a label that changes with them"
        )
    return weights_digest(folder)


def _hub_folder(name: str, revision: str | None) -> Path | None:
    """Where the hub's cache holds this model; asks no network."""
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (OSError, ValueError):
        return None


def _config_digest(model: Any, folder: Path | None) -> str:
    """Digest of the model's configuration as given: its config.json and the overrides of it.

    The file rather than the parsed object, because models edit that object while they load, and
    how far they are depends on the process.
    """
    file = folder / "config.json" if folder is not None and folder.is_dir() else None
    if file is not None and file.exists():
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    else:
        config = model.hf_config.to_dict()
    config = {key: value for key, value in config.items() if key not in _VOLATILE}
    overrides = getattr(model, "hf_overrides", None)
    if callable(overrides):
        overrides = f"{getattr(overrides, '__module__', '')}.{getattr(overrides, '__qualname__', '')}"
    text = json.dumps([config, overrides or {}], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def refuse_counter_identifiers(vllm_config: Any) -> None:
    """Raise ConfigError where vLLM numbers multimodal inputs instead of hashing them."""
    mm = vllm_config.model_config.multimodal_config
    cache_off = mm is not None and getattr(mm, "mm_processor_cache_gb", 1) <= 0
    if cache_off and not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "kvstore: with --mm-processor-cache-gb 0 and prefix caching off vLLM names images by a "
            "per-process counter, so different images of two engines would share a name. Set "
            "--mm-processor-cache-gb to more than 0, or enable prefix caching."
        )
