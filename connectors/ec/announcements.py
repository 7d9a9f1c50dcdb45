"""A producer's announcement of a request's items in `ec_transfer_params`, for consumers to read.

Each identifier has the item's `item_indices`, as vLLM's proxies use them. An item that is or will be stored
also has `metadata`, with which a consumer needs no media, and the namespace of its save. Its digest
(connectors.engine.contents) lets consumers find it that haven't seen the media.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from connectors.engine.contents import HANDLE
from connectors.engine.guard import otherwise
from connectors.engine.media import Media
from kvstore.store.space import Space

log = logging.getLogger(__name__)

#: The key under which an announcement names the item's namespace.
_NAMESPACE = "kvstore_namespace"


class Announcements:
    """Writes what this engine announces, and reads what others do."""

    def __init__(self, media: Media) -> None:
        self._media = media
        self._warned = False

    def make(
        self, features: Sequence[Any], space: Space | None, stored: Mapping[str, bytes]
    ) -> dict[str, dict[str, Any]]:
        """Returns descriptions of a request's items; `stored` has the digests of those that the store has, or
        is about to, by identifier."""
        made = self._media.describe(features)
        for identifier, entry in made.items():
            if space is not None and identifier in stored:
                entry[_NAMESPACE] = str(space.id)
                entry[HANDLE] = stored[identifier].hex()
            else:
                # Without metadata a proxy sends the media along, and the consumer can encode the item.
                entry["metadata"] = {}
        return made

    @otherwise(bool)
    def include(self, params: Mapping[str, Any], identifier: str, space: Space | None) -> bool:
        """Returns whether a producer has announced the item in `space`, which is where this engine looks.

        `params` come from a client: anything may be in them.
        """
        mine = str(space.id) if space is not None else ""
        entry = params.get(identifier)
        theirs = entry.get(_NAMESPACE) if isinstance(entry, dict) else None
        if theirs is not None and theirs != mine and not self._warned:
            self._warned = True
            log.warning(
                "kvstore: a producer saves encoder outputs to namespace %.40r, this engine looks in %s, so "
                "they never meet; `cache-admin namespaces diff` says in what they differ",
                theirs,
                mine,
            )
        return bool(theirs and theirs == mine)
