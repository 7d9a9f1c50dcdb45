"""Tells which part of a block a rank holds, and reads it from segments that other ranks have cut.

Tensor parallelism cuts a block by heads, a pipeline by layers; a segment has one payload per distinct part.
A slot is [layer, head, token, content], so a shard of a larger cut is a slice of its heads. A shard of a
smaller cut is several parts side by side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from connectors.engine.layout import LocalGroup
from connectors.planning import split_run
from kvstore.errors import DeadlineExceeded, NamespaceMismatch
from kvstore.index.port import Run
from kvstore.keys import ContentKey
from kvstore.store.space import Space


@dataclass(frozen=True, slots=True)
class Place:
    """A rank's place among the ranks of its engine."""

    tp_rank: int = 0
    tp: int = 1
    pp_rank: int = 0
    pp: int = 1

    @property
    def number(self) -> int:
        """Returns the rank's number in the engine, counted from 0."""
        return self.pp_rank * self.tp + self.tp_rank

    def shard(self, group: LocalGroup) -> int:
        """Returns which of the group's distinct shards this rank holds."""
        return self.tp_rank * group.page.shards // self.tp

    def writes(self, group: LocalGroup) -> bool:
        """Returns whether this rank saves its part: among ranks that hold the same one, the first does."""
        return self.tp_rank % (self.tp // group.page.shards) == 0

    def part(self, group: LocalGroup) -> int:
        """Returns the number of this rank's part in a segment that this engine writes."""
        return self.pp_rank * group.page.shards + self.shard(group)

    def parts(self, group: LocalGroup) -> int:
        """Returns how many parts a segment has that this engine writes."""
        return self.pp * group.page.shards


def fits(parts: int, stages: int, shards: int) -> bool:
    """Returns whether an engine with `stages` and `shards` can read a segment that was cut into `parts`."""
    cut, rest = divmod(parts, stages)
    return not rest and cut > 0 and (cut % shards == 0 or shards % cut == 0)


def read_part(
    space: Space,
    group: LocalGroup,
    place: Place,
    run: Run,
    keys: Sequence[ContentKey],
    into: Sequence[memoryview],
    end: float,
    arrived: Callable[[], None] | None = None,
    *,
    probe: bool = False,
) -> None:
    """Fill `into[i]` with this rank's part of the run's i-th block, verified, by the monotonic time `end`.

    Raises KVStoreError; the buffers may then hold anything. The blocks of every part that is touched are read
    and verified whole: a checksum covers a slot of one part. The extra memory for that is no more than the
    buffers have, or one block of the segment's part. `arrived` is called whenever all bytes of a part are
    there, before they are verified. A `probe` is counted apart.
    """
    shards, shard = group.page.shards, place.shard(group)
    parts = len(run.record.parts)
    if not fits(parts, place.pp, shards):
        raise NamespaceMismatch(f"segment {run.segment.hex()}: {parts} parts don't fit {place.parts(group)}")
    cut = parts // place.pp
    first = place.pp_rank * cut

    def load(part: int, blocks: Run, buffers: Sequence[memoryview]) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"load of segment {run.segment.hex()}: deadline passed")
        at = blocks.start - run.start
        own = keys[at : at + blocks.count]
        space.load(blocks, own, buffers, rank=first + part, deadline_s=left, arrived=arrived, probe=probe)

    if cut == shards:
        load(shard, run, into)
        return
    layers, heads, _, _ = group.shape
    cell = group.slot_bytes // (layers * heads)
    mine = [np.frombuffer(view, np.uint8).reshape(layers, heads, cell) for view in into]
    if cut < shards:
        # A part holds the heads of several ranks: read all of them and keep ours.
        ratio = shards // cut
        at = shard % ratio * heads
        most = max(1, run.count // ratio)
        scratch = _scratch(most, group.slot_bytes * ratio)
        for some in split_run(run, most):
            load(shard // ratio, some, scratch[: some.count])
            for target, view in zip(mine[some.start - run.start :], scratch[: some.count], strict=False):
                whole = np.frombuffer(view, np.uint8).reshape(layers, heads * ratio, cell)
                target[:] = whole[:, at : at + heads]
        return
    ratio = cut // shards
    few = heads // ratio
    scratch = _scratch(run.count, group.slot_bytes // ratio)
    for i in range(ratio):
        load(shard * ratio + i, run, scratch)
        for target, view in zip(mine, scratch, strict=True):
            target[:, i * few : (i + 1) * few] = np.frombuffer(view, np.uint8).reshape(layers, few, cell)


def _scratch(count: int, size: int) -> list[memoryview]:
    return [memoryview(bytearray(size)) for _ in range(count)]
