"""Asks an engine over HTTP: for a prompt's token ids, and to compute a prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from kvstore.errors import ConfigError, TransientError
from kvstore.rules.text import readable

_WAIT_S = 30.0
#: The longest prompts take minutes to compute.
_COMPUTE_S = 1800.0
_MOST_BYTES = 256 << 20
#: Most bytes of a refusal that are shown.
_MOST_WORDS = 1000


def token_ids(engine: str, text: str) -> list[int]:
    """Returns what an engine's /tokenize makes of a prompt, or of a chat: text that is a JSON object with
    `messages`, as a request for chat completions has it. Waits for up to half a minute.

    Raises ConfigError for a URL that is none, or if the engine refuses, and TransientError if it can't be
    reached.
    """
    return _ids(engine, "/tokenize", _asked(engine, "/tokenize", _chat(text) or {"prompt": text}), "tokens")


def compute(engine: str, prompt: Mapping[str, Any]) -> list[int]:
    """Has an engine compute a prompt, given by its `messages` and `tools`, its `text` or its `tokens`.
    Returns the prompt's token ids. Waits for up to half an hour; raises as `token_ids`.
    """
    least = {"max_tokens": 1, "temperature": 0, "return_token_ids": True}
    if "messages" in prompt:
        # The prompt is the beginning of a conversation, whoever speaks next.
        chat = {"messages": prompt["messages"], "add_generation_prompt": False}
        if prompt.get("tools"):
            chat["tools"] = prompt["tools"]
        path = "/v1/chat/completions"
        told = _asked(engine, path, chat | least, _COMPUTE_S)
    else:
        path = "/v1/completions"
        given = prompt["tokens"] if "tokens" in prompt else prompt["text"]
        told = _asked(engine, path, {"prompt": given} | least, _COMPUTE_S)
        choices = told.get("choices")
        told = choices[0] if isinstance(choices, list) and choices and isinstance(choices[0], dict) else {}
    return _ids(engine, path, told, "prompt_token_ids")


def release(engine: str) -> str:
    """Returns an engine's release of vLLM. Raises as `token_ids`."""
    return str(_asked(engine, "/version").get("version", ""))[:256]


def _asked(engine: str, path: str, body: Any = None, wait_s: float = _WAIT_S) -> dict[str, Any]:
    if "@" in engine.partition("?")[0]:
        raise ConfigError("the engine's URL has a user or a password; name scheme, host and port alone")
    if urlsplit(engine).scheme not in ("http", "https") or not urlsplit(engine).netloc:
        raise ConfigError(f"{engine!r} is no engine's URL, such as http://localhost:8000")
    data = None if body is None else json.dumps(body).encode()
    request = Request(f"{engine.rstrip('/')}{path}", data, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=wait_s) as answer:
            told = json.loads(answer.read(_MOST_BYTES))
    except HTTPError as exc:
        with exc:
            words = readable(exc.read(_MOST_WORDS).decode(errors="replace"), None)
        raise ConfigError(f"{engine} refuses {path}: {exc} {words}") from exc
    except (OSError, HTTPException) as exc:
        raise TransientError(f"{engine} can't be asked for {path}: {exc}") from exc
    except ValueError as exc:
        raise ConfigError(f"{engine} answers {path} with something else than JSON: {exc}") from exc
    return told if isinstance(told, dict) else {}


def _ids(engine: str, path: str, told: Mapping[str, Any], field: str) -> list[int]:
    ids = told.get(field)
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise ConfigError(f"{engine} answers {path} without token ids; is it an engine?")
    return ids


def _chat(text: str) -> dict[str, object] | None:
    try:
        made = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return made if isinstance(made, dict) and "messages" in made else None
