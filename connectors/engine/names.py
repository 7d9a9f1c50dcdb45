"""Names of a request's blocks in the store.

They are vLLM's block hashes, which cover tokens, adapter, salt, and what clients call their items. With
`identity.client_uuids: refuse` a block at or behind an item is bound to the contents of that item and of all
items before it (connectors.engine.contents). So equal names mean equal tokens and equal items. If an item's
content is unknown, no block at or behind it has a name. A prompt without items has vLLM's hashes in either
case.

Belongs to the scheduler's thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from connectors.engine.contents import Contents
from connectors.engine.step import RequestView
from kvstore.keys import bound_name, chained_items

#: A number of tokens that no prompt reaches.
ALL_TOKENS = 1 << 62


class PromptItem(NamedTuple):
    """One item of a request: its tokens, what a client calls it, what it is (None: unknown), and a digest of
    it and all items before it."""

    first: int
    stop: int
    identifier: str
    content: bytes | None
    chain: bytes


class BlockNames:
    """The names of one request's full blocks."""

    def __init__(self, request: RequestView, contents: Contents | None, hash_tokens: int) -> None:
        """`contents` is None if vLLM's hashes are used as they are; one stands for `hash_tokens` tokens."""
        self._request = request
        self._contents = contents
        self._hash_tokens = hash_tokens
        self._items: list[PromptItem] = []
        self._made: list[bytes] = []
        #: vLLM's hash of the last block that has a name.
        self._last = b""

    @property
    def items(self) -> Sequence[PromptItem]:
        """Returns the request's items, in the order of their tokens; none if hashes are used as they are."""
        if self._contents is None:
            return ()
        # A session's prompt grows, and brings more of them.
        for index in range(len(self._items), len(self._request.mm_features)):
            feature = self._request.mm_features[index]
            place = feature.mm_position
            content = self._contents.of(self._request, index)
            before = self._items[-1].chain if self._items else b""
            chain = chained_items(before, content or b"")
            self._items.append(
                PromptItem(place.offset, place.offset + place.length, feature.identifier, content, chain)
            )
        return self._items

    @property
    def named_tokens(self) -> int:
        """Returns how many leading tokens can have names: up to the first item that is unknown."""
        return next((item.first for item in self.items if item.content is None), ALL_TOKENS)

    def all(self) -> Sequence[bytes]:
        """Returns the names of the leading full blocks, as far as they have any."""
        hashes = self._request.block_hashes
        items = self.items
        if not items:
            return hashes
        made = self._made
        # Hashes are a chain, so the last one stands for all. A session takes back its last tokens.
        if len(made) > len(hashes) or (made and hashes[len(made) - 1] != self._last):
            made.clear()
        number, most = 0, min(len(hashes), self.named_tokens // self._hash_tokens)
        for block in range(len(made), most):
            end = (block + 1) * self._hash_tokens
            while number < len(items) and items[number].first < end:
                number += 1
            made.append(bound_name(hashes[block], items[number - 1].chain) if number else hashes[block])
        if made:
            self._last = hashes[len(made) - 1]
        return made

    def tail(self, tokens: int, hash_function: Callable[[Any], bytes]) -> bytes | None:
        """Returns the name of the partial block at the end of `tokens` tokens, or None if it can't have
        one."""
        if tokens > self.named_tokens:
            return None
        name = self._request.name_of_tail(tokens, self._hash_tokens, hash_function)
        behind = [item for item in self.items if item.first < tokens]
        return bound_name(name, behind[-1].chain) if behind else name
