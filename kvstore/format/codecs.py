"""The codecs of a slot by name. A new one is a module, a line in the table and its name in schemas.records.

    none        the tensor's bytes as they are
    lz4         one lz4 block (lz4.py)
    planes-lz4  exponents and mantissas apart, then lz4 (planes.py)

A slot's codec is chosen when it is written. A namespace's codec says which are tried: the smallest form wins,
and one that saves less than a 32nd is not considered, so that a slot which nothing shrinks is `none`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from kvstore.format import lz4, planes
from schemas.records import Codec


@dataclass(frozen=True, slots=True)
class SlotCodec:
    """One way to store a slot."""

    #: (raw bytes, at least one; dtype) -> stored form, or None if that isn't worth its decompression.
    encode: Callable[[memoryview, str], memoryview | None]
    #: (stored form, dtype, buffer of the raw size) -> None, with the raw bytes in the buffer. Raises
    #: CorruptPayload.
    decode: Callable[[memoryview, str, memoryview], None]
    #: Dtypes that it can store; None: all.
    dtypes: frozenset[str] | None = None
    #: Other codecs that a namespace of this codec tries.
    besides: tuple[Codec, ...] = ()

    def takes(self, dtype: str) -> bool:
        """Tells whether slots of a dtype can be stored by this codec."""
        return self.dtypes is None or dtype in self.dtypes


#: Largest ratio of raw to stored bytes: no codec makes a slot smaller than a 256th.
MOST_RATIO: Final = 256

CODECS: Final[dict[Codec, SlotCodec]] = {
    "none": SlotCodec(lambda raw, dtype: None, lambda stored, dtype, into: lz4.copy(stored, into)),
    "lz4": SlotCodec(lz4.encode, lz4.decode),
    # Plain lz4 is still better where whole elements repeat.
    "planes-lz4": SlotCodec(planes.encode, planes.decode, planes.DTYPES, besides=("lz4",)),
}


def encode(raw: memoryview, codec: Codec, dtype: str) -> tuple[memoryview, Codec]:
    """Returns the smallest stored form of a slot in a namespace of this codec, and the codec of that form."""
    best: tuple[memoryview, Codec] = (raw, "none")
    if codec == "none" or not raw.nbytes:
        return best
    for name in (*CODECS[codec].besides, codec):
        one = CODECS[name]
        stored = one.encode(raw, dtype) if one.takes(dtype) else None
        if stored is not None and stored.nbytes < best[0].nbytes:
            best = stored, name
    return best
