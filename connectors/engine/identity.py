"""Derives the namespace from vLLM's configuration: everything that makes two engines' bytes interchangeable.

The scheduler half does so in its own process and sends the namespace to the workers, so that both can't
differ. Only a worker knows the contents of a page (`page_format`), and reports them to the scheduler half
once at the start.
"""

from __future__ import annotations

import hashlib
import json
import logging
import marshal
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from connectors.engine.allowed.files import NotKnown, Source, source_of
from connectors.engine.allowed.loaders import INDEXES, code_digest, refuse_drawn, weights_name
from connectors.engine.allowed.options import options
from connectors.engine.layout import LocalGroup
from connectors.engine.tensors import PagedCache
from connectors.engine.version import vllm_release
from connectors.weights import unnamed
from kvstore.errors import ConfigError
from kvstore.rules.prefix import PrefixRule
from schemas.namespace import GroupSpec, Namespace, Parallel
from schemas.settings import Settings

log = logging.getLogger(__name__)

#: Keys of a model's config.json that say nothing about its outputs.
_VOLATILE = {"_name_or_path", "transformers_version", "_commit_hash"}
#: Files beside a model that decide what its encoder gets as input.
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
#: Fields of vLLM's multimodal configuration that change an encoder's input or output, and that no hash of
#: vLLM's includes.
_MULTIMODAL_FIELDS = (
    "mm_processor_kwargs", "media_io_kwargs", "mm_device_do_normalize", "mm_encoder_attn_backend",
    "mm_encoder_attn_dtype", "video_pruning_rate", "video_pruning_method",
)  # fmt: skip


def kv_namespace(
    vllm_config: Any,
    groups: Sequence[GroupSpec],
    settings: Settings,
    *,
    hash_tokens: int,
    page_format: str,
) -> Namespace:
    """Returns the namespace of an engine's KV blocks. Raises ConfigError if they can't be shared.

    `hash_tokens` is how many tokens a block hash stands for; every group's block is a multiple of it.
    """
    config, parallel = vllm_config.cache_config, vllm_config.parallel_config
    algo = config.prefix_caching_hash_algo
    tp = 0 if settings.identity.any_tp else parallel.tensor_parallel_size
    fields = model_fields(vllm_config, settings, kind="kv")
    kv_dtype = str(config.cache_dtype)
    if any(group.kind == "mamba" for group in groups):
        # vLLM hands such pages out as bytes, so nothing else tells the dtypes that are in them.
        kv_dtype += f"/{config.mamba_cache_dtype}/{config.mamba_ssm_cache_dtype}"
    return Namespace(
        kind="kv",
        **fields,
        block_tokens=hash_tokens,
        hash_algo=algo,
        hash_root=_hash_root(algo),
        kv_dtype=kv_dtype,
        page_order="LHNC",
        page_format=page_format,
        groups=tuple(groups),
        parallel=Parallel(tp=tp, pp=parallel.pipeline_parallel_size),
        codec=settings.segment.codec,
        epoch=settings.identity.epoch,
    )


def ec_namespace(vllm_config: Any, settings: Settings) -> Namespace:
    """Returns the namespace of an engine's encoder outputs. Raises ConfigError if they can't be shared."""
    return Namespace(
        kind="ec",
        **model_fields(vllm_config, settings, kind="ec"),
        codec=settings.segment.codec,
        epoch=settings.identity.epoch,
    )


def with_release(page_format: str, settings: Settings) -> str:
    """Returns the page format, prefixed with the release of vLLM whose kernels fill the pages.

    How they fill a page of a given shape is their own business and may change with any release. With
    `identity.any_vllm` the prefix is left out.
    """
    return page_format if settings.identity.any_vllm else f"vllm{vllm_release()}/{page_format}"


def _draft_model(vllm_config: Any) -> Any:
    """Returns the configuration of a draft model with weights of its own, or None."""
    draft = getattr(vllm_config.speculative_config, "draft_model_config", None)
    return draft if draft is not None and draft.model != vllm_config.model_config.model else None


def refuse_unsupported_kv(vllm_config: Any) -> None:
    """Raise ConfigError, with the reason, if an engine's KV blocks can't be shared. Both halves call it."""
    for name in ("prefill_context_parallel_size", "decode_context_parallel_size"):
        if (size := getattr(vllm_config.parallel_config, name, 1)) != 1:
            raise ConfigError(f"kvstore: {name} = {size} is not supported yet; only 1")
    refuse_counter_identifiers(vllm_config)


def hash_tokens(vllm_config: Any, kv_cache_config: Any, rules: Sequence[PrefixRule]) -> int:
    """Returns how many tokens a block hash stands for. Raises ConfigError if some blocks have no hash."""
    from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

    _, tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    sizes = sorted({rule.block_tokens for rule in rules})
    if any(size % tokens for size in sizes):
        raise ConfigError(
            f"kvstore: vLLM hashes every {tokens} tokens and has KV blocks of {', '.join(map(str, sizes))}: "
            "not every block has a hash; --enable-prefix-caching, or another --block-size, may help"
        )
    return int(tokens)


def page_format(vllm_config: Any, groups: Sequence[LocalGroup], caches: Sequence[PagedCache]) -> str:
    """Returns a name for what fills this worker's KV pages: `cpu/CPU_ATTN/amx`, `cuda/FLASH_ATTN`, ...

    The shape of a page says where a head's and a token's bytes are, not how keys and values are
    arranged inside. The attention backend decides that, and on the CPU its instruction set, too. Where it
    packs a kernel block as it likes, the vendor, the kernel block and its order in memory decide as well
    (`rocm/ROCM_AITER_FA/16HN`). Numbers of 8 bits mean another half on some of AMD's accelerators. If groups
    differ in it, the names of all groups are listed in order.
    """
    from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
    from vllm.platforms import current_platform

    formats = []
    for group, cache in zip(groups, caches, strict=True):
        names = [name for _, layers in group.tables for name in layers]
        backends = sorted(backend.get_name() for backend in get_current_attn_backends(vllm_config, names))
        # A state is one piece, whatever the kernel.
        device, packed = cache.device.type, group.page.packed and group.page.kind != "mamba"
        # torch calls AMD's accelerators cuda, too.
        parts = [current_platform.device_name if packed else device, "+".join(backends)]
        if packed:
            parts.append(cache.kernel_block)
        if group.page.dtype in ("U8", "F8_E4M3") and current_platform.is_fp8_fnuz():
            parts.append("fnuz")
        if device == "cpu":
            layers = vllm_config.compilation_config.static_forward_context
            sets = {str(getattr(layers[name], "isa", "")) for name in names if name in layers}
            parts.append("+".join(sorted(sets)) or "unknown")
        formats.append("/".join(parts))
    return ",".join(formats if len(set(formats)) > 1 else formats[:1])


def _hash_root(algo: str) -> str:
    """Returns a digest of the seed of each chain's first block hash; engines that differ in it never share.

    Raises ConfigError if vLLM draws a random one per process.
    """
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


def model_fields(vllm_config: Any, settings: Settings, *, kind: Literal["kv", "ec"]) -> dict[str, Any]:
    """Returns the namespace fields that describe a model and how it is computed.

    Weights of which it isn't known what they are get a name that no other engine has, with one warning.
    """
    label = settings.identity.weights
    try:
        weights = _weights(vllm_config, label, draft=kind == "kv")
        given = options(vllm_config, kind=kind, labelled=bool(label), any_tp=settings.identity.any_tp)
    except NotKnown as exc:
        weights, given = unnamed(), {}
        log.warning(
            "kvstore: the weights of this engine have no name, so it shares nothing with other engines (%s): "
            '%s. docs/security.md, "Which engines share", says what to do',
            kind,
            exc,
        )
    described = described_model(vllm_config.model_config, _load(vllm_config), settings)
    return {**described, "weights": weights, "options": given}


def described_model(model: Any, load: Any, settings: Settings) -> dict[str, str]:
    """Returns the namespace fields that describe a model without its weights."""
    identity, name = settings.identity, str(model.model)
    local = Path(name).exists()
    return {
        "tenant": identity.tenant,
        "model": identity.model or (Path(name).name if local else name),
        "revision": "" if local else str(model.revision or ""),
        "config": _config_digest(model, _source(model, load)),
        "dtype": str(model.dtype).removeprefix("torch."),
        "quantization": str(model.quantization or ""),
    }


def _load(vllm_config: Any) -> Any:
    return getattr(vllm_config, "load_config", None)


def _source(model: Any, load: Any) -> Source | None:
    """Returns where a model's files are, or None if they aren't on this machine."""
    try:
        return source_of(str(model.model), model.revision, getattr(load, "download_dir", None))
    except NotKnown:
        return None


def _weights(vllm_config: Any, label: str | None, *, draft: bool) -> str:
    """Returns the name of an engine's weights, with `draft` those of its draft model too.

    Raises NotKnown if it has none, ConfigError if their files can't be read."""
    models = [(vllm_config.model_config, _load(vllm_config))]
    if draft and (drafting := _draft_model(vllm_config)) is not None:
        # A block holds the draft model's layers too, and their bytes depend on its weights.
        # Its configuration is vLLM's to make, from the target's, which is in the namespace.
        load = getattr(vllm_config.speculative_config, "draft_load_config", None)
        models.append((drafting, load or _load(vllm_config)))
    if label:
        for _, load in models:
            refuse_drawn(load)
        return label
    names = []
    for model, load in models:
        source = source_of(str(model.model), model.revision, getattr(load, "download_dir", None))
        names.append(weights_name(model, load, source))
        # Last, so that what the name was made of was there all the time.
        source.check_unchanged()
    return "+".join(names)


def _config_digest(model: Any, source: Source | None) -> str:
    """Returns a digest of the model's configuration as given: its files and the overrides of them.

    It reads the files rather than the parsed object, because models edit that object while they load, and
    how far they are depends on the process.
    """
    folder = source.path if source is not None else None
    given: list[Any] = [_json(folder, "config.json") or model.hf_config.to_dict()]
    given[0] = {key: value for key, value in given[0].items() if key not in _VOLATILE}
    given.append(_overrides(getattr(model, "hf_overrides", None)))
    for name in ("hf_config_path", "quantization_config", "override_generation_config", "model_impl"):
        given.append(str(getattr(model, name, None)))
    text = json.dumps(given[0], default=str).lower()
    if any(word in text for word in ("longrope", "dynamic", '"su"')):
        # These rotary embeddings choose their factors by the longest sequence the engine allows.
        given.append(model.max_model_len)
    multimodal = getattr(model, "multimodal_config", None)
    if multimodal is not None:
        given += [_json(folder, name) for name in _PROCESSOR_FILES]
        given += [str(getattr(multimodal, name, None)) for name in _MULTIMODAL_FIELDS]
    # Which of the weight files are read, and code that comes with them.
    given += [index for name in INDEXES if (index := _json(folder, name)) is not None]
    if code := code_digest(model, source):
        given.append(code)
    return hashlib.sha256(json.dumps(given, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _json(folder: Path | None, name: str) -> dict[str, Any] | None:
    file = folder / name if folder is not None and folder.is_dir() else None
    if file is None or not file.exists():
        return None
    try:
        made: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return {"unreadable": hashlib.sha256(file.read_bytes()).hexdigest()}
    return made


def _overrides(overrides: Any) -> Any:
    if not callable(overrides):
        return overrides or {}
    code = getattr(overrides, "__code__", None)
    if code is None:
        raise ConfigError("kvstore: hf_overrides must be a mapping or a plain function")
    # Compiled code holds its file's path: two nodes may miss each other's blocks, but never take wrong ones.
    inner = [repr(cell.cell_contents) for cell in overrides.__closure__ or ()]
    return [hashlib.sha256(marshal.dumps(code)).hexdigest(), repr(overrides.__defaults__), inner]


def refuse_counter_identifiers(vllm_config: Any) -> None:
    """Raise ConfigError if vLLM would number multimodal inputs instead of hashing them."""
    mm = vllm_config.model_config.multimodal_config
    cache_off = mm is not None and getattr(mm, "mm_processor_cache_gb", 1) <= 0
    if cache_off and not vllm_config.cache_config.enable_prefix_caching:
        raise ConfigError(
            "kvstore: with --mm-processor-cache-gb 0 and prefix caching off vLLM names images by a "
            "per-process counter, so different images of two engines would share a name. Set "
            "--mm-processor-cache-gb to more than 0, or enable prefix caching."
        )
