"""What all indexes share."""

from __future__ import annotations

import struct
import tracemalloc

import pytest

from kvstore.index.contract import cached
from schemas.records import SegmentRecord, unpack_record


def packed(number: int, ranks: int) -> bytes:
    """A record of slots of one size, unlike those of other numbers."""
    head = struct.pack("<BBHBBHIIQ", 1, 1, 64, ranks, 0, 0, number, number, number)
    return head + struct.pack("<2I", 4096, 512) * ranks


@pytest.mark.parametrize("ranks", [1, 125, 126, 255])
def test_records_that_are_kept_take_bounded_memory(ranks: int) -> None:
    """At most 8,192 of 1 KiB; longer ones, which few have and anybody can forge, are unpacked each time."""
    unpacked = 0

    def unpack(value: bytes) -> SegmentRecord | None:
        nonlocal unpacked
        unpacked += 1
        # A copy, as the index in Redis makes one of a part of the value.
        return unpack_record(bytes(bytearray(value)))

    record_of = cached(unpack)
    tracemalloc.start()
    try:
        for number in range(9000):
            record_of(packed(number, ranks))
        assert tracemalloc.get_traced_memory()[0] < 22 << 20
    finally:
        tracemalloc.stop()
    found = {record_of(packed(number, ranks)) for number in range(8990, 9000)}
    assert found == {unpack_record(packed(number, ranks)) for number in range(8990, 9000)}
    assert unpacked == 9000 + (10 if ranks > 125 else 0)
