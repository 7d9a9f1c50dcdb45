"""The sketch of uses in plain Python: what note.lua is held against, bit by bit."""

from __future__ import annotations

from collections.abc import Callable

from kvstore.index.sketch import GROUP_BLOCKS, LINE_BYTES, MARK_BYTES
from kvstore.index.sketch import Marks as Packed

_LINE_BITS = 8 * LINE_BYTES
_MARK_BITS = 3
#: The last blocks of a group that answer for all of it.
_WITNESSES = 4


class Marks(Packed):
    """The lines and marks of a chain's blocks, one by one."""

    def __len__(self) -> int:
        return len(self.blocks) // MARK_BYTES

    def line(self, block: int, lines: int) -> int:
        """Returns the number of the block's own line."""
        at = block * MARK_BYTES
        return int.from_bytes(self.blocks[at : at + 4]) % lines

    def mark(self, block: int) -> int:
        """Returns the block's bits in any line; a line is a number whose highest bit is position 0."""
        at = block * MARK_BYTES + 4
        left, mark = int.from_bytes(self.blocks[at : at + 4]), 0
        for _ in range(_MARK_BITS):
            left, position = divmod(left, _LINE_BITS)
            mark |= 1 << (_LINE_BITS - 1 - position)
        return mark

    def mask(self, group: int) -> int:
        """Returns the bits of all blocks of a group."""
        return int.from_bytes(self.masks[group * LINE_BYTES : (group + 1) * LINE_BYTES])


Read = Callable[[int], int]


def note(marks: Marks, lines: int, now: Read, before: Read) -> tuple[int, dict[int, int]]:
    """Returns how many leading blocks one of two sketches has, and new lines of `now` that note all blocks.

    `now(line)` and `before(line)` read a line of a sketch, as a number; 0 where there is none.
    """
    changed: dict[int, int] = {}

    def current(line: int) -> int:
        return changed[line] if line in changed else now(line)

    noted, leading = 0, True
    for group, first in enumerate(range(0, len(marks), GROUP_BLOCKS)):
        upto = min(first + GROUP_BLOCKS, len(marks))
        have = _reach(marks, lines, current, group, first, upto)
        if leading:
            noted = have
            if noted < upto:
                noted = max(noted, _reach(marks, lines, before, group, first, upto))
            leading = noted == upto
        if have == first:
            home = marks.line(first, lines)
            changed[home] = current(home) | marks.mask(group)
        else:
            for block in range(have, upto):
                own = marks.line(block, lines)
                changed[own] = current(own) | marks.mark(block)
    return noted, changed


def _reach(marks: Marks, lines: int, read: Read, group: int, first: int, upto: int) -> int:
    """Returns up to which block a sketch has the group of blocks `first` to `upto` - 1."""
    home, mask = read(marks.line(first, lines)), marks.mask(group)
    if home & mask == mask:
        return upto

    def missing(block: int) -> bool:
        mark = marks.mark(block)
        return home & mark != mark and read(marks.line(block, lines)) & mark != mark

    if missing(first):
        return first
    if not any(missing(block) for block in range(max(first, upto - _WITNESSES), upto)):
        return upto
    return next((block for block in range(first, upto) if missing(block)), upto)
