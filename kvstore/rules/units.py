"""Units: sizes as people read them, sequences in batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

_T = TypeVar("_T")


def size(nbytes: float) -> str:
    """Returns a size for people: 1536 -> 1.5 KiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} B" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def batches(items: Sequence[_T], most: int) -> Iterator[Sequence[_T]]:
    """Yields `items` in their order, at most `most` at a time."""
    return (items[first : first + most] for first in range(0, len(items), most))
