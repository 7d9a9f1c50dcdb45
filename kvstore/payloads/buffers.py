"""Lists of buffers that payload stores read into and write from, each list as one run of bytes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def flat(buffers: Sequence[memoryview]) -> list[memoryview]:
    """Returns the buffers that aren't empty as views of plain bytes, with neighbours in memory joined.

    Plain bytes, because a view of another format or shape counts its items when it is sliced. Joined, because
    slots lie side by side in staging, and one long copy takes the interpreter's lock once where 64 short ones
    take it 64 times: beside a busy Python thread 32 MiB take 1.7 ms instead of 13.
    """
    out: list[memoryview] = []
    end = 0
    for view in buffers:
        if not view.nbytes:
            continue
        start = _address(view)
        joined = _join(out[-1], view) if out and start == end else None
        if joined is not None:
            out[-1] = joined
        else:
            out.append(view.cast("B") if view.format != "B" or view.ndim != 1 else view)
        end = start + view.nbytes
    return out


def _address(view: memoryview) -> int:
    # frombuffer takes any contiguous buffer, of any format, without a copy.
    address: int = np.frombuffer(view, np.uint8).__array_interface__["data"][0]
    return address


def _join(first: memoryview, second: memoryview) -> memoryview | None:
    """Returns one view over two that touch, if they are views of the same object; None otherwise."""
    if first.obj is not second.obj or first.readonly != second.readonly:
        return None
    whole = memoryview(first.obj)
    if not whole.c_contiguous:
        return None
    start = _address(first) - _address(whole)
    return whole.cast("B")[start : start + first.nbytes + second.nbytes]


def total(buffers: Sequence[memoryview]) -> int:
    """Returns the number of bytes in all buffers."""
    return sum(view.nbytes for view in buffers)


def window(buffers: Sequence[memoryview], start: int, length: int) -> list[memoryview]:
    """Returns views of bytes `start` to `start + length` of flat `buffers`, without a copy."""
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
    """Copies `data` into flat buffers, in turn. Returns how many bytes it copied."""
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
