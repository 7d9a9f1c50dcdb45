"""The sketch of uses: it remembers, in a few bits each, which blocks somebody has asked for before.

It is a Bloom filter in lines of 64 bytes, one filter per window of time. Digests are uniform hashes already,
so the filter hashes nothing itself. It uses the first eight bytes of a digest:

    bytes 0-3   the block's own line: big-endian, modulo the number of lines
    bytes 4-7   its mark: three positions of 9 bits each, lowest bits first, in whatever line it is put

A filter that puts every block into a line of its own needs 8192 random accesses for a long prompt,
5 ms inside Redis. So the blocks of a chain go in groups of 32 (blocks 0-31, 32-63, ...), and a group
whose first block is new puts all marks into that block's line, its home: one access. A block is noted

    if its mark is in its group's home line, or in its own line.

Both only ever gain bits, so a noted block stays noted, whatever else is noted. Where a group's first block
is there already, because another prompt shares it and then goes on differently, the new blocks' marks
go into their own lines. In the home line they would pile up: a system prompt of three blocks would
collect there whatever anybody ever said after it, until all bits are set and everything looks known.

Chains are noted from their first block on, so all blocks after a missing one are missing, and all before
a noted one are noted. So the first block settles a group, if it is missing, and so do the last blocks, if
they are noted (one would do, but it may be a false positive; four at once hardly happen). Only a group
where the chain ends, or leaves what is known, is looked at block by block.

With two bytes of sketch per block noted in a window, about one block in a hundred is a false positive.
The chances don't add up along a chain, they multiply: a prompt that is new throughout passes its first
block with that chance, and its first two with the square of it.

kvstore/index/scripted/lua/note.lua looks and marks; tests/index/sketching.py is the same in Python.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Self

import numpy as np

from kvstore.index.contract import BadArgument
from kvstore.keys import DIGEST_BYTES

LINE_BYTES = 64
GROUP_BLOCKS = 32
MARK_BYTES = 8
_LINE_BITS = 8 * LINE_BYTES
_MARK_BITS = 3
#: Longest time to live of a sketch, in seconds: Redis refuses much longer ones.
_LONGEST_KEEP_S = 10**9


@dataclass(frozen=True, slots=True)
class Window:
    """The two sketches that a note looks at: this window's, which it adds to, and the one before."""

    now: str
    before: str
    lines: int
    #: How long this window's sketch is still needed, in seconds.
    keep_s: int

    @classmethod
    def at(cls, now_s: float, window_s: float, sketch_bytes: int) -> Self:
        """Returns the window of a time. Raises BadArgument for a size or a length that can't be.

        Windows are numbered from 1970 on, so that all engines agree on them. A sketch's name has its size and
        the window's length in it: with others, its bits mean something else.
        """
        if not window_s > 0 or sketch_bytes < LINE_BYTES:
            raise BadArgument(
                f"a sketch of {sketch_bytes} bytes for {window_s} s; at least one line, above 0 s"
            )
        number = int(now_s // window_s)
        name = f"{sketch_bytes}:{window_s:.12g}"
        keep_s = min(ceil((number + 2) * window_s - now_s), _LONGEST_KEEP_S)
        return cls(f"{name}:{number}", f"{name}:{number - 1}", sketch_bytes // LINE_BYTES, keep_s)


@dataclass(frozen=True, slots=True)
class Marks:
    """The lines and marks of a chain's blocks."""

    #: The first 8 bytes of each block's digest.
    blocks: bytes
    #: One line per group, with the marks of its blocks.
    masks: bytes

    @classmethod
    def of(cls, digests: bytes) -> Self:
        """Returns the marks of packed digests."""
        words = np.frombuffer(digests, dtype=">u4").reshape(-1, DIGEST_BYTES // 4)[:, :2]
        groups = -(-len(words) // GROUP_BLOCKS)
        bits = np.zeros(groups * _LINE_BITS, dtype=bool)
        start = np.arange(len(words)) // GROUP_BLOCKS * _LINE_BITS
        left = words[:, 1].astype(np.int64)
        for _ in range(_MARK_BITS):
            bits[start + left % _LINE_BITS] = True
            left //= _LINE_BITS
        return cls(words.tobytes(), np.packbits(bits).tobytes())
