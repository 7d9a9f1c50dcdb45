"""Byte planes: the transformation under the codec `planes-lz4`, for floats of 16 and 32 bits.

In a cache of keys, values or embeddings the mantissas are noise and the exponents are not: nearly all of them
lie within sixteen powers of two. lz4 gains nothing from that, because it codes repeated bytes, not frequent
ones. So the bytes of a slot are split into parts:

    bytes     for each byte of an element but the top one, lowest first: that byte of all n elements
    rest      n bytes, see below
    fields    for each field of the dtype (table `_LAYOUTS`), w bits wide: w bits of all n elements, packed

The top byte of an element, rotated left by one bit so that the sign is its lowest bit, is

    (rest + sum of each field's number, shifted left to the field's lowest bit) mod 256

Any rest and fields with that sum are valid. The writer chooses a window of exponents, subtracts its lowest,
puts the low bits of the difference into the fields and what remains into the rest. That is one and the same
byte wherever the exponent is within the window, so lz4 leaves nothing of it. The fields' bits are a
fixed-width code, which numpy packs at memory speed.

Stored form, all numbers little endian:

    u32 x parts    stored size of each part: bytes, rest, fields
    parts          back to back. One of its full size is raw; a smaller one is an lz4 block, without a size
                   of its own. Full sizes are n for bytes and rest, ceil(n / k) with k = 8 / w for a field

Byte j of a field of h = ceil(n / k) bytes holds element j in its lowest w bits, element j + h in the next,
and so on; bits of elements beyond n are written as zeros and ignored when read. A byte does not hold
neighbours, because this way packing and unpacking are shifts of whole arrays.

Every step is one numpy or lz4 call over a whole slot, which releases the GIL. Smaller pieces, which would
stay in a nearer cache, are no faster: a thread that gave up the GIL waits up to `sys.getswitchinterval()` for
it if another thread computes, and that is longer than all steps together.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from kvstore.errors import CorruptPayload
from kvstore.format.lz4 import expand, saves, shrink

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Layout:
    """The split of a dtype's elements. Part of the format."""

    #: Bytes of an element.
    width: int
    #: Lowest bit of the exponent in the rotated top byte.
    exponent: int
    #: Lowest bit and width of each field; one begins where another ends, and 8 is a multiple of the width.
    fields: tuple[tuple[int, int], ...]

    @property
    def parts(self) -> int:
        return self.width + len(self.fields)

    @property
    def bits(self) -> int:
        """Bits of all fields together."""
        return sum(width for _, width in self.fields)

    def full_sizes(self, n: int) -> list[int]:
        """Returns the full sizes, in bytes, of the parts of n elements: bytes, rest, fields."""
        return [n] * self.width + [-(-n // (8 // width)) for _, width in self.fields]


#: BF16 and F32: the sign and three low bits of the top byte's seven bits of exponent, so 16 powers of two, as
#: the exponent's eighth bit is in the next byte. F16: the sign, two bits of mantissa and four of the
#: exponent's five bits; as many powers, and the third field says which half of them, so lz4 shrinks it.
_LAYOUTS = {
    "BF16": _Layout(2, 1, ((0, 4),)),
    "F32": _Layout(4, 1, ((0, 4),)),
    "F16": _Layout(2, 3, ((0, 4), (4, 2), (6, 1))),
}
#: Dtypes that can be split.
DTYPES = frozenset(_LAYOUTS)

#: Number of top bytes, more or less, by which the window of exponents is chosen.
_SAMPLE = 4096
#: Bytes of memory that a thread keeps: enough for slots of some 6 MiB.
_KEPT = 16 << 20


class _Scratch(threading.local):
    """Memory in which a thread works, slot after slot: fresh pages would cost more than the work."""

    def __init__(self) -> None:
        self._kept = np.empty(0, np.uint8)

    def rows(self, count: int, n: int) -> Bytes:
        """Returns `count` rows of n bytes, rounded up to a multiple of 8, for use until the next call."""
        length = -(-n // 8) * 8
        if count * length > _KEPT:
            return np.empty((count, length), np.uint8)
        if count * length > self._kept.size:
            self._kept = np.empty(count * length, np.uint8)
        return self._kept[: count * length].reshape(count, length)


_scratch = _Scratch()


def encode(raw: memoryview, dtype: str) -> memoryview | None:
    """Returns the stored form of a slot of one of DTYPES, or None if it isn't worth its decompression."""
    stored = split(raw, dtype)
    return stored if saves(stored.nbytes, raw.nbytes) else None


def split(raw: memoryview, dtype: str) -> memoryview:
    """Returns the planes of a slot of one of DTYPES, at least one element; may be larger than `raw`."""
    layout = _LAYOUTS[dtype]
    elements = np.frombuffer(raw, f"<u{layout.width}")
    n = elements.size
    *planes, top, code, spare, packed = _scratch.rows(layout.width + 3, n)
    for k, plane in enumerate([*planes, top]):
        if k == 0:
            np.copyto(plane[:n], elements, casting="unsafe")
        else:
            np.right_shift(elements, 8 * k, out=plane[:n], casting="unsafe")
    _rotate(top, 1, spare)
    np.subtract(top, np.uint8(_window(top[:n], layout)), out=code)
    code &= np.uint8((1 << layout.bits) - 1)
    top -= code
    code[n:] = 0
    parts = [plane[:n] for plane in [*planes, top]]
    for (lowest, width), nbytes in zip(layout.fields, layout.full_sizes(n)[layout.width :], strict=True):
        field, packed = packed[:nbytes], packed[nbytes:]
        np.right_shift(code, np.uint8(lowest), out=spare)
        _pack(spare, width, field)
        parts.append(field)
    stored = [_shrunk(part) for part in parts]
    sizes = struct.pack(f"<{layout.parts}I", *(part.nbytes for part in stored))
    # Releases of numpy differ in the type of an array's buffer; this suits all of them.
    packed_all: memoryview = np.concatenate([np.frombuffer(sizes, np.uint8), *stored]).data
    return packed_all


def decode(stored: memoryview, dtype: str, into: memoryview) -> None:
    """Undoes `split`. Raises CorruptPayload; `into` may then hold anything.

    Whatever the bytes say, nothing larger than `into` is allocated.
    """
    layout = _LAYOUTS.get(dtype)
    if layout is None or not into.nbytes or into.nbytes % layout.width:
        raise CorruptPayload(f"{into.nbytes} bytes of {dtype} are not stored as planes")
    elements = np.frombuffer(into, f"<u{layout.width}")
    n = elements.size
    parts = _parts(stored, layout, n)
    top, spare = _scratch.rows(2, n)
    for (lowest, width), field in zip(layout.fields, parts[layout.width :], strict=True):
        _unpack(field, width, spare if lowest else top)
        if lowest:
            spare *= np.uint8(1 << lowest)
            top += spare
    top[:n] += parts[layout.width - 1]
    _rotate(top, 7, spare)
    np.multiply(top[:n], 1 << 8 * (layout.width - 1), out=elements, dtype=elements.dtype)
    elements |= parts[0]
    for k in range(1, layout.width - 1):
        np.frombuffer(into, np.uint8)[k :: layout.width] = parts[k]


def _parts(stored: memoryview, layout: _Layout, n: int) -> list[Bytes]:
    """Returns the decompressed parts of a stored slot of n elements; checks all sizes before decompressing.

    Raises CorruptPayload.
    """
    start = 4 * layout.parts
    if stored.nbytes < start:
        raise CorruptPayload(f"planes of {stored.nbytes} bytes have no room for their sizes")
    sizes = struct.unpack_from(f"<{layout.parts}I", stored)
    full = layout.full_sizes(n)
    if start + sum(sizes) != stored.nbytes or any(a > b for a, b in zip(sizes, full, strict=True)):
        raise CorruptPayload(f"planes of sizes {sizes} in {stored.nbytes} bytes, for {n} elements")
    parts = []
    for size, nbytes in zip(sizes, full, strict=True):
        part = np.frombuffer(stored, np.uint8, size, start)
        parts.append(part if size == nbytes else np.frombuffer(expand(part, nbytes), np.uint8))
        start += size
    return parts


def _shrunk(part: Bytes) -> Bytes:
    packed = shrink(part)
    return part if packed is None else np.frombuffer(packed, np.uint8)


def _rotate(plane: Bytes, left: int, spare: Bytes) -> None:
    """Rotates every byte left by `left` bits. `spare` is working memory."""
    np.right_shift(plane, np.uint8(8 - left), out=spare)
    # Multiplied, not shifted: numpy's left shift of bytes takes ten times as long.
    plane *= np.uint8(1 << left)
    plane |= spare


def _window(top: Bytes, layout: _Layout) -> int:
    """Returns what to subtract from the rotated top bytes so that as many as possible fit into the fields."""
    # An odd step: a step of a power of two would sample one column of the tensor.
    sample = top[:: top.size // _SAMPLE | 1] >> np.uint8(layout.exponent)
    seen = np.cumsum(np.bincount(sample, minlength=256 >> layout.exponent))
    seen = np.concatenate([np.zeros(1, seen.dtype), seen])
    length = 1 << (layout.bits - layout.exponent)
    # argmax takes the lowest of equals: then the largest exponent is at the top of the window.
    return int(np.argmax(seen[length:] - seen[:-length])) << layout.exponent


def _pack(codes: Bytes, width: int, field: Bytes) -> None:
    """Fills a field with the lowest `width` bits of every byte; overwrites `codes`."""
    slices = codes[: 8 // width * field.size].reshape(8 // width, -1)
    slices &= np.uint8((1 << width) - 1)
    field[:] = slices[0]
    for i in range(1, len(slices)):
        slices[i] *= np.uint8(1 << i * width)
        field |= slices[i]


def _unpack(field: Bytes, width: int, into: Bytes) -> None:
    """Writes each number of a field into the lowest bits of a byte of `into`, which may be longer."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    codes = into[: shifts.size * field.size]
    np.right_shift(field, shifts, out=codes.reshape(shifts.size, -1))
    codes &= np.uint8((1 << width) - 1)
