"""Lists of buffers as one run of bytes: what payload stores read into and write from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def flat(buffers: Sequence[memoryview]) -> list[memoryview]:
    """The buffers that hold anything, as views of plain bytes.

    A view of another format or shape counts its items, not its bytes, when it is sliced.
    """
    return [
        view.cast("B") if view.format != "B" or view.ndim != 1 else view for view in buffers if view.nbytes
    ]


def total(buffers: Sequence[memoryview]) -> int:
    """Bytes of all of them."""
    return sum(view.nbytes for view in buffers)


def window(buffers: Sequence[memoryview], start: int, length: int) -> list[memoryview]:
    """Views of the bytes `start` to `start + length` of the run that flat `buffers` make; no copy."""
    out = []
    for view in buffers:
        if length <= 0:
            break
        if start < view.nbytes:
            part = view[start : start + length]
            out.append(part)
            length -= part.nbytes
            start = 0
        else:
            start -= view.nbytes
    return out


def pour(data: memoryview | bytes, into: Sequence[memoryview]) -> int:
    """Copy `data` into flat buffers, in turn; returns how many bytes there were."""
    source = np.frombuffer(data, np.uint8)
    at = 0
    for view in into:
        part = source[at : at + view.nbytes]
        if not part.size:
            break
        # numpy lets other threads run meanwhile; assigning to a slice of a memoryview does not.
        np.copyto(np.frombuffer(view, np.uint8)[: part.size], part)
        at += part.size
    return at
