"""Description of a namespace for people, from its stored JSON, which another version may have written."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvstore.keys import NamespaceId


def fields_of(text: str | None) -> dict[str, Any]:
    """Returns a namespace's fields; an empty dict if nothing is stored, or no JSON object."""
    try:
        fields = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def described(text: str | None) -> tuple[str, str]:
    """Returns the kind and the model of a namespace."""
    fields = fields_of(text)
    return str(fields.get("kind", "")), str(fields.get("model", ""))


def models(texts: Mapping[NamespaceId, str]) -> dict[NamespaceId, str]:
    """Returns each namespace's model."""
    return {name: described(text)[1] for name, text in texts.items()}
