"""Writes down the options of an engine that aren't known to be harmless: a member of its namespace.

It starts from vLLM's own configuration, every field of every section, and leaves out what is listed in
`harmless`, and what has its default. So an option that a newer vLLM adds makes another namespace as soon as
somebody sets it. A field that can't be given (`init=False`) is a result of those that can, of the model's
files or of the machine, and is left out too.

A value is written as people know it (`AttentionConfig.backend` is `TRITON_ATTN`), so that `cache-admin
namespaces diff` names the option and both values. Free-form values and long or odd ones may hold a path or a
secret; of these a digest is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import MISSING, Field, fields, is_dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any

from connectors.engine.allowed import harmless
from connectors.engine.allowed.files import NotKnown

#: Values that are shown as they are: short, and without what URLs, paths and keys are made of.
_PLAIN = re.compile(r'[A-Za-z0-9_.,:+\- "\[\]]{0,120}')
_SECRET = re.compile(r"api_?key|secret|password|credential|auth|token$", re.IGNORECASE)
_DEEPEST = 12


def options(vllm_config: Any, *, kind: str, labelled: bool = False, any_tp: bool = False) -> dict[str, str]:
    """Returns what may change the bytes of an engine's payloads of this kind (`kv`, `ec`), by option.

    With `labelled` an operator has named the weights, and how they were loaded is part of that name. With
    `any_tp` engines of any tensor-parallel size share. Raises NotKnown for a value that can't be written.
    """
    left_out = set(harmless.SECTIONS | harmless.OPTIONS)
    if kind == "ec":
        left_out |= harmless.NOT_OF_ITEMS
    if labelled:
        left_out.add("LoadConfig")
    if any_tp:
        left_out |= harmless.OF_RANKS
    found = dict(_given(vllm_config, "", left_out, 0)) if is_dataclass(vllm_config) else {}
    return found | _variables()


def _variables() -> dict[str, str]:
    try:
        from vllm.envs import environment_variables
    except ImportError:
        # An engine of the v0 interface may have none.
        return {}
    known = [name for name in environment_variables if name not in harmless.VARIABLES]
    return {f"${name}": _shown(name, os.environ[name]) for name in known if name in os.environ}


def _given(config: Any, path: str, left_out: Set[str], depth: int) -> Iterator[tuple[str, str]]:
    """Yields name and value of each option of a section that differs from its default."""
    if depth > _DEEPEST:
        raise NotKnown(f"vLLM's configuration is nested deeper than {_DEEPEST} at {path}")
    owner = type(config).__name__
    for field in fields(config):
        option = f"{owner}.{field.name}"
        if option in left_out or not _is_option(field):
            continue
        value, name = getattr(config, field.name, None), f"{path}{field.name}"
        if is_dataclass(value) and not isinstance(value, type):
            if type(value).__name__ not in left_out:
                yield from _given(value, f"{name}.", left_out, depth + 1)
            continue
        if isinstance(value, Mapping) and option in harmless.KEYS:
            value = {key: one for key, one in value.items() if key not in harmless.KEYS[option]}
        if str(value) in harmless.VALUES.get(option, ()):
            continue
        if (text := _text(value, name)) != _default(field, name):
            yield name, _shown(name, text)


def _is_option(field: Field[Any]) -> bool:
    # pydantic's Field may say so as well as dataclasses' field.
    said = getattr(field.default, "init", None)
    return field.init if said is None else bool(said)


def _default(field: Field[Any], name: str) -> str | None:
    """Returns a field's default as text, or None if the field must be given."""
    given: Any = field.default
    factory: Any = field.default_factory
    if hasattr(given, "default_factory"):
        given, factory = given.default, given.default_factory or MISSING
    if factory is not MISSING:
        given = factory()
    if given is MISSING or type(given).__name__ == "PydanticUndefinedType":
        return None
    return _text(given, name)


def _text(value: Any, name: str) -> str:
    made = _plain(value, name, 0)
    return made if isinstance(made, str) else json.dumps(made, sort_keys=True, separators=(",", ":"))


def _plain(value: Any, name: str, depth: int) -> Any:
    """Returns a value as JSON has it, equal in all processes. Raises NotKnown if it has no such form."""
    if depth > _DEEPEST:
        raise NotKnown(f"the value of {name} is nested deeper than {_DEEPEST}")
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, (bytes, bytearray)):
        return value.hex()
    if is_dataclass(value):
        inner = {one.name: _plain(getattr(value, one.name), name, depth + 1) for one in fields(value)}
        return {"": type(value).__qualname__, **inner}
    if isinstance(value, Mapping):
        return {str(key): _plain(one, name, depth + 1) for key, one in value.items()}
    if isinstance(value, Set):
        return sorted(json.dumps(_plain(one, name, depth + 1), sort_keys=True) for one in value)
    if isinstance(value, Sequence):
        return [_plain(one, name, depth + 1) for one in value]
    if type(value).__module__ == "torch":
        return str(value)
    for method in ("compute_hash", "uuid"):
        # vLLM's own ways to say what an object is.
        if callable(said := getattr(value, method, None)):
            return f"{type(value).__qualname__}:{said()}"
    raise NotKnown(
        f"the option {name} of vLLM is a {type(value).__module__}.{type(value).__qualname__}, "
        "which can't be compared with that of another engine"
    )


def _shown(name: str, text: str) -> str:
    if _PLAIN.fullmatch(text) and not _SECRET.search(name):
        return text
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()[:16]}"
