"""Chains that grow turn by turn, as a KV connector saves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from connectors.planning import joins_due, joins_of, saves_due, tail_of
from kvstore.format.segment import Slot
from kvstore.keys import digests
from kvstore.store.saving import Saved
from kvstore.store.space import Match, Space


def grow(
    space: Space,
    hashes: Sequence[bytes],
    made: Callable[[Sequence[bytes]], Sequence[Slot]],
    segment_blocks: int,
    *,
    found: Match | None = None,
    joining: bool = True,
) -> list[Saved]:
    """Saves what a chain has beyond its match, with the short segments before it, or without. `made` returns
    the slots of blocks."""
    packed = digests(hashes)

    def of(blocks: range) -> bytes:
        return packed[16 * blocks.start : 16 * blocks.stop]

    found = found or space.match(packed)
    stored = found.blocks
    tail = tail_of(found.runs, stored, segment_blocks) if joining else []
    olds = joins_due(len(hashes) - stored, tail, segment_blocks)
    first = olds[0].start if olds else stored
    saved = []
    for run in saves_due(first, len(hashes), segment_blocks, final=True)[0]:
        saved.append(
            space.save(
                made(hashes[run.start : run.stop]),
                depth=run.start,
                chain=packed,
                joins=joins_of(olds, run, stored, of),
            )
        )
    return saved
