"""Byte planes: the layout read back by the book, what shrinks, and that hostile bytes do no harm."""

from __future__ import annotations

import random
import struct
import threading
import tracemalloc

import lz4.block
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import CorruptPayload
from kvstore.format import lz4 as lz4_codec
from kvstore.format import planes
from kvstore.format import segment as codec
from schemas.segment import SlotMeta

FIELDS = {"BF16": (4,), "F16": (4, 2, 1), "F32": (4,)}
WIDTHS = {"BF16": 2, "F16": 2, "F32": 4}

dtypes = st.sampled_from(sorted(planes.DTYPES))


def floats(dtype: str, n: int, seed: int = 1, spread: float = 1.0) -> bytes:
    """Normally distributed numbers."""
    rng = random.Random(seed)
    values = [rng.gauss(0.0, spread) for _ in range(n)]
    if dtype == "BF16":
        return b"".join(struct.pack("<f", value)[2:] for value in values)
    return struct.pack(f"<{n}{'e' if dtype == 'F16' else 'f'}", *values)


def join(stored: bytes | memoryview, dtype: str, nbytes: int) -> bytes:
    into = bytearray(nbytes)
    planes.decode(memoryview(stored), dtype, memoryview(into))
    return bytes(into)


def by_the_book(stored: bytes, dtype: str, n: int) -> bytes:
    """A slot's bytes, read one element at a time from the description in the module's docstring."""
    fields, width = FIELDS[dtype], WIDTHS[dtype]
    full = [n] * width + [-(-n // (8 // bits)) for bits in fields]
    sizes = struct.unpack_from(f"<{len(full)}I", stored)
    parts, start = [], 4 * len(full)
    for size, nbytes in zip(sizes, full, strict=True):
        part = stored[start : start + size]
        parts.append(part if size == nbytes else lz4.block.decompress(part, uncompressed_size=nbytes))
        start += size
    assert start == len(stored)
    out = bytearray()
    for i in range(n):
        top, shift = parts[width - 1][i], 0
        for bits, part in zip(fields, parts[width:], strict=True):
            place, byte = divmod(i, len(part))
            top += (part[byte] >> place * bits & (1 << bits) - 1) << shift
            shift += bits
        top &= 255
        out += bytes(part[i] for part in parts[: width - 1])
        out.append(top >> 1 | (top & 1) << 7)
    return bytes(out)


@given(dtypes, st.integers(1, 70), st.sampled_from(["noise", "zeros", "floats", "tiny"]), st.integers(0, 9))
def test_round_trip(dtype: str, n: int, kind: str, seed: int) -> None:
    nbytes = n * WIDTHS[dtype]
    raw = {
        "noise": random.Random(seed).randbytes(nbytes),
        "zeros": bytes(nbytes),
        "floats": floats(dtype, n, seed),
        "tiny": floats(dtype, n, seed, 1e-30),
    }[kind]
    stored = planes.split(memoryview(raw), dtype)
    assert by_the_book(bytes(stored), dtype, n) == raw
    assert join(stored, dtype, nbytes) == raw


@pytest.mark.parametrize(("dtype", "bits"), [("BF16", 12.2), ("F16", 14.8), ("F32", 28.2)])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 300.0])
def test_floats_shrink_to_so_many_bits(dtype: str, bits: float, spread: float) -> None:
    raw = floats(dtype, 60_000, spread=spread)
    stored = planes.split(memoryview(raw), dtype)
    assert join(stored, dtype, len(raw)) == raw
    # Below 2**-14 the exponents of F16 end, and the mantissas of what is smaller begin with zeros.
    assert stored.nbytes * 8 / 60_000 < bits


def test_a_few_exponents_outside_the_window_cost_little() -> None:
    raw = bytearray(floats("BF16", 60_000))
    rng = random.Random(2)
    for _ in range(60):
        struct.pack_into("<H", raw, 2 * rng.randrange(60_000), rng.randrange(65536))
    stored = planes.split(memoryview(raw), "BF16")
    assert join(stored, "BF16", len(raw)) == raw
    assert stored.nbytes * 8 / 60_000 < 12.3


@given(st.integers(1, 40), dtypes, st.randoms(use_true_random=False))
def test_any_rest_and_fields_are_read(n: int, dtype: str, rng: random.Random) -> None:
    """Another writer may choose other windows, several in a slot, or none at all."""
    full = [n] * WIDTHS[dtype] + [-(-n // (8 // bits)) for bits in FIELDS[dtype]]
    stored = struct.pack(f"<{len(full)}I", *full) + rng.randbytes(sum(full))
    assert join(stored, dtype, n * WIDTHS[dtype]) == by_the_book(stored, dtype, n)


def test_slots_leave_no_trace_in_the_next() -> None:
    """Of any size, in a thread that has its memory dirty already and one that has none yet."""
    slots = [(dtype, floats(dtype, n)) for n in (999, 5, 20_000, 17) for dtype in sorted(planes.DTYPES)]
    alone: list[bytes] = []
    for dtype, raw in slots:
        fresh = threading.Thread(target=lambda: alone.append(bytes(planes.split(memoryview(raw), dtype))))
        fresh.start()
        fresh.join()
    together = [bytes(planes.split(memoryview(raw), dtype)) for dtype, raw in slots]
    assert together == alone
    for stored, (dtype, raw) in zip(together, slots):
        assert join(stored, dtype, len(raw)) == raw


def test_slots_beyond_the_memory_that_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = floats("BF16", 1000)
    stored = bytes(planes.split(memoryview(raw), "BF16"))
    monkeypatch.setattr(planes, "_KEPT", 100)
    assert planes.split(memoryview(raw), "BF16") == stored
    assert join(stored, "BF16", len(raw)) == raw


def test_buffers_need_no_alignment() -> None:
    raw = floats("F32", 100)
    shifted = memoryview(b"x" + raw)[1:]
    stored = b"x" + bytes(planes.split(shifted, "F32"))
    into = bytearray(1 + len(raw))
    planes.decode(memoryview(stored)[1:], "F32", memoryview(into)[1:])
    assert into[1:] == raw


# Damage. `good` is a slot whose checksum is right whatever its bytes: a hostile writer's.


def load(stored: bytes, dtype: str, nbytes: int) -> bytes:
    """Through the codec, under the right checksum."""
    shape = (nbytes // WIDTHS.get(dtype, 1),)
    checksum = codec.slot_checksum(stored, "00" * 18, "planes-lz4", dtype, shape)
    slot = SlotMeta(
        key="00" * 18, codec="planes-lz4", dtype=dtype, shape=shape, raw_bytes=nbytes, xxh3=checksum
    )
    into = bytearray(nbytes)
    codec.decode_slot(memoryview(stored), slot, memoryview(into))
    return bytes(into)


RAW = floats("BF16", 200)
GOOD = bytes(planes.split(memoryview(RAW), "BF16"))
#: low bytes, rest, field
SIZES = struct.unpack_from("<3I", GOOD)


def test_a_good_slot_is_loaded() -> None:
    assert SIZES[0] == 200 and SIZES[1] < 30 and SIZES[2] == 100
    assert load(GOOD, "BF16", 400) == RAW


def test_every_changed_byte_fails_the_checksum() -> None:
    checksum = codec.slot_checksum(GOOD, "00" * 18, "planes-lz4", "BF16", (200,))
    slot = SlotMeta(
        key="00" * 18, codec="planes-lz4", dtype="BF16", shape=(200,), raw_bytes=400, xxh3=checksum
    )
    damaged = bytearray(GOOD)
    for position, old in enumerate(GOOD):
        for value in {old ^ (1 << bit) for bit in range(8)} | {old ^ 0xFF}:
            damaged[position] = value
            with pytest.raises(CorruptPayload, match="checksum"):
                codec.decode_slot(memoryview(damaged), slot, memoryview(bytearray(400)))
        damaged[position] = old
    for length in range(len(GOOD)):
        with pytest.raises(CorruptPayload, match="checksum"):
            codec.decode_slot(memoryview(GOOD)[:length], slot, memoryview(bytearray(400)))


@pytest.mark.parametrize("length", [*range(14), 100, len(GOOD) - 1])
def test_truncated_under_a_right_checksum(length: int) -> None:
    with pytest.raises(CorruptPayload, match="planes of"):
        load(GOOD[:length], "BF16", 400)


@pytest.mark.parametrize(
    "sizes",
    [
        (0, 0, 0),
        (200, 0, 100),
        (0, SIZES[1] + 200, 100),
        (199, SIZES[1] + 1, 100),
        (200, SIZES[1] + 1, 99),
        (200, SIZES[1] - 1, 101),
        (201, SIZES[1], 99),
        (SIZES[1], 200, 100),
        (200, 100, SIZES[1]),
        (2**32 - 1, SIZES[1], 100),
        (200, 2**32 - 1, 2**32 - 1),
    ],
)
def test_hostile_sizes(sizes: tuple[int, ...]) -> None:
    with pytest.raises(CorruptPayload):
        load(struct.pack("<3I", *sizes) + GOOD[12:], "BF16", 400)


@pytest.mark.parametrize("more", [b"x", bytes(300)])
def test_bytes_behind_the_last_part(more: bytes) -> None:
    with pytest.raises(CorruptPayload, match="planes of sizes"):
        load(GOOD + more, "BF16", 400)


@pytest.mark.parametrize("length", [None, 0, 1, 199, 201, 100_000])
def test_a_block_of_another_length(length: int | None) -> None:
    block = b"" if length is None else lz4.block.compress(bytes(length), store_size=False)
    stored = struct.pack("<3I", 200, len(block), 100) + GOOD[12:212] + block + GOOD[-100:]
    with pytest.raises(CorruptPayload, match=r"decompress|sizes"):
        load(stored, "BF16", 400)


@pytest.mark.parametrize(
    ("dtype", "nbytes"), [("U8", 400), ("I16", 400), ("F64", 400), ("BF16", 401), ("F32", 402)]
)
def test_what_has_no_planes(dtype: str, nbytes: int) -> None:
    with pytest.raises(CorruptPayload, match="not stored as planes"):
        load(GOOD, dtype, nbytes)


@given(st.binary(max_size=80), st.integers(0, 20), st.sampled_from([*sorted(planes.DTYPES), "U8", "I64"]))
def test_fuzz_bytes(stored: bytes, nbytes: int, dtype: str) -> None:
    try:
        load(stored, dtype, nbytes)
    except CorruptPayload:
        pass


@given(
    st.sampled_from(sorted(planes.DTYPES)),
    st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=6),
    st.booleans(),
)
def test_fuzz_a_slot_under_a_right_checksum(dtype: str, changes: list[tuple[int, int]], begin: bool) -> None:
    raw = floats(dtype, 150) if begin else bytes(150 * WIDTHS[dtype])
    stored = bytearray(planes.split(memoryview(raw), dtype))
    for position, value in changes:
        stored[position % (24 if begin else len(stored))] = value
    try:
        load(bytes(stored), dtype, len(raw))
    except CorruptPayload:
        pass


def test_no_bytes_make_it_allocate_much() -> None:
    """Blocks that would expand 250 times, in place of every part."""
    raw = bytearray(floats("F16", 1000) * 100)
    bomb = lz4.block.compress(bytes(50 << 20), store_size=False)
    sizes = [90_000, 90_000, 45_000, 20_000, 10_000]
    stored = struct.pack("<5I", *sizes) + b"".join(bomb[:size] for size in sizes)
    into = memoryview(raw)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptPayload, match="decompress"):
            planes.decode(memoryview(stored), "F16", into)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2 * len(raw)


@pytest.mark.parametrize("nbytes", [1 << 31, 1 << 62])
def test_a_block_beyond_lz4s_own_limit_is_damage(nbytes: int) -> None:
    with pytest.raises(CorruptPayload, match="can't hold"):
        lz4_codec.expand(memoryview(b"x"), nbytes)


def test_more_than_a_block_holds_is_not_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lz4_codec, "_MAX_BLOCK", 999)
    assert lz4_codec.shrink(memoryview(bytes(999))) is not None
    assert lz4_codec.shrink(memoryview(bytes(1000))) is None


def test_nothing_is_changed_in_the_callers_buffers() -> None:
    for dtype in sorted(planes.DTYPES):
        raw = np.frombuffer(floats(dtype, 500), np.uint8)
        raw.flags.writeable = False
        stored = planes.split(memoryview(raw), dtype).toreadonly()
        before = bytes(stored)
        assert join(stored, dtype, raw.nbytes) == raw.tobytes()
        assert bytes(stored) == before
