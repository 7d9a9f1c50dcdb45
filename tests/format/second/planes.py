"""The codecs."""

from __future__ import annotations

import struct

import lz4.block
import numpy as np

from tests.format.second.basics import need


def unlz4(stored: bytes, nbytes: int) -> bytes:
    raw: bytes = lz4.block.decompress(stored, uncompressed_size=nbytes)
    need(len(raw) == nbytes, "length of an LZ4 block")
    return raw


#: Bytes of an element; (width, lowest bit) of every field.
LAYOUTS = {"BF16": (2, [(4, 0)]), "F32": (4, [(4, 0)]), "F16": (2, [(4, 0), (2, 4), (1, 6)])}


def full_sizes(dtype: str, n: int) -> list[int]:
    width, fields = LAYOUTS[dtype]
    return [n] * width + [-(-n // (8 // bits)) for bits, _ in fields]


def unplanes(stored: bytes, dtype: str, nbytes: int) -> bytes:
    width, fields = LAYOUTS[dtype]
    n, rest = divmod(nbytes, width)
    full = full_sizes(dtype, n)
    need(n and not rest and len(stored) >= 4 * len(full), "planes")
    sizes = struct.unpack_from(f"<{len(full)}I", stored)
    need(4 * len(full) + sum(sizes) == len(stored), "sizes of planes")
    parts, at = [], 4 * len(full)
    for size, whole in zip(sizes, full, strict=True):
        need(size <= whole, "a part larger than it can be")
        piece = stored[at : at + size]
        parts.append(np.frombuffer(piece if size == whole else unlz4(piece, whole), np.uint8))
        at += size
    u = parts[width - 1].astype(np.uint16)
    for (bits, lowest), field in zip(fields, parts[width:], strict=True):
        numbers = np.concatenate([field >> shift & ((1 << bits) - 1) for shift in range(0, 8, bits)])[:n]
        u = u + (numbers.astype(np.uint16) << lowest)
    u &= 0xFF
    top = ((u >> 1) | (u << 7)) & 0xFF
    planes = [*parts[: width - 1], top.astype(np.uint8)]
    return np.stack(planes, axis=1).tobytes()


def planes(raw: bytes, dtype: str, c: int) -> bytes:
    """A stored form, with any number `c` that the fields are relative to."""
    width, fields = LAYOUTS[dtype]
    columns = np.frombuffer(raw, np.uint8).reshape(-1, width)
    n = len(columns)
    top = columns[:, width - 1].astype(np.uint16)
    u = ((top << 1) | (top >> 7)) & 0xFF
    low = (u - c) & ((1 << sum(bits for bits, _ in fields)) - 1)
    parts = [columns[:, k].tobytes() for k in range(width - 1)] + [
        ((u - low) & 0xFF).astype(np.uint8).tobytes()
    ]
    for bits, lowest in fields:
        h = -(-n // (8 // bits))
        numbers = np.zeros(h * (8 // bits), np.uint16)
        numbers[:n] = low >> lowest & ((1 << bits) - 1)
        field = np.zeros(h, np.uint16)
        for number, shift in enumerate(range(0, 8, bits)):
            field |= numbers[number * h : (number + 1) * h] << shift
        parts.append(field.astype(np.uint8).tobytes())
    packed = [lz4.block.compress(part, store_size=False) for part in parts]
    stored = [small if len(small) < len(part) else part for small, part in zip(packed, parts, strict=True)]
    return struct.pack(f"<{len(stored)}I", *map(len, stored)) + b"".join(stored)


def compress(raw: bytes, codec: str, dtype: str) -> tuple[bytes, str]:
    forms = [(raw, "none")]
    if raw and codec != "none":
        forms.append((lz4.block.compress(raw, store_size=False), "lz4"))
        if codec == "planes-lz4" and dtype in LAYOUTS:
            forms += [(planes(raw, dtype, c), "planes-lz4") for c in range(0, 256, 16)]
    return min(
        (one for one in forms if one[1] == "none" or len(one[0]) < len(raw)), key=lambda one: len(one[0])
    )
