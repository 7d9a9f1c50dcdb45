"""The codec `lz4`: one lz4 block, without a size of its own."""

from __future__ import annotations

from typing import Final

import lz4.block
import numpy as np
from numpy.typing import NDArray

from kvstore.errors import CorruptPayload

#: lz4's own limit for one block.
_MAX_BLOCK: Final = 0x7E000000


def encode(raw: memoryview, dtype: str) -> memoryview | None:
    """Returns the stored form of a slot, or None if it isn't worth its decompression."""
    packed = shrink(raw)
    return None if packed is None else memoryview(packed)


def decode(stored: memoryview, dtype: str, into: memoryview) -> None:
    """Undoes `encode`. Raises CorruptPayload; `into` may then hold anything."""
    copy(expand(stored, into.nbytes), into)


def shrink(data: memoryview | NDArray[np.uint8]) -> bytes | None:
    """Returns the lz4 block of these bytes, or None if that saves less than a 32nd."""
    if data.nbytes > _MAX_BLOCK:
        return None
    packed: bytes = lz4.block.compress(data, store_size=False)
    return packed if saves(len(packed), data.nbytes) else None


def saves(packed: int, raw: int) -> bool:
    """Tells whether a form saves a 32nd: less is not worth its decompression. Sizes in bytes."""
    return packed < raw and packed <= raw - raw // 32


def expand(stored: memoryview | NDArray[np.uint8], nbytes: int) -> bytes:
    """Returns the `nbytes` bytes of an lz4 block. Raises CorruptPayload if it holds anything else."""
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


def copy(source: memoryview | bytes, into: memoryview) -> None:
    """Copies bytes with numpy, which lets other threads run meanwhile, unlike a slice of a memoryview."""
    np.copyto(np.frombuffer(into, np.uint8), np.frombuffer(source, np.uint8))
