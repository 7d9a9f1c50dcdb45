"""What the KV connector's scheduler half tells the journal: of matches, of loads that failed, of saves.

Positions and numbers are in blocks of the namespace, of `hash_tokens` tokens; those of saves in blocks of
their group. On the scheduler's thread, which appends and no more (connectors.outcomes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from connectors.kv_match import Found
from connectors.kv_saving import Progress
from connectors.kv_types import Save
from connectors.layout import Group
from connectors.outcomes import Missing, Outcomes, SaveOutcomes
from kvstore.keys import SegmentId, digests
from kvstore.ports import MISSING_DIGESTS
from kvstore.store import Space, Store

if TYPE_CHECKING:
    from vllm.v1.request import Request


class KVOutcomes:
    """Of one engine. Call `use` before anything else."""

    def __init__(self, store: Store, groups: Sequence[Group], hash_tokens: int) -> None:
        self._groups = groups
        self._hash_tokens = hash_tokens
        self._outcomes = Outcomes(store)
        self._saves = SaveOutcomes(self._outcomes)

    def use(self, space: Space) -> None:
        """What is told from now on is about this namespace; of saves under way to another one nothing is."""
        self._space = space
        self._saves.restart()

    def tick(self, *, idle: bool = False) -> None:
        """As Outcomes.tick."""
        self._outcomes.tick(idle=idle)

    def match(self, request: Request, found: Found, limit: int, computed: int, tokens: int) -> None:
        """Of a request of which `limit` tokens could have been found, the engine has `computed` itself, and
        `tokens` beyond those are promised."""
        size = self._hash_tokens
        # A prompt that was handed over has a partial block, too.
        blocks = -(-max(limit, found.tokens) // size)
        have, served = computed // size, -(-tokens // size)
        reason, (group, block) = found.reason, found.lacks
        if not tokens and found.tokens > computed:
            reason = "below_threshold"
        if found.tokens < computed or reason == "below_threshold":
            # What the engine has itself isn't asked of the store, whether that has it or not.
            group, block = 0, computed // self._size(0)
        self._outcomes.note(
            self._space,
            request.request_id,
            "match",
            asked=blocks - have,
            served=served,
            reason=reason,
            position=have + served,
            missing=self._missing(request.block_hashes, group, block),
        )

    def load_failed(
        self, request: Request, first_token: int, tokens: int, groups: Mapping[int, int], reason: str
    ) -> None:
        """A load of `tokens` from `first_token` on did not bring the blocks from those of `groups` on."""
        size = self._hash_tokens
        missing, group = min((block * self._size(number), number) for number, block in groups.items())
        self._outcomes.note(
            self._space,
            request.request_id,
            "load",
            asked=-(-tokens // size),
            served=max(0, missing - first_token) // size,
            reason=reason,
            position=max(missing, first_token) // size,
            missing=self._missing(request.block_hashes, group, groups[group]),
        )

    def saves_planned(self, request: Request, saves: Sequence[Save]) -> None:
        """These blocks of a request are on their way to the workers."""
        for save in saves:
            first = save.first * self._size(save.group) // self._hash_tokens
            missing = partial(digests, save.hashes[:MISSING_DIGESTS], save.group)
            self._saves.planned(save.segment, request.request_id, len(save.hashes), first, missing)

    def not_saved(self, segment: SegmentId, reason: str) -> None:
        """Why some rank has not stored its part."""
        self._saves.because(segment, reason)

    def save_ended(self, segment: SegmentId, *, stored: bool) -> None:
        """All ranks have ended it."""
        self._saves.ended(self._space, segment, stored=stored)

    def refused(self, request: Request, progress: Progress, reason: str) -> None:
        """A request is over, and some of its blocks were not worth saving."""
        first = progress.refused_from // self._hash_tokens
        self._outcomes.note(
            self._space,
            request.request_id,
            "save",
            asked=progress.refused,
            served=0,
            reason=reason,
            position=first,
            missing=self._missing(request.block_hashes, 0, progress.refused_from // self._size(0)),
        )

    def _size(self, group: int) -> int:
        return self._groups[group].rule.block_tokens

    def _missing(self, hashes: Sequence[bytes], group: int, block: int) -> Missing:
        ratio = self._size(group) // self._hash_tokens
        names = hashes[(block + 1) * ratio - 1 : (block + MISSING_DIGESTS) * ratio : ratio]
        return lambda: digests(names, group)
