"""Where a prompt can be resumed when only some of its blocks are stored. Pure functions.

As connectors.boundary decides it for an engine, which knows vLLM's layers; here from what a namespace says of
its groups. tests/admin/test_explain.py compares the two.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm

from schemas.namespace import GroupSpec, Namespace


def leading(there: Sequence[bool]) -> int:
    """How many blocks are there from the start on."""
    return next((i for i, one in enumerate(there) if not one), len(there))


def stops(space: Namespace, usable: Sequence[Sequence[bool]], tokens: int) -> tuple[list[int | None], int]:
    """Per group, the block that keeps an engine from resuming the prompt further on; and where it resumes.

    Groups that need the whole prefix stop at what they lack first. For the others it is the last block that
    they lack of what resuming there would need.
    """
    whole = [spec.kind in ("full", "mla") for spec in space.groups]
    align = lcm(*(spec.block_tokens for spec in space.groups))
    most = min(len(there) * spec.block_tokens for spec, there in zip(space.groups, usable, strict=True))
    # A window would need a token on its left that was not loaded: as the engines, leave out the last one.
    most = min(most, tokens if all(whole) else tokens - 1) // align * align
    found: list[int | None] = []
    limit = most
    for spec, there, prefix in zip(space.groups, usable, whole, strict=True):
        first = leading(there)
        lacks = prefix and first * spec.block_tokens < most
        found.append(first if lacks else None)
        if lacks:
            limit = min(limit, first * spec.block_tokens // align * align)
    resumable = limit
    while resumable > 0:
        lacking = [_lacks(spec, there, resumable) for spec, there in zip(space.groups, usable, strict=True)]
        if all(one is None for one in lacking):
            break
        if resumable == limit:
            found = [one if prefix else lack for one, lack, prefix in zip(found, lacking, whole, strict=True)]
        resumable -= align
    return found, max(0, resumable)


def _lacks(spec: GroupSpec, there: Sequence[bool], tokens: int) -> int | None:
    """The last block that a prefix of `tokens` lacks of what its next token needs (connectors.boundary)."""
    match spec.kind:
        case "full" | "mla":
            skipped = 0
        case "sliding_window":
            skipped = max(0, tokens - (spec.window or 1) + 1)
        case "chunked_local":
            skipped = tokens // (spec.window or 1) * (spec.window or 1)
        case "mamba":
            skipped = max(0, tokens - 1)
    needed = range(skipped // spec.block_tokens, -(-tokens // spec.block_tokens))
    return next((block for block in reversed(needed) if not there[block]), None)
