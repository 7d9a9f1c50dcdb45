"""Follows what an engine's blocks at or behind multimodal items were really computed from.

Within one engine vLLM keeps everything by what clients call their items: encoder outputs by the identifier,
blocks by hashes that hold it. So a client that gives its picture another's name makes this engine answer
about the wrong picture, which can't be mended here. But the wrong blocks must not reach the store under the
right picture's name, where all engines would find them. So a block at or behind an item is saved only if

    the encoder's output that the engine used was made from the request's own item, or from an equal one, and
    what the engine had of the prompt already was computed, or loaded from the store, under the same name.

The first is known from what each step encodes, loads and drops. For the second, the name of the block in
which an item starts is remembered by vLLM's hash of it, when it is computed: everything with that block
before it belongs to that name. If the block is computed under two names, neither is believed. A forgotten
name isn't believed either, so memory is bounded and forgetting costs a save.

Belongs to the scheduler's thread.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from connectors.engine.guard import bare, guarded
from connectors.engine.names import ALL_TOKENS, BlockNames, PromptItem
from connectors.engine.step import StepView

#: Most encoder outputs and most blocks that are remembered: more than an engine can hold of either.
MOST: Final = 65536


@dataclass(slots=True)
class Origin:
    """How far what is computed of one request is known to be what its names say."""

    #: Leading tokens of the engine's own when it was started last.
    hit_tokens: int = 0
    #: Leading tokens of which that is certain.
    sound_tokens: int = ALL_TOKENS
    #: Whether it is known to be something else, or may well be, from there on.
    wrong: bool = False
    #: Leading items whose first block was examined.
    settled: int = 0
    #: Leading tokens whose computation was followed.
    followed_tokens: int = 0

    @property
    def certain_tokens(self) -> int:
        """Returns how many leading tokens are known to be what their names say, and were computed."""
        return min(self.sound_tokens, self.followed_tokens)

    def doubt(self, first_token: int, *, wrong: bool) -> None:
        """Believe nothing from this token on."""
        self.sound_tokens = min(self.sound_tokens, first_token)
        self.wrong |= wrong


class Provenance:
    """Contents that one engine holds under clients' names."""

    def __init__(self, hash_tokens: int) -> None:
        self._hash_tokens = hash_tokens
        #: Digest of an identifier -> digest of the item whose output is in the encoder caches under it.
        self._outputs: OrderedDict[bytes, bytes] = OrderedDict()
        #: The same, of outputs that come with this step.
        self._coming: dict[bytes, bytes | None] = {}
        #: vLLM's hash of a block in which an item starts -> its name, or None if the block was computed under
        #: two.
        self._blocks: OrderedDict[bytes, bytes | None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._outputs) + len(self._blocks)

    def clear(self) -> None:
        """Forget everything: the engine's caches were reset."""
        self._outputs.clear()
        self._coming.clear()
        self._blocks.clear()

    def comes(self, identifier: str, content: bytes | None) -> None:
        """Record that with this step the encoder caches get the output of this item under this identifier."""
        self._coming[_key(identifier)] = content

    def encodes(self, step: StepView, items: Callable[[str], Sequence[PromptItem]]) -> None:
        """Record what a step makes of the encoder caches, of requests with these items. If that fails,
        nothing is believed any more."""
        if not self._encodes(step, items):
            self.clear()

    @guarded(False)
    def _encodes(self, step: StepView, items: Callable[[str], Sequence[PromptItem]]) -> bool:
        for request_id, indices in step.scheduled_encoder_inputs.items():
            known = items(request_id)
            for index in indices if known else ():
                self.comes(known[index].identifier, known[index].content)
        self.step(step.free_encoder_mm_hashes)
        return True

    def step(self, freed: Iterable[str]) -> None:
        """Begin a step, with which these outputs leave the encoder caches before others come."""
        for identifier in freed:
            self._outputs.pop(_key(identifier), None)
        for key, content in self._coming.items():
            self._outputs.pop(key, None)
            if content is not None:
                self._outputs[key] = content
        self._coming.clear()
        while len(self._outputs) > MOST:
            self._outputs.popitem(last=False)

    @bare
    def follow(
        self,
        origin: Origin,
        names: BlockNames,
        hashes: Sequence[bytes],
        computed: int,
        done: int,
        *,
        foreign: bool,
    ) -> None:
        """Follow a step that computes the tokens of a request from `computed` to `done`. `hashes` are vLLM's
        of its blocks. `foreign`: another connector has loaded what is beyond the engine's own tokens.

        Calls must follow the order in which the scheduler has decided about the requests of the steps.
        """
        items = names.items
        origin.followed_tokens = done
        for item in items:
            if item.first >= done:
                break
            if item.stop > computed and not self._has(item):
                origin.doubt(item.first, wrong=True)
        while origin.settled < len(items):
            item = items[origin.settled]
            block = item.first // self._hash_tokens
            end = (block + 1) * self._hash_tokens
            if end > done or block >= len(hashes):
                return
            made = names.all()
            name = made[block] if block < len(made) else None
            if end <= min(origin.hit_tokens, computed):
                self._check(origin, item, hashes[block], name)
            else:
                if foreign and end <= computed:
                    origin.doubt(item.first, wrong=True)
                self._remember(origin, item, hashes[block], name)
            origin.settled += 1

    def _check(self, origin: Origin, item: PromptItem, block_hash: bytes, name: bytes | None) -> None:
        """Compare a block that the engine had already, in which an item starts, with what is remembered."""
        known = self._blocks.get(block_hash)
        if block_hash in self._blocks:
            self._blocks.move_to_end(block_hash)
        if known is None or known != name:
            origin.doubt(item.first, wrong=known != name)

    def _remember(self, origin: Origin, item: PromptItem, block_hash: bytes, name: bytes | None) -> None:
        """Remember the name of a block in which an item starts and which is computed or loaded now."""
        if origin.sound_tokens <= item.first:
            if not origin.wrong:
                return  # unknown it is, and stays
            name = None
        if self._blocks.setdefault(block_hash, name) != name:
            self._blocks[block_hash] = name = None
        self._blocks.move_to_end(block_hash)
        while len(self._blocks) > MOST:
            self._blocks.popitem(last=False)
        if name is None:
            origin.doubt(item.first, wrong=True)

    def _has(self, item: PromptItem) -> bool:
        return item.content is not None and self._outputs.get(_key(item.identifier)) == item.content


def _key(identifier: str) -> bytes:
    return hashlib.sha256(identifier.encode("utf-8", "surrogatepass")).digest()[:16]
