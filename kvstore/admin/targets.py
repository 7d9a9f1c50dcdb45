"""What a repair is about: the index, which must be there, and the namespaces that a person named."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from kvstore.admin.cache import Cache, UnknownName
from kvstore.admin.exports import Refused
from kvstore.admin.recommit import AnyIndex
from kvstore.keys import NamespaceId


def needed_index(cache: Cache) -> AnyIndex:
    """The index. Raises Refused if there is none, which no repair of its parts can change."""
    if cache.index is None:
        raise Refused(
            f"there is no index at {cache.index_file}; `cache-admin rebuild` makes it from the payloads"
        )
    return cache.index


def chosen(prefixes: Sequence[str], known: Iterable[NamespaceId]) -> list[NamespaceId]:
    """The namespaces whose ids start with one of these; all without any. Raises UnknownName."""
    known = sorted(known)
    for prefix in prefixes:
        if not any(name.startswith(prefix.lower()) for name in known):
            raise UnknownName(f"no namespace starts with {prefix!r}; `cache-admin namespaces` lists them")
    starts = tuple(prefix.lower() for prefix in prefixes)
    return [name for name in known if not starts or name.startswith(starts)]


def described(text: str | None) -> tuple[str, str]:
    """Kind and model of a namespace by its stored JSON, which a newer version may have written."""
    fields = json.loads(text) if text else {}
    return str(fields.get("kind", "")), str(fields.get("model", ""))
