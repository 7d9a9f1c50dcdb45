"""What a repair works on: the index, which must be there, and the namespaces that a person named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvstore.admin.backends import Cache, Refused, UnknownName
from kvstore.index.maintenance import FullIndex
from kvstore.keys import NamespaceId


def needed_index(cache: Cache) -> FullIndex:
    """Returns the index. Raises Refused if there is none, which only `rebuild` can change."""
    if cache.index is None:
        raise Refused(
            f"there is no index at {cache.index_file}; `cache-admin rebuild --apply` makes it from the "
            "payloads"
        )
    return cache.index


def chosen(prefixes: Sequence[str], known: Iterable[NamespaceId]) -> list[NamespaceId]:
    """Returns the known namespaces whose ids start with one of `prefixes`, or all if there are no prefixes.

    Raises UnknownName for a prefix that fits none.
    """
    known = sorted(known)
    for prefix in prefixes:
        if not prefix or not any(name.startswith(prefix.lower()) for name in known):
            raise UnknownName(f"no namespace starts with {prefix!r}; `cache-admin namespaces` lists them")
    starts = tuple(prefix.lower() for prefix in prefixes)
    return [name for name in known if not starts or name.startswith(starts)]
