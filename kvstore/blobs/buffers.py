"""Lists of buffers as one run of bytes: what payload stores read into and write from."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def flat(buffers: Sequence[memoryview]) -> list[memoryview]:
    """The buffers that hold anything, as views of plain bytes; neighbours in memory are joined.

    A view of another format or shape counts its items, not its bytes, when it is sliced. Slots lie side by
    side in staging, and one long copy takes the interpreter's lock once where 64 short ones take it 64
    times: beside a busy Python thread 1.7 ms against 13 for 32 MiB.
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
    """One view of two that touch, if they are views of one object; None if they aren't."""
    if first.obj is not second.obj or first.readonly != second.readonly:
        return None
    whole = memoryview(first.obj)
    if not whole.c_contiguous:
        return None
    start = _address(first) - _address(whole)
    return whole.cast("B")[start : start + first.nbytes + second.nbytes]


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
