"""Byte planes: the transformation under the codec `planes-lz4`, for floats of 16 and 32 bits.

In a cache of keys, values or embeddings the mantissas are noise and the exponents are not: nearly all of them
lie within sixteen powers of two. lz4 finds neither, because it codes repeated bytes, not frequent ones. So
the bytes of a slot are split into parts of their own:

    bytes     for each byte of an element but the top one, lowest first: that byte of all n elements
    rest      n bytes, see below
    fields    for each field of the dtype (table `_LAYOUTS`), w bits wide: w bits of all n elements, packed

The top byte of an element, rotated left by one bit so that the sign is its lowest bit, is

    (rest + sum of each field's number, shifted left to the field's lowest bit) mod 256

Any rest and fields with that sum are valid. The writer chooses a window of exponents, subtracts its lowest,
puts the low bits of the difference into the fields and what remains into the rest: one and the same byte
wherever the exponent is within the window, so lz4 leaves nothing of it. The fields' bits are a fixed-width
code, which numpy packs at memory speed.

Stored form, all numbers little endian:

    u32 x parts    stored size of each part: bytes, rest, fields
    parts          back to back. One of its full size is raw; a smaller one is an lz4 block, without a size
                   of its own. Full sizes are n for bytes and rest, ceil(n / k) with k = 8 / w for a field

Byte j of a field of h = ceil(n / k) bytes holds element j in its lowest w bits, element j + h in the next,
and so on; bits of elements beyond n are written as zeros and ignored. Not neighbours in a byte, because
this way packing and unpacking are shifts of whole arrays.

Every step is one numpy or lz4 call over a whole slot, which releases the GIL. Not smaller pieces that stay in
a nearer cache: a thread that gave up the GIL waits up to `sys.getswitchinterval()` for it if another thread
computes, and that is longer than all steps together.
"""

from __future__ import annotations

import struct
import threading
from dataclasses import dataclass

import lz4.block
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import CorruptPayload

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class _Layout:
    """How the elements of a dtype are split. Part of the format."""

    #: Bytes of an element.
    width: int
    #: Where the exponent begins in the rotated top byte, in bits.
    exponent: int
    #: Lowest bit and width of each field; one begins where another ends, and 8 is a multiple of the width.
    fields: tuple[tuple[int, int], ...]

    @property
    def parts(self) -> int:
        return self.width + len(self.fields)

    @property
    def bits(self) -> int:
        """Of all fields."""
        return sum(width for _, width in self.fields)

    def full_sizes(self, n: int) -> list[int]:
        """Of bytes, rest and fields, for n elements."""
        return [n] * self.width + [-(-n // (8 // width)) for _, width in self.fields]


#: BF16 and F32: four bits of sign and seven bits of exponent; 16 powers of two, as the exponent's eighth
#: bit is in the next byte. F16: seven bits of sign, two bits of mantissa and all of the exponent; as many
#: powers, and the third field says which half of them, so lz4 shrinks it.
_LAYOUTS = {
    "BF16": _Layout(2, 1, ((0, 4),)),
    "F32": _Layout(4, 1, ((0, 4),)),
    "F16": _Layout(2, 3, ((0, 4), (4, 2), (6, 1))),
}
#: The dtypes that can be split.
DTYPES = frozenset(_LAYOUTS)

#: lz4's own limit for one block.
_MAX_BLOCK = 0x7E000000
_SAMPLE = 4096
#: Bytes of memory that a thread keeps: enough for slots of some 6 MiB.
_KEPT = 16 << 20


class _Scratch(threading.local):
    """Memory that a thread works in, slot after slot: fresh pages would cost more than the work."""

    def __init__(self) -> None:
        self._kept = np.empty(0, np.uint8)

    def rows(self, count: int, n: int) -> Bytes:
        """So many rows of n bytes, rounded up to a multiple of 8; until the thread's next call."""
        length = -(-n // 8) * 8
        if count * length > _KEPT:
            return np.empty((count, length), np.uint8)
        if count * length > self._kept.size:
            self._kept = np.empty(count * length, np.uint8)
        return self._kept[: count * length].reshape(count, length)


_scratch = _Scratch()


def shrink(data: memoryview | Bytes) -> bytes | None:
    """The lz4 block of these bytes, or None if that saves less than a 32nd."""
    if data.nbytes > _MAX_BLOCK:
        return None
    packed: bytes = lz4.block.compress(data, store_size=False)
    return packed if saves(len(packed), data.nbytes) else None


def saves(packed: int, raw: int) -> bool:
    """Whether a compressed form is worth its decompression: less would cost more than it spares to read."""
    return packed < raw and packed <= raw - raw // 32


def expand(stored: memoryview | Bytes, nbytes: int) -> bytes:
    """The `nbytes` bytes of an lz4 block. Raises CorruptPayload if it holds anything else."""
    # The binding has no way to decompress into a given buffer, so its result is copied once more.
    if nbytes > _MAX_BLOCK:
        raise CorruptPayload(f"an lz4 block can't hold {nbytes} bytes")
    try:
        raw: bytes = lz4.block.decompress(stored, uncompressed_size=nbytes)
    except lz4.block.LZ4BlockError as exc:
        raise CorruptPayload("an lz4 block does not decompress") from exc
    if len(raw) != nbytes:
        raise CorruptPayload(f"an lz4 block decompresses to {len(raw)} bytes, expected {nbytes}")
    return raw


def split(raw: memoryview, dtype: str) -> memoryview:
    """The stored form of a slot of one of DTYPES, at least one element; may be larger than `raw`."""
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
    # Releases of numpy differ in how they type an array as a buffer; this suits all of them.
    packed_all: memoryview = np.concatenate([np.frombuffer(sizes, np.uint8), *stored]).data
    return packed_all


def join(stored: memoryview, dtype: str, into: memoryview) -> None:
    """Undo `split`. Raises CorruptPayload; `into` may then hold anything.

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
    """The parts of a stored slot of n elements, decompressed. All sizes are checked before that begins."""
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
    """Rotate every byte left by that many bits."""
    np.right_shift(plane, np.uint8(8 - left), out=spare)
    # Multiplied, not shifted: numpy's left shift of bytes takes ten times as long.
    plane *= np.uint8(1 << left)
    plane |= spare


def _window(top: Bytes, layout: _Layout) -> int:
    """What to subtract from the rotated top bytes, so that as many as possible fit into the fields."""
    # An odd step: in steps of a power of two it would be one column of the tensor.
    sample = top[:: top.size // _SAMPLE | 1] >> np.uint8(layout.exponent)
    seen = np.cumsum(np.bincount(sample, minlength=256 >> layout.exponent))
    seen = np.concatenate([np.zeros(1, seen.dtype), seen])
    length = 1 << (layout.bits - layout.exponent)
    # The lowest of equals: then the largest exponent is at the top of the window.
    return int(np.argmax(seen[length:] - seen[:-length])) << layout.exponent


def _pack(codes: Bytes, width: int, field: Bytes) -> None:
    """Fill a field with the lowest `width` bits of every byte; `codes` is used up."""
    slices = codes[: 8 // width * field.size].reshape(8 // width, -1)
    slices &= np.uint8((1 << width) - 1)
    field[:] = slices[0]
    for i in range(1, len(slices)):
        slices[i] *= np.uint8(1 << i * width)
        field |= slices[i]


def _unpack(field: Bytes, width: int, into: Bytes) -> None:
    """The numbers of a field, in the lowest bits of a byte each; `into` may be longer."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    codes = into[: shifts.size * field.size]
    np.right_shift(field, shifts, out=codes.reshape(shifts.size, -1))
    codes &= np.uint8((1 << width) - 1)
