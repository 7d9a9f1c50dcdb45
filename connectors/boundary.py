"""Up to where a prefix can be resumed when several kinds of layers must agree: pure functions, no I/O.

A prefix of L tokens can be resumed if every KV cache group finds what computing token L needs of it:

    prefix   full attention: every block before L
    window   sliding window of W tokens: the blocks that hold tokens L - W + 1 to L - 1
    chunk    attention within chunks of W tokens: the blocks from the start of L's own chunk on
    state    Mamba and linear attention: the one block whose state is that after token L - 1

which is what vLLM keeps of a running request too (`get_num_skipped_tokens` in v1/core/
single_type_kv_cache_manager.py): the blocks it allocates for a load are the ones to be filled here. L is a
multiple of every group's block size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal

Reach = Literal["prefix", "window", "chunk", "state"]

#: Which blocks of a group are there: (group, blocks) -> one bool per block.
Presence = Callable[[int, range], Sequence[bool]]


@dataclass(frozen=True, slots=True)
class Rule:
    """What one group needs of a prefix; `window` in tokens, for the reaches window and chunk."""

    reach: Reach
    block_tokens: int
    window: int = 0

    def skipped_tokens(self, tokens: int) -> int:
        """Leading tokens of `tokens` computed ones that computing the next doesn't need."""
        match self.reach:
            case "prefix":
                return 0
            case "window":
                return max(0, tokens - self.window + 1)
            case "chunk":
                return tokens // self.window * self.window
            case "state":
                return max(0, tokens - 1)

    def needed(self, tokens: int) -> range:
        """The blocks that a prefix of `tokens` must have to be resumed there; the last may be partial."""
        return range(self.skipped_tokens(tokens) // self.block_tokens, -(-tokens // self.block_tokens))


def alignment(rules: Sequence[Rule]) -> int:
    """Boundaries that every group can have are multiples of this many tokens."""
    return lcm(*(rule.block_tokens for rule in rules))


def most_tokens(rules: Sequence[Rule], total_tokens: int) -> int:
    """The longest boundary worth looking for in a request of `total_tokens`.

    Of full attention all of it: vLLM then computes the last token again. For a window that would need one
    token more on its left than was loaded, and a state can't be taken back by a token at all, so with those
    the last token stays out of what is loaded.
    """
    most = total_tokens if all(rule.reach == "prefix" for rule in rules) else total_tokens - 1
    align = alignment(rules)
    return max(0, most) // align * align


def longest_boundary(rules: Sequence[Rule], most: int, present: Presence) -> int:
    """The longest boundary of at most `most` tokens at which every group can be resumed, 0 if none.

    `present` is asked only for blocks that decide something, the last ones first. Of the groups that need
    whole prefixes the caller says how far they reach by way of `most`.

    A missing block j rules out every boundary after it that needs it, which are all those between j and the
    boundary that was tried, since what is needed starts no later for a shorter prefix. So the next one to try
    is at j's start, and every block is looked at once, at most.
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
