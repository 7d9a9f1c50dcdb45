"""The rule of where a prefix can be resumed when several kinds of layers must agree. Pure functions.

An engine asks how much it can load (`longest_boundary`), `cache-admin explain` where and why that ends
(`stops`). A prefix of L tokens can be resumed if every KV cache group has what computing token L needs of it:

    prefix   full attention: every block before L
    window   sliding window of W tokens: the blocks that hold tokens L - W + 1 to L - 1
    chunk    attention within chunks of W tokens: the blocks from the start of L's own chunk on
    state    Mamba and linear attention: the one block whose state is that after token L - 1

vLLM keeps the same blocks of a running request (`get_num_skipped_tokens` in v1/core/
single_type_kv_cache_manager.py): the blocks that it allocates for a load are those that a load fills. L is a
multiple of every group's block size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Final, Literal

from schemas.namespace import GroupKind

Reach = Literal["prefix", "window", "chunk", "state"]

#: The reach of each kind of layers.
_REACHES: Final[dict[GroupKind, Reach]] = {
    "full": "prefix", "mla": "prefix", "sliding_window": "window", "chunked_local": "chunk", "mamba": "state",
}  # fmt: skip
#: Tells which blocks of a group are there: (group, blocks) -> one bool per block.
Presence = Callable[[int, range], Sequence[bool]]


@dataclass(frozen=True, slots=True)
class PrefixRule:
    """What one group needs of a prefix; `window` is in tokens, for the reaches window and chunk."""

    reach: Reach
    block_tokens: int
    window: int = 0

    def skipped_tokens(self, tokens: int) -> int:
        """Returns how many leading tokens computing the token after the first `tokens` does not need."""
        match self.reach:
            case "prefix":
                return 0
            case "window":
                return max(0, tokens - self.window + 1)
            case "chunk":
                return tokens // self.window * self.window
            case "state":
                return max(0, tokens - 1)

    def leaves_at(self, block: int) -> int | None:
        """Returns the least number of tokens after which `block` is not needed; None if it always is."""
        end = (block + 1) * self.block_tokens
        match self.reach:
            case "prefix":
                return None
            case "window":
                return end + self.window - 1
            case "chunk":
                return -(-end // self.window) * self.window
            case "state":
                return end + 1

    def needed(self, tokens: int) -> range:
        """Returns the blocks that resuming a prefix of `tokens` needs; the last may be partial."""
        return range(self.skipped_tokens(tokens) // self.block_tokens, -(-tokens // self.block_tokens))


def rule_of(kind: GroupKind, block_tokens: int, window: int | None) -> PrefixRule:
    """Returns the rule of a group of layers, as vLLM or a namespace's group describes them."""
    return PrefixRule(_REACHES[kind], block_tokens, window or 0)


def leading(there: Sequence[bool]) -> int:
    """Returns how many blocks are there from the start on."""
    return next((i for i, one in enumerate(there) if not one), len(there))


def alignment(rules: Sequence[PrefixRule]) -> int:
    """Returns the step of boundaries: those that every group can have are multiples of this many tokens."""
    return lcm(*(rule.block_tokens for rule in rules))


def most_tokens(rules: Sequence[PrefixRule], total_tokens: int) -> int:
    """Returns the longest boundary worth looking for in a request of `total_tokens`.

    With full attention alone it is the whole request: vLLM then computes the last token again. To do so a
    window would need one token more on its left than was loaded, and a state can't be taken back by a token
    at all, so with those the last token is not loaded.
    """
    most = total_tokens if all(rule.reach == "prefix" for rule in rules) else total_tokens - 1
    align = alignment(rules)
    return max(0, most) // align * align


def longest_boundary(rules: Sequence[PrefixRule], most: int, present: Presence) -> int:
    """Returns the longest boundary of at most `most` tokens at which every group can be resumed, 0 if none.

    `present` is asked only for blocks that decide something, the last ones first. Groups that need whole
    prefixes are not asked for: `most` says how far they reach.

    A missing block j rules out every boundary after it that needs it, which are all those between j and the
    boundary that was tried, since the blocks that a shorter prefix needs start no later. So the next one to
    try is at j's start, and every block is looked at once, at most.
    """
    align = alignment(rules)
    sparse = [(i, rule) for i, rule in enumerate(rules) if rule.reach != "prefix"]
    boundary = most // align * align
    while boundary > 0:
        lower = boundary
        for group, rule in sparse:
            blocks = rule.needed(boundary)
            missing = [
                block for block, there in zip(blocks, present(group, blocks), strict=True) if not there
            ]
            if missing:
                lower = min(lower, missing[-1] * rule.block_tokens)
        if lower == boundary:
            return boundary
        boundary = lower // align * align
    return 0


def stops(
    rules: Sequence[PrefixRule], usable: Sequence[Sequence[bool]], tokens: int
) -> tuple[list[int | None], int]:
    """Returns per group the block that keeps an engine from resuming further on, and where it resumes.

    `usable` says of every full block of each group whether it is there. A group that needs the whole prefix
    stops at the first block that it lacks, any other at the last one that it lacks of those needed to resume
    where the former end.
    """
    align = alignment(rules)
    ends = [len(there) * rule.block_tokens for rule, there in zip(rules, usable, strict=True)]
    most = limit = min(most_tokens(rules, tokens), *ends) // align * align
    found: list[int | None] = [None] * len(rules)
    for group, (rule, there) in enumerate(zip(rules, usable, strict=True)):
        if rule.reach == "prefix" and (end := leading(there) * rule.block_tokens) < most:
            found[group], limit = leading(there), min(limit, end)
    limit = limit // align * align
    for group, (rule, there) in enumerate(zip(rules, usable, strict=True)):
        if rule.reach != "prefix":
            found[group] = next((block for block in reversed(rule.needed(limit)) if not there[block]), None)
    return found, longest_boundary(rules, limit, lambda group, blocks: [usable[group][i] for i in blocks])
