"""Names the weights that an engine has loaded, where it is known that they are those of its folder.

It is known of the load formats that are listed here. Others may read other files, draw numbers or take
weights from another machine; an engine that uses one has weights without a name.
"""

from __future__ import annotations

import hashlib
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from connectors.engine.allowed import harmless
from connectors.engine.allowed.files import NotKnown, Source, code_files
from connectors.engine.weights_digest import weights_digest

#: Load formats that read the weight files of the model's folder and nothing else, as vLLM 0.32 and 0.33 have
#: them, with what the name of the weights says of which files that are: a folder may hold several kinds.
#: Left out: dummy (draws numbers), tensorizer, modelexpress and ipc_cache (read elsewhere), npcache (reads a
#: copy that may be older).
FORMATS = {
    "auto": "",
    "hf": "hf",
    "safetensors": "safetensors",
    "fastsafetensors": "safetensors",
    "instanttensor": "safetensors",
    "runai_streamer": "safetensors",
    "mistral": "mistral",
    "pt": "pt",
    "sharded_state": "sharded_state",
    "runai_streamer_sharded": "sharded_state",
}
#: Where vLLM keeps its own loaders; a plug-in can put another in the place of each.
_VLLM = "vllm.model_executor.model_loader."
#: Draws the weights, so that no name is that of what it makes.
_DRAWS = "dummy"
#: How a class of vLLM's says that it loads more than the model's own weights.
_BESIDES = b"self.secondary_weights ="
#: Files by which vLLM chooses among the weight files.
INDEXES = (
    "model.safetensors.index.json", "consolidated.safetensors.index.json", "pytorch_model.bin.index.json",
)  # fmt: skip


def refuse_drawn(load: Any) -> None:
    """Raise NotKnown if the engine draws its weights: no label names them either."""
    if _format(load) == _DRAWS:
        raise NotKnown("with --load-format dummy the weights are random numbers")


def weights_name(model: Any, load: Any, source: Source) -> str:
    """Returns the name of the weights that an engine has loaded from `source`.

    Raises NotKnown, or ConfigError if the files can't be read."""
    refuse_drawn(load)
    given = _format(load)
    kind = FORMATS.get(given)
    if kind is None or not _is_vllms(given):
        raise NotKnown(
            f"with --load-format {given} it isn't known that the weights are those of the model's folder"
        )
    extra = getattr(load, "model_loader_extra_config", None) or {}
    allowed = harmless.KEYS["LoadConfig.model_loader_extra_config"]
    if not isinstance(extra, dict) or extra.keys() - allowed:
        raise NotKnown("--model-loader-extra-config may name other weights than those of the model's folder")
    if getattr(model, "model_weights", ""):
        raise NotKnown(f"the weights of {model.model} are read from another place")
    refuse_foreign_model(model)
    refuse_foreign_code(model, source)
    digest = weights_digest(source.path)
    return f"{digest}/{kind}" if kind else digest


def _format(load: Any) -> str:
    given = getattr(load, "load_format", "auto")
    # Engines of the v0 interface have an enumeration.
    return str(getattr(given, "value", given)).lower()


def _is_vllms(load_format: str) -> bool:
    try:
        from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER as loaders
    except ImportError:
        # Before there was a registry no plug-in could replace a loader.
        return True
    loader = loaders.get(load_format)
    return loader is not None and loader.__module__.startswith(_VLLM)


def refuse_foreign_model(model: Any) -> None:
    """Raise NotKnown if the model's class isn't vLLM's own, or loads weights from elsewhere besides."""
    named = getattr(model, "architectures", None) or ()
    try:
        from vllm.model_executor.models.registry import ModelRegistry
    except ImportError:
        return
    for one in named:
        known = ModelRegistry.models.get(one)
        if known is None:
            # vLLM takes a class for any model then, and code of the model's own.
            continue
        module = getattr(known, "module_name", None) or known.model_cls.__module__
        if not module.startswith("vllm."):
            raise NotKnown(f"the class for {one} is not vLLM's but from {module}, whose code is unknown")
        spec = find_spec(module)
        if spec is not None and spec.origin is not None and _BESIDES in Path(spec.origin).read_bytes():
            raise NotKnown(f"vLLM's class for {one} also loads weights from other places than the folder")


def refuse_foreign_code(model: Any, source: Source) -> None:
    """Raise NotKnown if the model's code may come from another place than its folder."""
    if not getattr(model, "trust_remote_code", False):
        return
    if getattr(model, "code_revision", None) and not source.path.is_file():
        raise NotKnown("--code-revision takes the model's code from another revision than its files")
    for file in sorted(source.path.glob("*.json")) if source.path.is_dir() else ():
        try:
            said = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        named = said.get("auto_map") if isinstance(said, dict) else None
        if named is not None and "--" in json.dumps(named):
            raise NotKnown(f"{file.name} takes the model's code from another repository (auto_map)")


def code_digest(model: Any, source: Source | None) -> str:
    """Returns a digest of the code in the model's folder that the engine may run; "" if it runs none."""
    if not getattr(model, "trust_remote_code", False) or source is None or not source.path.is_dir():
        return ""
    digest = hashlib.sha256()
    files = code_files(source.path)
    for file in files:
        data = file.read_bytes()
        digest.update(f"{file.relative_to(source.path).as_posix()}\0{len(data)}\0".encode() + data)
    return digest.hexdigest()[:16] if files else ""
