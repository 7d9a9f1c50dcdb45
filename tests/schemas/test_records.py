"""The packed record: pinned bytes, and what is refused."""

from __future__ import annotations

import struct
import tracemalloc
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schemas.records import (
    CODECS,
    EqualSizes,
    PartRecord,
    SegmentRecord,
    pack_head,
    pack_part,
    pack_record,
    rounded_cost,
    unpack_record,
)

GOLDEN = [
    pytest.param(
        SegmentRecord((PartRecord(4096, (512,) * 64),), 64, "none", 1_700_000_000, 128, 32768),
        "02 01 4000 01 00 0000 00f15365 80000000 0080000000000000 000000000000000000100000 00020000",
        id="slots of one size",
    ),
    pytest.param(
        SegmentRecord((PartRecord(8192, (100, 7, 2**32 - 1)),), 3, "lz4", 2**32 - 1, 2**32 - 1, 2**64 - 1),
        "02 00 0300 01 01 0000 ffffffff ffffffff ffffffffffffffff 0000000000000000"
        "00200000 64000000 07000000 ffffffff",
        id="slots of their own sizes, the largest numbers",
    ),
    pytest.param(
        SegmentRecord((PartRecord(4096, (5,)), PartRecord(12288, (6,))), 1, "lz4", 1, 0, 9),
        "02 01 0100 02 01 0000 01000000 00000000 0900000000000000 0000000000000000"
        "00100000 05000000  00300000 06000000",
        id="two ranks, one slot",
    ),
    pytest.param(
        SegmentRecord((PartRecord(4096, (300, 301)),), 2, "planes-lz4", 1_700_000_000, 64, 1024),
        "02 00 0200 01 02 0000 00f15365 40000000 0004000000000000 000000000000000000100000 2c010000 2d010000",
        id="planes-lz4",
    ),
    pytest.param(
        SegmentRecord((PartRecord(4096, (512,)),), 1, "none", 1_700_000_000, 0, 512, 1883 << 16),
        "02 01 0100 01 00 5b87 00f15365 00000000 0002000000000000 000000000000000000100000 00020000",
        id="with a cost",
    ),
    pytest.param(
        SegmentRecord(
            (PartRecord(4096, (512, 512)), PartRecord(8192, (7, 7)), PartRecord(4096, (0, 0))),
            *(2, "none", 1_700_000_000, 3, 0, 0, bytes(range(16))),
        ),
        "02 03 0200 03 00 0000 00f15365 03000000 0000000000000000 0000000000000000"
        "000102030405060708090a0b0c0d0e0f"
        "00100000 00020000  00200000 07000000  00100000 00000000",
        id="salted, three ranks, slots of one size",
    ),
    pytest.param(
        SegmentRecord(
            (PartRecord(4096, (300, 301)), PartRecord(4096, (302, 303))),
            *(2, "lz4", 1_700_000_000, 0, 0, 1883 << 16, b"\xff" * 16),
        ),
        "02 02 0200 02 01 5b87 00f15365 00000000 0000000000000000 0000000000000000"
        "ffffffffffffffffffffffffffffffff"
        "00100000 2c010000 2d010000  00100000 2e010000 2f010000",
        id="salted, two ranks, slots of their own sizes, with a cost",
    ),
    pytest.param(
        SegmentRecord(
            (PartRecord(4096, (512,)),),
            *(1, "none", 1_700_000_000, 0, 512, 0, b"\xff" * 16, bytes(range(8))),
        ),
        "02 03 0100 01 00 0000 00f15365 00000000 0002000000000000 0001020304050607"
        "ffffffffffffffffffffffffffffffff  00100000 00020000",
        id="salted, of a known writer",
    ),
]


@pytest.mark.parametrize(("record", "packed"), GOLDEN)
def test_packed_form_is_pinned(record: SegmentRecord, packed: str) -> None:
    """Part of the Redis schema and of the SQLite file: a change is a new version of the format."""
    assert pack_record(record).hex(" ") == bytes.fromhex(packed).hex(" ")
    assert unpack_record(bytes.fromhex(packed)) == record


sizes = st.integers(0, 2**32 - 1)


@st.composite
def records(draw: st.DrawFn) -> SegmentRecord:
    slots, codec = draw(st.integers(1, 40)), draw(st.sampled_from(CODECS))
    slot_sizes = st.lists(sizes, min_size=slots, max_size=slots).map(tuple)
    # Without a codec all slots of a part have one size.
    uniform = sizes.map(lambda size: (size,) * slots)
    parts = draw(
        st.lists(
            st.builds(PartRecord, sizes, uniform if codec == "none" else slot_sizes), min_size=1, max_size=5
        )
    )
    cost = rounded_cost(draw(st.integers(0, 2**44)))
    return SegmentRecord(
        tuple(parts),
        slots,
        codec,
        draw(sizes),
        draw(sizes),
        draw(st.integers(0, 2**64 - 1)),
        cost,
        draw(st.just(b"") | st.binary(min_size=16, max_size=16)),
        draw(st.binary(min_size=8, max_size=8)),
    )


def test_a_record_is_not_larger_than_what_it_was_made_of() -> None:
    """65535 slots of one size for each of 255 ranks are 133 MB, and 2 kB packed."""
    packed = bytes.fromhex("0201ffffff") + bytes(27) + bytes(8) * 255
    assert len(packed) == 32 + 8 * 255
    assert unpack_record(packed) is None
    most = packed[:2] + (1024).to_bytes(2, "little") + packed[4:]
    assert unpack_record(most) is not None


@pytest.mark.parametrize("ranks", [1, 4, 255])
@pytest.mark.parametrize("slots", [1, 64, 1024])
@pytest.mark.parametrize("equal", [True, False], ids=["slots of one size", "slots of their own sizes"])
def test_a_record_takes_little_more_memory_than_its_packed_form(ranks: int, slots: int, equal: bool) -> None:
    """Also where each of its parts is looked at, one at a time. Whole, 255 ranks took 1,031 times as much."""
    head = struct.pack(
        "<BBHBBHIIQ8s", 2, equal, slots, ranks, 1, 0, 1 << 30, 1 << 30, 1 << 40, bytes(range(8))
    )
    sizes = range(1 << 20, (1 << 20) + (1 if equal else slots))
    part = struct.pack(f"<I{len(sizes)}I", 4096, *sizes)
    unpack_record(head + part * ranks)
    tracemalloc.start()
    try:
        record = unpack_record(head + part * ranks)
        assert record is not None
        held = tracemalloc.get_traced_memory()[0]
        assert held <= len(head + part * ranks) + 512
        tracemalloc.reset_peak()
        total = sum(part.slot_range(slots // 2, 1)[1] + part.nbytes for part in record.parts)
        assert tracemalloc.get_traced_memory()[1] <= held + 24 * len(part) + 4096
    finally:
        tracemalloc.stop()
    assert total == ranks * (sizes[len(sizes) // 2] + 4096 + sum(sizes) * (slots if equal else 1))


@given(st.integers(0, 9), st.integers(0, 5), st.slices(6), st.integers(-7, 7))
def test_equal_sizes_are_the_tuple_that_they_stand_for(
    size: int, times: int, some: slice, index: int
) -> None:
    compact, whole = EqualSizes(size, times), (size,) * times

    assert compact == whole == compact
    assert hash(compact) == hash(whole)
    assert compact[some] == whole[some]
    assert (list(compact), len(compact), sum(compact)) == (list(whole), times, size * times)
    assert compact.count(size) == times
    if -times <= index < times:
        assert compact[index] == size
    else:
        with pytest.raises(IndexError):
            compact[index]
    assert compact != (*whole, size)
    assert not times or compact != (size + 1,) * times
    assert compact != list(whole)


@given(records())
def test_unpacking_undoes_packing(record: SegmentRecord) -> None:
    assert unpack_record(pack_record(record)) == record


@given(records())
def test_ranks_pack_their_parts_alone_and_agree_on_the_head(record: SegmentRecord) -> None:
    """What an index assembles from the ranks' commits is what one would have packed of the whole."""
    ranks = len(record.parts)
    alone = [replace(record, parts=(part,)) for part in record.parts]
    heads = {pack_head(one, ranks) for one in alone}
    assert len(heads) == 1
    packed = heads.pop() + b"".join(pack_part(one, one.parts[0]) for one in alone)
    assert packed == pack_record(record)


@given(records(), st.data())
def test_a_damaged_length_is_a_miss(record: SegmentRecord, data: st.DataObject) -> None:
    packed = pack_record(record)
    cut = data.draw(st.integers(0, len(packed) - 1))
    assert unpack_record(packed[:cut]) is None
    assert unpack_record(packed + b"x") is None


@pytest.mark.parametrize(
    ("at", "value"),
    [(0, 1), (0, 3), (2, 0), (4, 0), (5, 3)],
    ids=["version 1", "version 3", "no slots", "no ranks", "unknown codec"],
)
def test_what_this_version_does_not_know_is_a_miss(at: int, value: int) -> None:
    packed = bytearray(pack_record(SegmentRecord((PartRecord(4096, (1,)),), 1, "none", 1)))
    packed[at] = value
    assert unpack_record(bytes(packed)) is None


@given(records())
def test_a_salt_that_is_lost_or_made_up_is_a_miss(record: SegmentRecord) -> None:
    """The flag alone says whether 16 bytes are a salt or belong to the parts: no length is right for both."""
    packed = bytearray(pack_record(record))
    packed[1] ^= 2
    assert unpack_record(bytes(packed)) is None
    without = replace(record, salt=b"")
    assert len(pack_record(record)) == len(pack_record(without)) + len(record.salt)
    assert pack_record(without)[32:] == pack_record(record)[32 + len(record.salt) :]


@pytest.mark.parametrize("salt", [b"x", bytes(15), bytes(17)], ids=len)
def test_the_id_of_a_salt_has_its_length(salt: bytes) -> None:
    record = SegmentRecord((PartRecord(4096, (1,)),), 1, "none", 1, salt=salt)
    with pytest.raises(ValueError, match="16 bytes"):
        pack_record(record)


@given(st.integers(0, 2**42))
def test_costs_are_rounded_down_by_less_than_a_thousandth(cost_us: int) -> None:
    rounded = rounded_cost(cost_us)
    assert rounded <= cost_us < rounded + max(1, cost_us / 1000)
    assert rounded_cost(rounded) == rounded


def test_costs_have_an_end() -> None:
    assert rounded_cost(-1.5) == 0
    assert rounded_cost(1e30) == rounded_cost(2**60) == 2047 << 31


def test_slot_ranges() -> None:
    part = PartRecord(4096, (10, 20, 30, 40))
    assert part.nbytes == 4196
    assert part.slot_range(0, 4) == (4096, 100)
    assert part.slot_range(1, 2) == (4106, 50)
    assert part.slot_range(3, 1) == (4156, 40)
