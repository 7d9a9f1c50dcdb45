"""A prompt's token ids, from an engine that serves its model and so knows its tokenizer and template."""

from __future__ import annotations

import json
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from kvstore.errors import ConfigError, TransientError

_WAIT_S = 30.0
_MOST_BYTES = 256 << 20


def token_ids(engine: str, text: str) -> list[int]:
    """Returns what an engine's /tokenize makes of a prompt, or of a chat: text that is a JSON object with
    `messages`, as a request for chat completions has it. Waits for up to half a minute.

    Raises ConfigError for a URL that is none, or if the engine refuses, and TransientError if it can't be
    reached.
    """
    if urlsplit(engine).scheme not in ("http", "https") or not urlsplit(engine).netloc:
        raise ConfigError(f"{engine!r} is no engine's URL, such as http://localhost:8000")
    asked = json.dumps(_chat(text) or {"prompt": text}).encode()
    request = Request(f"{engine.rstrip('/')}/tokenize", asked, {"Content-Type": "application/json"})
    try:
        with urlopen(request, timeout=_WAIT_S) as answer:
            told = json.loads(answer.read(_MOST_BYTES))
    except HTTPError as exc:
        exc.close()
        raise ConfigError(f"{engine} did not tokenize it: {exc}; --tokens takes token ids") from exc
    except (OSError, HTTPException) as exc:
        raise TransientError(f"{engine} can't be asked for the prompt's token ids: {exc}") from exc
    except ValueError as exc:
        raise ConfigError(f"{engine} answers /tokenize with something else than JSON: {exc}") from exc
    ids = told.get("tokens") if isinstance(told, dict) else None
    if not isinstance(ids, list) or not all(type(one) is int for one in ids):
        raise ConfigError(f"{engine} answers /tokenize without token ids; is it an engine?")
    return ids


def _chat(text: str) -> dict[str, object] | None:
    try:
        made = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return made if isinstance(made, dict) and "messages" in made else None
