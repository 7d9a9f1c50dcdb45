"""Chains that grow turn by turn, as a KV connector saves them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from connectors.planning import joins_due, saves_due, tail_of
from kvstore.format.segment import Slot
from kvstore.keys import digests, new_segment_id
from kvstore.store.saving import Joins, Saved
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
    """Saves what a chain has beyond its match, with the short segments before it; or without, as it was before
    there were joins. `made` returns the slots of blocks."""
    found = found or space.match(digests(hashes))
    new = len(hashes) - found.blocks
    tail = tail_of(found.runs, found.blocks, segment_blocks) if new and joining else []
    joins = joins_due(new, [run.count for run in tail], segment_blocks)
    olds = tail[len(tail) - joins :]
    first = olds[0].start if olds else found.blocks
    saved = []
    for run in saves_due(first, len(hashes), segment_blocks, final=True)[0]:
        own = [old for old in olds if old.start in run]
        saved.append(
            space.save(
                made(hashes[run.start : run.stop]),
                depth=run.start,
                segment=new_segment_id(digests(hashes[:1])),
                joins=Joins(tuple(old.segment for old in own), sum(old.count for old in own)),
            )
        )
    return saved
