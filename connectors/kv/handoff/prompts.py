"""The blocks of a prompt, the last of which may be partial, by the names that both engines give them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from connectors.engine.names import BlockNames
from kvstore.keys import digests
from kvstore.rules.prefix import PrefixRule, alignment


class PromptNames:
    """Names of prompts' blocks in every group of an engine. It keeps nothing of a prompt."""

    def __init__(
        self, rules: Sequence[PrefixRule], hash_tokens: int, hash_function: Callable[[Any], bytes]
    ) -> None:
        self._rules = rules
        self._hash_tokens = hash_tokens
        self._align = alignment(rules)
        self._hash_function = hash_function

    def of(self, names: BlockNames, tokens: int) -> list[bytes] | None:
        """Returns the names of the blocks of `tokens` leading tokens, or None if a block has none. The last
        name is that of the partial block, repeated so that every group finds it."""
        full = tokens // self._hash_tokens
        units = -(-tokens // self._align) * (self._align // self._hash_tokens)
        made = list(names.all()[:full])
        if len(made) < full:
            return None
        if units == full:
            return made
        tail = names.tail(tokens, self._hash_function)
        return None if tail is None else [*made, *[tail] * (units - full)]

    def in_group(self, names: Sequence[bytes], number: int, blocks: range) -> list[bytes]:
        """Returns the names of one group's `blocks`, given what `of` returned."""
        ratio = self._rules[number].block_tokens // self._hash_tokens
        return [names[(block + 1) * ratio - 1] for block in blocks]

    def packed(self, names: Sequence[bytes], number: int, blocks: range) -> bytes:
        """Returns the packed digests of one group's `blocks`."""
        return digests(self.in_group(names, number, blocks), number)
