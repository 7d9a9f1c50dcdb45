"""Reads the file that names the prompts of a pack, and the files that it names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from kvstore.errors import ConfigError
from kvstore.rules.text import readable
from schemas.base import explain
from schemas.pack import PromptEntry, PromptFile

#: Most bytes of the file, and of each that it names: a prompt of a million tokens is a few MB.
_MOST_BYTES = 64 << 20


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Returns each prompt as an engine is given it: its `name`, and `text`, `tokens`, or `messages` and
    `tools`.

    The file is YAML or JSON. Raises ConfigError, which names the file and what is wrong with it.
    """
    text = _read(path)
    try:
        # JSON is YAML, but its parser is a hundred times as fast.
        tree = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        made = PromptFile.model_validate(tree)
    except ValidationError as exc:
        raise ConfigError(f"{readable(path)}: {'; '.join(explain(exc, PromptFile))}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        said = (str(exc).splitlines() or [type(exc).__name__])[0]
        raise ConfigError(f"{readable(path)} is neither YAML nor JSON: {said}") from None
    return [_prompt(one, path.parent) for one in made.prompts]


def _prompt(one: PromptEntry, folder: Path) -> dict[str, Any]:
    if one.tokens is not None:
        return {"name": one.name, "tokens": list(one.tokens)}
    if one.messages is None:
        text = one.text if one.text is not None else _read(folder / str(one.file))
        return {"name": one.name, "text": text}
    messages = [_message(dict(message), one.name, folder) for message in one.messages]
    tools = None if one.tools is None else list(one.tools)
    return {"name": one.name, "messages": messages, "tools": tools}


def _message(message: dict[str, Any], name: str, folder: Path) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise ConfigError(f"prompt {name!r}: a message has no role")
    file = message.pop("file", None)
    if file is None:
        return message
    if not isinstance(file, str) or "content" in message:
        raise ConfigError(f"prompt {name!r}: a message has content, or the name of a file")
    return message | {"content": _read(folder / file)}


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MOST_BYTES + 1)
    except OSError as exc:
        raise ConfigError(f"{readable(path)} can't be read: {exc.strerror}") from None
    if len(data) > _MOST_BYTES:
        raise ConfigError(f"{readable(path)} has more than {_MOST_BYTES >> 20} MiB")
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ConfigError(f"{readable(path)} is not in UTF-8") from None
