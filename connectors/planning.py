"""Pure functions that decide which blocks to load and which to save, without vLLM and without I/O.

Blocks are counted from the start of a request's chain; `range(a, b)` is blocks a to b - 1.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence

from kvstore.index.port import Replaced, Run
from kvstore.keys import NO_SALT, SaltId
from kvstore.store.saving import NOTHING_JOINED, Joins

#: A number of blocks that no chain reaches.
EVERY_BLOCK = sys.maxsize


def slice_runs(runs: Iterable[Run], blocks: range) -> list[Run]:
    """Returns the part of `runs` that covers `blocks`."""
    out = []
    for run in runs:
        first, last = max(run.start, blocks.start), min(run.start + run.count, blocks.stop)
        if first < last:
            out.append(Run(first, run.segment, run.slot + first - run.start, last - first, run.record))
    return out


def joined(runs: Iterable[Run]) -> list[Run]:
    """Returns the runs in order, with neighbours in one segment joined."""
    out: list[Run] = []
    for run in runs:
        last = out[-1] if out else None
        if last is not None and (last.segment, last.start + last.count, last.slot + last.count) == (
            run.segment,
            run.start,
            run.slot,
        ):
            out[-1] = Run(last.start, last.segment, last.slot, last.count + run.count, last.record)
        else:
            out.append(run)
    return out


def gaps(blocks: range, runs: Iterable[Run]) -> list[range]:
    """Returns the parts of `blocks` that no run covers; the runs are in order."""
    out, at = [], blocks.start
    for run in runs:
        if run.start > at:
            out.append(range(at, min(run.start, blocks.stop)))
        at = max(at, run.start + run.count)
    if at < blocks.stop:
        out.append(range(at, blocks.stop))
    return out


def split_run(run: Run, most: int) -> list[Run]:
    """Returns `run` split into runs of at most `most` blocks, so that each fits into one staging buffer."""
    return [
        Run(run.start + at, run.segment, run.slot + at, min(most, run.count - at), run.record)
        for at in range(0, run.count, most)
    ]


def piece_blocks(counts: Sequence[int], pieces: int) -> int:
    """Returns the most blocks of a piece, so that runs of `counts` blocks become at most `pieces` pieces, as
    even as can be. Each run becomes at least one piece."""
    pieces = max(pieces, len(counts))
    least, most = -(-sum(counts) // pieces), max(counts)
    while least < most:
        middle = (least + most) // 2
        if sum(-(-count // middle) for count in counts) <= pieces:
            most = middle
        else:
            least = middle + 1
    return least


def external_tokens(matched_tokens: int, computed_tokens: int, least_tokens: int) -> int:
    """Returns how many tokens to load beyond a block-aligned local hit; 0 if it is not worth it."""
    new = matched_tokens - computed_tokens
    return new if new >= max(1, least_tokens) else 0


def ranges(blocks: range, wanted: Callable[[int], bool]) -> list[range]:
    """Returns the wanted ones of `blocks`, as ranges."""
    out: list[range] = []
    for block in blocks:
        if not wanted(block):
            continue
        if out and out[-1].stop == block:
            out[-1] = range(out[-1].start, block + 1)
        else:
            out.append(range(block, block + 1))
    return out


def saves_due(saved: int, done: int, segment_blocks: int, *, final: bool) -> tuple[list[range], int]:
    """Returns the segments to save when blocks up to `done` are computed and those up to `saved` are saved.

    Full segments are always due; the remainder only if `final`, because blocks stay in the engine's
    cache while their request runs, and a fuller segment costs fewer requests later. Returns the segments
    and the new `saved`.
    """
    out = []
    while done - saved >= segment_blocks:
        out.append(range(saved, saved + segment_blocks))
        saved += segment_blocks
    if final and done > saved:
        out.append(range(saved, done))
        saved = done
    return out, saved


def joins_due(new: int, tail: Sequence[Run], segment_blocks: int) -> list[Run]:
    """Returns those of the segments before `new` blocks that are written anew with them, in order.

    `tail` is of `tail_of`. They join as a binary counter carries: the last segment joins if it is no larger
    than all blocks after it. So each time that a block is written again, it is in a segment of twice the
    size. A segment of three quarters of `segment_blocks` or more is whole and stays. A chain that grows by 1
    to 100 blocks a turn then lies in 1.0 to 1.3 times as many segments as a chain saved at once. It is
    written 1.2 to 4 times. With a bound of one half it is up to 2.0 and 1 to 3.5 times; without a bound 1.0
    and 1.3 to 4 (trials.benchmarks.bench_turns).
    """
    joined = 0
    for run in reversed(tail):
        if run.count > new or 4 * run.count >= 3 * segment_blocks:
            break
        joined, new = joined + 1, new + run.count
    return list(tail[len(tail) - joined :])


def joins_of(olds: Iterable[Run], blocks: range, stored: int, digests: Callable[[range], bytes]) -> Joins:
    """Returns what a save of `blocks` replaces of `olds`; the chain's first `stored` blocks are stored, and
    `digests` returns the packed ones of some of its blocks."""
    some = [old for old in olds if old.start < blocks.stop and blocks.start < old.start + old.count]
    if not some:
        return NOTHING_JOINED
    replaced = (Replaced(old.segment, digests(range(old.start, old.start + old.count))) for old in some)
    kept = max(0, min(stored, blocks.stop) - blocks.start)
    return Joins(tuple(replaced), kept, min(old.record.created_s for old in some))


def tail_of(runs: Sequence[Run], blocks: int, segment_blocks: int, salt: SaltId = NO_SALT) -> list[Run]:
    """Returns the segments that end the first `blocks` blocks of a chain and may be written anew, in order.

    They are short ones of this salt of which the chain has all blocks: one of which it has some blocks has
    another chain's as well. Together they have the blocks of two segments at most.
    """
    tail: list[Run] = []
    least = blocks - 2 * segment_blocks
    for run in reversed(runs):
        whole = run.slot == 0 and run.count == run.record.slots and run.record.salt == salt
        if run.start + run.count != blocks or not whole or run.count >= segment_blocks or run.start < least:
            break
        tail.append(run)
        blocks = run.start
    return tail[::-1]


def admitted_blocks(prompt_blocks: int, min_blocks: int, noted: int | None) -> int:
    """Returns how many leading blocks of a request are worth saving; EVERY_BLOCK if all are, also later ones.

    `noted` is how many leading blocks of the prompt an earlier request has asked for, None if that
    doesn't matter. Blocks that decoding fills follow the prompt: they are worth saving if all of it is.
    """
    # `min_blocks` at its default of 1 refuses nothing, not even a prompt that is shorter than a block.
    if max(prompt_blocks, 1) < min_blocks:
        return 0
    if noted is None or 0 < prompt_blocks <= noted:
        return EVERY_BLOCK
    return noted


def savable_tokens(done_tokens: int, prompt_tokens: int, hashed_tokens: int, *, save_decode: bool) -> int:
    """Returns how many leading tokens are final and are to be saved.

    A block's hash exists only when its last token is known, so under speculative or asynchronous
    decoding `hashed_tokens` keeps draft tokens out.
    """
    return min(done_tokens if save_decode else min(done_tokens, prompt_tokens), hashed_tokens)
