"""What the slots of a store must hold, by their names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
from vllm.v1.request import Request

from connectors.engine.layout import LocalGroup
from kvstore.keys import ContentKey, block_key
from kvstore.store.space import Space
from trials.accelerator.contents import Chain, pattern
from trials.accelerator.device import Accelerator
from trials.accelerator.items import KEYS, expected
from trials.accelerator.layouts import Layout, packed


class Promises:
    """What the slot of every block hash must hold. Compares every slot that is saved."""

    def __init__(
        self, accelerator: Accelerator, layout: Layout, groups: Sequence[LocalGroup], hash_tokens: int
    ) -> None:
        self._accelerator, self._layout, self._groups = accelerator, layout, groups
        self._hash_tokens = hash_tokens
        #: Name -> group, tokens, and where its first and its last token are.
        self._known: dict[ContentKey, tuple[int, Chain, int, int]] = {}
        self._seen: dict[str, int] = {}
        self.checked = self.items = self.wrong_bytes = 0

    def learn(self, request: Request, chain: Chain) -> None:
        """Take down what a request's block hashes stand for."""
        tokens, hashes = self._hash_tokens, request.block_hashes
        for i in range(self._seen.get(request.request_id, 0), len(hashes)):
            self._learn(hashes[i], chain, (i + 1) * tokens, partial=False)
        self._seen[request.request_id] = len(hashes)

    def learn_prompt(self, names: Sequence[bytes], tokens: int, chain: Chain) -> None:
        """Take down the names under which a prompt of `tokens` tokens is handed over."""
        for i, name in enumerate(names):
            end = min((i + 1) * self._hash_tokens, tokens)
            self._learn(name, chain, end, partial=i == len(names) - 1)

    def _learn(self, name: bytes, chain: Chain, end: int, *, partial: bool) -> None:
        for number, group in enumerate(self._groups):
            size = group.page.block_tokens
            if partial or end % size == 0:
                start = end - 1 if group.page.kind == "mamba" else (end - 1) // size * size
                self._known[block_key(name, number)] = number, chain, start, end

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Check all saves from now on, before they are written and after."""
        save = Space.save

        def checked(space: Space, slots: Any, *args: Any, rank: int = 0, **kwargs: Any) -> Any:
            self._check(slots, rank, "is given to be saved")
            items = sum(slot.key in KEYS for slot in slots)
            self.items, self.checked = self.items + items, self.checked + len(slots) - items
            saved = save(space, slots, *args, rank=rank, **kwargs)
            self._check(slots, rank, "was changed while it was saved")
            return saved

        with mock.patch.object(Space, "save", checked):
            yield

    def _check(self, slots: Sequence[Any], part: int, what: str) -> None:
        for slot in slots:
            if slot.key not in KEYS and slot.key not in self._known:
                self._accelerator.report(f"a slot {what} whose name nothing promises")
                continue
            right, promised = self._expected(slot, part)
            wrong = int(((right != np.frombuffer(slot.data, np.uint8)) & promised).sum())
            if wrong:
                self.wrong_bytes += wrong
                self._accelerator.report(f"a wrong slot {what}: {wrong} bytes")

    def _expected(self, slot: Any, part: int) -> tuple[np.ndarray, np.ndarray]:
        """The bytes of a block or an item, and which of them its name says anything of."""
        if (picture := KEYS.get(slot.key)) is not None:
            right = expected(picture, slot.shape[1]).ravel()
            return right, np.ones_like(right, bool)
        number, chain, start, end = self._known[slot.key]
        group, layout = self._groups[number], self._layout
        size = 1 if group.page.kind == "mamba" else group.page.block_tokens
        _, heads, _, _ = group.shape
        content = group.slot_bytes // (group.shape[0] * heads * size)
        layers, promised = [], []
        for name in (name for _, names in group.tables for name in names):
            drafts = name in layout.drafts
            states = chain.states(start + drafts, start + size + drafts)
            layers.append(pattern(states, name, range(part * heads, (part + 1) * heads), content))
            # A draft's last position follows from the next token, which a block's name doesn't cover.
            known = np.arange(start, start + size) < (end - 1 if drafts else end)
            promised.append(np.broadcast_to(known[:, None], layers[-1].shape))
        scales = layout.scales
        right, says = (packed(np.stack(one), scales).ravel() for one in (layers, promised))
        return right, says
