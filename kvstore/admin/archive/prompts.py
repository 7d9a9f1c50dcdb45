"""Reads the file that names the prompts of an export, and the files that it names.

The file lies in Git, and who proposes a change to it is not who exports. So it names nothing but
text: files below its own folder, no hidden ones, and never an image's or another medium's address, which the
engine would ask. All that is read together is bounded.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from kvstore.errors import ConfigError
from kvstore.files import open_file
from kvstore.rules.text import readable
from schemas.base import explain
from schemas.pack import PromptEntry, PromptFile

#: Most bytes of the file, and of each that it names: a prompt of a million tokens is a few MB.
_MOST_BYTES = 64 << 20
#: Most bytes of all together.
_MOST_TOGETHER = 4 * _MOST_BYTES
#: Kinds of a message's parts that are text, and the field that has it.
_TEXTS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "thinking": "thinking",
    "refusal": "refusal",
}


def read_prompts(path: Path) -> list[dict[str, Any]]:
    """Returns each prompt as an engine is given it: its `name`, and `text`, `tokens`, or `messages` and
    `tools`.

    The file is JSON. Raises ConfigError, which names the file and what is wrong with it.
    """
    folder = _Folder(path)
    # Whoever exports has named this one, wherever it lies.
    text = folder.text(path.resolve(), path)
    try:
        made = PromptFile.model_validate(json.loads(text))
    except ValidationError as exc:
        raise ConfigError(f"{readable(path)}: {'; '.join(explain(exc, PromptFile))}") from None
    except (ValueError, RecursionError) as exc:
        raise ConfigError(f"{readable(path)} is not JSON: {exc}") from None
    return [_prompt(one, folder) for one in made.prompts]


def _prompt(one: PromptEntry, folder: _Folder) -> dict[str, Any]:
    if one.tokens is not None:
        return {"name": one.name, "tokens": list(one.tokens)}
    if one.messages is None:
        text = one.text if one.text is not None else folder.read(str(one.file))
        return {"name": one.name, "text": text}
    messages = [_message(dict(message), one.name, folder) for message in one.messages]
    tools = None if one.tools is None else list(one.tools)
    return {"name": one.name, "messages": messages, "tools": tools}


def _message(message: dict[str, Any], name: str, folder: _Folder) -> dict[str, Any]:
    if not isinstance(message.get("role"), str):
        raise ConfigError(f"prompt {name!r}: a message has no role")
    file = message.pop("file", None)
    if file is None:
        content = message.get("content")
        if not isinstance(content, str | None) and not all(map(_is_text, _parts(content))):
            raise ConfigError(
                f"prompt {name!r}: a message's content is text, or a list of parts such as "
                '{"type": "text", "text": ...}, without images, sound and video'
            )
        return message
    if not isinstance(file, str) or "content" in message:
        raise ConfigError(f"prompt {name!r}: a message has content, or the name of a file")
    return message | {"content": folder.read(file)}


def _parts(content: Any) -> list[Any]:
    return content if isinstance(content, list) else [content]


def _is_text(part: Any) -> bool:
    if isinstance(part, str):
        return True
    if not isinstance(part, dict) or not isinstance(kind := part.get("type"), str) or kind not in _TEXTS:
        return False
    return set(part) == {"type", _TEXTS[kind]} and isinstance(part[_TEXTS[kind]], str)


class _Folder:
    """The folder of a prompts' file, and how much of it may still be read."""

    def __init__(self, path: Path) -> None:
        self._path = path.parent
        self._left = _MOST_TOGETHER

    def read(self, file: str) -> str:
        """Returns the text of a file that a prompt names, from the folder on. Raises ConfigError."""
        path = self._path / file
        try:
            # Links are followed as far as they stay below: Kubernetes mounts a ConfigMap's files as such.
            folder, found = self._path.resolve(), path.resolve()
        except (OSError, ValueError, RuntimeError) as exc:  # a NUL; links that lead to each other
            raise ConfigError(f"{readable(path)} can't be read: {exc}") from None
        if Path(file).is_absolute() or not found.is_relative_to(folder):
            raise ConfigError(
                f"{readable(path)} is not below the folder of the prompts' file: put it there, and name "
                "it from there on"
            )
        # Such as .git, where a checkout may have a token; those of a ConfigMap begin with two dots.
        if any(part[0] == "." and part[:2] != ".." for part in found.relative_to(folder).parts):
            raise ConfigError(f"{readable(path)} is hidden: give it a name without a leading dot")
        return self.text(found, path)

    def text(self, found: Path, named: Path) -> str:
        """Returns the text of a regular file, which messages call `named`. Raises ConfigError."""
        try:
            with open(open_file(found, os.O_RDONLY), "rb") as file:
                data = file.read(_MOST_BYTES + 1)
        except OSError as exc:
            why = "it is no regular file" if exc.errno == errno.ELOOP else exc.strerror
            raise ConfigError(f"{readable(named)} can't be read: {why}") from None
        if len(data) > _MOST_BYTES:
            raise ConfigError(f"{readable(named)} has more than {_MOST_BYTES >> 20} MiB")
        self._left -= len(data)
        if self._left < 0:
            raise ConfigError(
                f"{readable(named)}: what prompts name has more than {_MOST_TOGETHER >> 20} MiB together; "
                "make several exports"
            )
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise ConfigError(f"{readable(named)} is not in UTF-8") from None
