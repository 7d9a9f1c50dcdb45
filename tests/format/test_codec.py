"""Segments: golden files, other readers, and that no damage gets through unseen."""

from __future__ import annotations

import hashlib
import json
import random
import struct
import time
from collections.abc import Callable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from kvstore import keys
from kvstore.errors import CorruptPayload, NamespaceMismatch, NewerFormat
from kvstore.format import segment as codec
from kvstore.format.segment import ALIGN, Encoded, Header, Slot
from kvstore.keys import NamespaceId, SegmentId
from schemas.namespace import DTYPE_BYTES, GroupSpec, Namespace
from schemas.records import CODECS, Codec
from schemas.segment import MAX_SLOTS
from tests.format import hostile

GOLDEN = Path(__file__).parent / "golden"
NAMESPACE = Namespace(
    kind="kv",
    model="tiny",
    weights="0123456789abcdef",
    dtype="bfloat16",
    block_tokens=4,
    hash_algo="sha256_cbor",
    page_order="LHNC",
    groups=(GroupSpec(kind="full", block_tokens=4, dtype="BF16", shape=(2, 1, 4, 8)),),
)
JSON = keys.canonical_json(NAMESPACE)

#: What a slot decodes to: content key, dtype, shape, bytes.
Decoded = tuple[str, str, tuple[int, ...], bytes]


def block(i: int) -> bytes:
    return hashlib.sha256(b"block %d" % i).digest()


def slot(i: int, data: bytes, dtype: str = "U8", shape: tuple[int, ...] | None = None) -> Slot:
    shape = (len(data) // DTYPE_BYTES[dtype],) if shape is None else shape
    return Slot(keys.block_key(block(i)), memoryview(data), dtype, shape)


def small_slots() -> list[Slot]:
    """Three slots: one that lz4 shrinks, one that it doesn't, one of another dtype and shape."""
    return [
        slot(0, struct.pack("<32H", *[0x3F80] * 32) * 2, "BF16", (2, 1, 4, 8)),
        slot(1, random.Random(1).randbytes(128), "BF16", (2, 1, 4, 8)),
        slot(2, struct.pack("<30f", *[i % 3 for i in range(30)]), "F32", (5, 6)),
    ]


def float_slots() -> list[Slot]:
    """One slot for each form that `planes-lz4` writes, with 999 elements of every dtype that it splits."""
    rng = random.Random(3)
    values = [rng.gauss(0.0, 2.0) for _ in range(999)]
    halves = b"".join(struct.pack("<f", value)[2:] for value in values)
    return [
        slot(0, halves, "BF16", (27, 37)),
        slot(1, struct.pack("<999e", *values), "F16", (27, 37)),
        slot(2, struct.pack("<999f", *values), "F32", (27, 37)),
        slot(3, halves[:62] * 9, "BF16", (9, 31)),
        slot(4, random.Random(4).randbytes(62), "BF16", (31,)),
        slot(5, bytes(62), "F8_E4M3", (62,)),
    ]


def encode(slots: Sequence[Slot], how: Codec = "none", **changes: Any) -> Encoded:
    given: dict[str, Any] = {
        "namespace_json": JSON,
        "kind": "kv",
        "segment": SegmentId(bytes.fromhex("abcdef0123456789")),
        "rank": 1,
        "ranks": 2,
        "codec": how,
        "depth": 192,
        "created_s": 1_700_000_000,
        "writer": "kvstore/0.1.0 host",
    }
    return codec.encode(slots, **given | changes)


def joined(encoded: Encoded) -> bytes:
    return b"".join(encoded.buffers)


def decode(data: bytes) -> list[Decoded]:
    """Every slot of a segment, as the store reads one."""
    header = codec.parse_header(data[: codec.header_length(data)])
    offset = header.part.data_start
    out = []
    for described, size in zip(header.meta.slots, header.part.slot_sizes, strict=True):
        raw = bytearray(described.raw_bytes)
        codec.decode_slot(memoryview(data)[offset : offset + size], described, memoryview(raw))
        out.append((described.key, described.dtype, described.shape, bytes(raw)))
        offset += size
    return out


def plainly(slots: Sequence[Slot]) -> list[Decoded]:
    return [(each.key.hex(), each.dtype, each.shape, bytes(each.data)) for each in slots]


def document(data: bytes) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(data[8 : codec.header_length(data)])
    return loaded


def with_document(value: Any, rest: bytes = b"") -> bytes:
    """A payload whose header is that JSON value, under a right checksum if it has room for one."""
    text = value if isinstance(value, bytes) else json.dumps(value, separators=(",", ":")).encode()
    size = -(-(8 + len(text)) // ALIGN) * ALIGN
    head = (size - 8).to_bytes(8, "little") + text.ljust(size - 8)
    if head[8:].startswith(codec._OPENING):
        head = head[: codec._SEAL] + codec._header_checksum(head) + head[codec._SEAL + 16 :]
    return head + rest


# Golden files


@pytest.mark.parametrize(
    ("how", "slots", "sha256"),
    [
        ("none", small_slots(), "738be2e07d2a7b62a7303086d4c9bb19a989d934e93dce645af7f3f130a6edf1"),
        ("lz4", small_slots(), "a58620959a5043e6e6d8c32a9c2174e85b05718e72ef42743b333e0a28a8536d"),
        ("planes-lz4", float_slots(), "817ef37379b01b068a512c35aa304a7a41d480c5bbd07e01db72dc63c33c194d"),
    ],
    ids=CODECS,
)
def test_golden_segment(how: Codec, slots: list[Slot], sha256: str) -> None:
    """Old segments stay readable, and today's writer makes the same bytes. Else: a new format."""
    stored = (GOLDEN / f"segment-1-{how}.safetensors").read_bytes()
    assert hashlib.sha256(stored).hexdigest() == sha256
    assert decode(stored) == plainly(slots)
    assert joined(encode(slots, how)) == stored


def test_golden_salted_segment() -> None:
    stored = (GOLDEN / "segment-2-salted.safetensors").read_bytes()
    assert (
        hashlib.sha256(stored).hexdigest()
        == "d015a113bbe375c884cb57b116384d17cf190d671f795e36d8cfb1a84606c871"
    )
    assert decode(stored) == plainly(small_slots())
    assert joined(encode(small_slots(), salt=keys.salt_id("tenant-a"))) == stored
    header = codec.parse_header(stored[: codec.header_length(stored)])
    assert (header.meta.format, header.meta.salt) == (2, keys.salt_id("tenant-a").hex())
    assert header.meta.key is None


@pytest.mark.parametrize("how", ["none", "lz4"])
def test_golden_header(how: Codec) -> None:
    data = (GOLDEN / f"segment-1-{how}.safetensors").read_bytes()
    header = codec.parse_header(data, namespace=keys.namespace_id(NAMESPACE))
    meta = header.meta
    assert meta.segment == "abcdef0123456789"
    assert (meta.namespace, meta.namespace_id) == (JSON, keys.namespace_id(NAMESPACE))
    assert (meta.kind, meta.rank, meta.ranks, meta.depth) == ("kv", 1, 2, 192)
    assert (meta.created_s, meta.writer) == (1_700_000_000, "kvstore/0.1.0 host")
    assert (meta.format, meta.codec) == (1, how)
    assert len(header) == 3
    assert header.part == encode(small_slots(), how).part
    assert header.part.nbytes == len(data)


# Layout


@pytest.mark.parametrize("how", CODECS)
def test_round_trip(how: Codec) -> None:
    encoded = encode(small_slots(), how)
    data = joined(encoded)
    assert decode(data) == plainly(small_slots())
    assert encoded.part.data_start == len(encoded.buffers[0]) == codec.header_length(data)
    assert encoded.part.slot_sizes == tuple(view.nbytes for view in encoded.buffers[1:])


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(DTYPE_BYTES)), st.lists(st.integers(0, 4), max_size=4)), min_size=1,
        max_size=6,
    ),
    st.sampled_from(CODECS),
    st.randoms(use_true_random=False),
)  # fmt: skip
def test_any_slots_round_trip(kinds: list[tuple[str, list[int]]], how: Codec, rng: random.Random) -> None:
    slots = []
    for i, (dtype, shape) in enumerate(kinds):
        size = prod(shape) * DTYPE_BYTES[dtype]
        data = rng.randbytes(size) if rng.random() < 0.5 else bytes(size)
        slots.append(slot(i, data, dtype, tuple(shape)))
    assert decode(joined(encode(slots, how))) == plainly(slots)


@pytest.mark.parametrize("count", [1, 2, 64, 1024])
@pytest.mark.parametrize("writer", ["", "w" * 1000, "w" * 4096])
def test_data_starts_on_a_page(count: int, writer: str) -> None:
    encoded = encode([slot(i, b"data") for i in range(count)], writer=writer)
    data = joined(encoded)
    assert encoded.part.data_start % ALIGN == 0
    assert encoded.part.data_start - ALIGN < 8 + len(data[8 : encoded.part.data_start].rstrip(b" "))
    assert data[encoded.part.data_start :] == b"data" * count
    assert encoded.part.data_start < codec.MAX_HEADER
    assert codec.parse_header(data).part == encoded.part


def test_a_default_segments_header_fits_the_first_guess() -> None:
    """What `HEADER_GUESS` is for: the header of a full segment of 64 blocks comes with one read."""
    slots = [slot(i, bytes(64), "BF16", (1, 1, 4, 8)) for i in range(64)]
    assert encode(slots).part.data_start <= codec.HEADER_GUESS


def test_slots_are_not_copied_without_a_codec() -> None:
    data = bytearray(b"x" * 100)
    encoded = encode([slot(0, b"y" * 8), Slot(keys.block_key(block(1)), memoryview(data), "U8", (100,))])
    data[:3] = b"abc"
    assert bytes(encoded.buffers[2][:4]) == b"abcx"


def test_slots_of_any_buffer() -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    given = [
        Slot(keys.block_key(block(0)), memoryview(array), "F32", (3, 4)),
        Slot(keys.block_key(block(1)), memoryview(array.tobytes()).cast("H"), "F32", (12,)),
    ]
    assert [each[3] for each in decode(joined(encode(given)))] == [array.tobytes()] * 2


@pytest.mark.parametrize(
    ("zeros", "used"), [(0, "none"), (64, "none"), (120, "none"), (200, "lz4"), (4096, "lz4")]
)
def test_lz4_is_used_where_it_saves_a_32nd(zeros: int, used: str) -> None:
    data = random.Random(5).randbytes(4096 - zeros) + bytes(zeros)
    encoded = encode([slot(0, data)], "lz4")
    assert codec.parse_header(joined(encoded)).meta.slots[0].codec == used
    assert (encoded.buffers[1].nbytes <= 4096 - 128) == (used == "lz4")
    assert decode(joined(encoded)) == plainly([slot(0, data)])


def test_planes_are_used_where_they_are_the_smallest() -> None:
    encoded = encode(float_slots(), "planes-lz4")
    used = [each.codec for each in codec.parse_header(joined(encoded)).meta.slots]
    assert used == ["planes-lz4", "planes-lz4", "planes-lz4", "lz4", "none", "lz4"]
    for plain, smaller in zip(encode(float_slots(), "lz4").part.slot_sizes, encoded.part.slot_sizes):
        assert smaller <= plain
    ratios = [each.data.nbytes / view.nbytes for each, view in zip(float_slots(), encoded.buffers[1:])]
    assert ratios[0] > 1.3 and ratios[1] > 1.08 and ratios[2] > 1.12


def test_incompressible_slots_are_stored_raw_under_lz4() -> None:
    slots = small_slots()
    encoded = encode(slots, "lz4")
    described = codec.parse_header(joined(encoded)).meta.slots
    assert [each.codec for each in described] == ["lz4", "none", "lz4"]
    assert encoded.buffers[2] == slots[1].data
    assert encoded.buffers[1].nbytes < slots[0].data.nbytes


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: encode([slot(0, b"x" * 10, "U8", (11,))]), "does not fit"),
        (lambda: encode([slot(0, b"x"), slot(0, b"y")]), "twice"),
        (lambda: encode([]), "slots"),
        (lambda: encode([slot(0, b"x")], rank=2), "rank 2, expected less than 2"),
    ],
)
def test_what_makes_no_segment_is_refused(wrong: Callable[[], Any], message: str) -> None:
    with pytest.raises((ValueError, ValidationError), match=message):
        wrong()


# Other readers


@pytest.mark.parametrize("how", CODECS)
def test_safetensors_opens_it_with_numpy(how: Codec, tmp_path: Path) -> None:
    numpy_reader = pytest.importorskip("safetensors.numpy")
    safetensors = pytest.importorskip("safetensors")
    arrays = [
        np.arange(24, dtype=dtype).reshape(2, 3, 4)
        for dtype in (np.uint8, np.int16, np.float16, np.float32, np.float64)
    ]
    names = ["U8", "I16", "F16", "F32", "F64"]
    slots = [
        slot(i, array.tobytes(), name, array.shape)
        for i, (array, name) in enumerate(zip(arrays, names, strict=True))
    ]
    encoded = encode(slots, how)
    path = tmp_path / "segment.safetensors"
    path.write_bytes(joined(encoded))

    loaded = numpy_reader.load_file(path)
    assert set(loaded) == {each.key.hex() for each in slots}
    for array, each, view in zip(arrays, slots, encoded.buffers[1:], strict=True):
        got = loaded[each.key.hex()]
        if view.nbytes == array.nbytes:
            assert got.dtype == array.dtype
            assert np.array_equal(got, array)
        else:
            assert got.dtype == np.uint8
            assert got.tobytes() == view

    with safetensors.safe_open(path, framework="np") as file:
        metadata = file.metadata()
    assert metadata["namespace"] == JSON
    assert metadata["segment"] == "abcdef0123456789"
    assert [each["key"] for each in json.loads(metadata["slots"])] == [each.key.hex() for each in slots]


def test_safetensors_opens_planes_as_bytes() -> None:
    safetensors = pytest.importorskip("safetensors")
    encoded = encode(float_slots()[:3], "planes-lz4")
    with safetensors.safe_open(GOLDEN / "segment-1-planes-lz4.safetensors", framework="np") as file:
        for each, view in zip(float_slots(), encoded.buffers[1:]):
            got = file.get_tensor(each.key.hex())
            assert (got.dtype, got.shape) == (np.uint8, (view.nbytes,))
            assert got.tobytes() == view


def test_safetensors_opens_it_with_torch(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch_reader = pytest.importorskip("safetensors.torch")
    tensors = [
        torch.arange(64, dtype=torch.float32).to(dtype).reshape(2, 1, 4, 8)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2, torch.float32)
    ]
    names = ["BF16", "F8_E4M3", "F8_E5M2", "F32"]
    slots = [
        slot(i, bytes(tensor.view(torch.uint8).numpy()), name, tuple(tensor.shape))
        for i, (tensor, name) in enumerate(zip(tensors, names, strict=True))
    ]
    path = tmp_path / "segment.safetensors"
    path.write_bytes(joined(encode(slots)))
    loaded = torch_reader.load_file(path)
    for tensor, each in zip(tensors, slots, strict=True):
        got = loaded[each.key.hex()]
        assert got.dtype == tensor.dtype
        assert torch.equal(got.view(torch.uint8), tensor.view(torch.uint8))


# Damage


def is_detected(damaged: bytes) -> bool:
    try:
        decode(damaged)
    except CorruptPayload:
        return True
    return False


@pytest.mark.parametrize("how", CODECS)
def test_every_flipped_byte_is_detected(how: Codec) -> None:
    data = joined(encode(small_slots(), how))
    start = codec.header_length(data)
    specials = {ord(c) for c in '"\\,:[]{} 0123456789abcdefeE+-.\n'}
    damaged = bytearray(data)
    for position, old in enumerate(data):
        # Every bit, all bits, and what JSON gives a meaning to.
        values = {old ^ (1 << bit) for bit in range(8)} | {old ^ 0xFF}
        if position < start:
            values |= specials - {old}
        for value in values:
            damaged[position] = value
            assert is_detected(bytes(damaged)), (position, old, value)
        damaged[position] = old
    assert decode(bytes(damaged)) == plainly(small_slots())


@pytest.mark.parametrize(
    "field", ["segment", "kind", "rank", "ranks", "codec", "depth", "created_s", "writer"]
)
def test_what_describes_the_segment_is_checked_too(field: str) -> None:
    """No slot's checksum covers these, and an index is rebuilt from them."""
    data = joined(encode(small_slots()))
    loaded = document(data)
    value = loaded["__metadata__"][field]
    changed = data.replace(
        json.dumps({field: value}, separators=(",", ":"))[1:-1].encode(),
        json.dumps({field: value[:-1] + "8"}, separators=(",", ":"))[1:-1].encode(),
    )
    assert len(changed) == len(data)
    assert changed != data
    with pytest.raises(CorruptPayload, match="header"):
        codec.parse_header(changed)


@pytest.mark.parametrize("how", CODECS)
def test_a_truncated_segment_is_detected_at_every_length(how: Codec) -> None:
    data = joined(encode(small_slots(), how))
    for length in range(len(data)):
        with pytest.raises(CorruptPayload):
            decode(data[:length])


def test_a_truncated_header_is_called_that() -> None:
    with pytest.raises(CorruptPayload, match="truncated at 4000 of 4096"):
        codec.parse_header(joined(encode(small_slots()))[:4000])


def test_a_namespace_that_is_not_ascii_is_damage() -> None:
    loaded = document(joined(encode(small_slots())))
    loaded["__metadata__"]["namespace"] = JSON.replace("tiny", "tin\u00ff")
    with pytest.raises(CorruptPayload, match="namespace"):
        codec.parse_header(with_document(loaded))


def test_swapped_slots_are_detected() -> None:
    one, two = random.Random(1).randbytes(64), random.Random(2).randbytes(64)
    data = joined(encode([slot(0, one), slot(1, two)]))
    start = codec.header_length(data)
    with pytest.raises(CorruptPayload, match="checksum"):
        decode(data[:start] + two + one)


@pytest.mark.parametrize(("field", "value"), [("dtype", "F16"), ("shape", (32, 2)), ("codec", "lz4")])
def test_the_checksum_covers_the_description(field: str, value: Any) -> None:
    data = joined(encode([slot(0, random.Random(1).randbytes(128), "BF16", (64,))]))
    start = codec.header_length(data)
    described = codec.parse_header(data).meta.slots[0]
    codec.decode_slot(memoryview(data)[start:], described, None)
    with pytest.raises(CorruptPayload, match="checksum"):
        codec.decode_slot(memoryview(data)[start:], described.model_copy(update={field: value}), None)


def test_another_namespace_is_told_apart_from_damage() -> None:
    data = joined(encode(small_slots()))
    with pytest.raises(NamespaceMismatch, match="expected 0123456789abcdef"):
        codec.parse_header(data, namespace=NamespaceId("0123456789abcdef"))


def test_a_namespace_that_is_not_its_id_is_damage() -> None:
    loaded = document(joined(encode(small_slots())))
    loaded["__metadata__"]["namespace"] = JSON.replace("tiny", "tinz")
    with pytest.raises(CorruptPayload, match="namespace") as caught:
        codec.parse_header(with_document(loaded), namespace=keys.namespace_id(NAMESPACE))
    assert not isinstance(caught.value, NamespaceMismatch)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("dtype", "F16"),
        ("shape", [64]),
        ("data_offsets", [0, 127]),
        ("data_offsets", [1, 129]),
        ("data_offsets", [0, 128, 0]),
        ("data_offsets", [-1, 127]),
        ("data_offsets", [0, True]),
        ("data_offsets", [0, 128.0]),
        ("data_offsets", "ab"),
        ("data_offsets", {"0": 0, "1": 128}),
        ("more", 1),
    ],
)
def test_a_tensor_that_differs_from_its_slot_is_damage(field: str, value: Any) -> None:
    """Or this reader and a standard one would see different things in one file."""
    loaded = document(joined(encode(small_slots())))
    loaded[keys.block_key(block(0)).hex()][field] = value
    with pytest.raises(CorruptPayload, match="tensor"):
        codec.parse_header(with_document(loaded))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("key", "00" * 17),
        ("key", "0" * 37),
        ("key", "00" * 67),
        ("key", "G0" * 18),
        ("shape", [-2, -1, 4, 8]),
        ("shape", [2, 1, 4, 9]),
        ("dtype", "BF17"),
        ("raw_bytes", 127),
        ("raw_bytes", 1 << 70),
        ("codec", "zstd"),
        ("xxh3", "0"),
        ("more", 1),
    ],
)
def test_a_slot_that_makes_no_sense_is_damage(field: str, value: Any) -> None:
    loaded = document(joined(encode(small_slots())))
    slots = json.loads(loaded["__metadata__"]["slots"])
    name = slots[0]["key"]
    slots[0][field] = value
    loaded["__metadata__"]["slots"] = json.dumps(slots)
    loaded = {slots[0]["key"] if key == name else key: entry for key, entry in loaded.items()}
    with pytest.raises(CorruptPayload, match=r"makes no sense|tensor"):
        codec.parse_header(with_document(loaded))


def test_planes_of_a_dtype_that_has_none_are_damage() -> None:
    loaded = document(joined(encode(float_slots(), "planes-lz4")))
    slots = json.loads(loaded["__metadata__"]["slots"])
    assert (slots[0]["codec"], slots[0]["dtype"]) == ("planes-lz4", "BF16")
    loaded["__metadata__"]["slots"] = json.dumps([slots[0] | {"dtype": "I16"}, *slots[1:]])
    with pytest.raises(CorruptPayload, match="tensor"):
        codec.parse_header(with_document(loaded))


def test_tensors_are_the_slots_in_their_order() -> None:
    loaded = document(joined(encode(small_slots())))
    metadata, *tensors = loaded.items()
    assert parse(with_document(dict([metadata, *tensors]))) is not None
    assert parse(with_document(dict([metadata, *reversed(tensors)]))) is None
    assert parse(with_document(dict([metadata, *tensors[:-1]]))) is None
    more = ("00" * 34, {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]})
    assert parse(with_document(dict([metadata, *tensors, more]))) is None


def test_data_that_starts_inside_a_page_is_damage() -> None:
    """Everything else about this header is right."""
    data = joined(encode(small_slots()))
    text = data[8 : codec.header_length(data)] + b" " * 8
    head = len(text).to_bytes(8, "little") + text
    head = head[: codec._SEAL] + codec._header_checksum(head) + head[codec._SEAL + 16 :]
    with pytest.raises(CorruptPayload, match="impossible header length"):
        codec.parse_header(head)


def test_lz4_that_does_not_decompress_is_damage() -> None:
    """Its checksum is right: only a broken or hostile writer makes this."""
    for stored in (b"\xff" * 20, b"\x00", b"\x10x"):
        described = codec.parse_header(joined(encode(small_slots(), "lz4"))).meta.slots[0]
        checksum = codec.slot_checksum(stored, described.key, "lz4", described.dtype, described.shape)
        hostile = described.model_copy(update={"xxh3": checksum})
        with pytest.raises(CorruptPayload, match="decompress"):
            codec.decode_slot(memoryview(stored), hostile, memoryview(bytearray(128)))


@pytest.mark.parametrize("how", CODECS)
def test_a_buffer_of_the_wrong_size_is_refused(how: Codec) -> None:
    encoded = encode(small_slots(), how)
    described = codec.parse_header(joined(encoded)).meta.slots[0]
    for size in (0, 127, 129):
        with pytest.raises(CorruptPayload, match="is 128 bytes"):
            codec.decode_slot(encoded.buffers[1], described, memoryview(bytearray(size)))


# Fuzz: whatever the bytes, parse_header returns a header or raises CorruptPayload.


def parse(data: bytes) -> Header | None:
    try:
        return codec.parse_header(data)
    except (CorruptPayload, NewerFormat):
        return None


VALID = joined(encode(small_slots(), "lz4"))
DOCUMENT = document(VALID)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)


def with_metadata(metadata: dict[str, Any], **tensors: Any) -> bytes:
    """The valid segment with another `__metadata__`, rightly checksummed, and changed tensors."""
    return with_document(DOCUMENT | tensors | {"__metadata__": {"xxh3": "0" * 16} | metadata})


@given(st.binary(max_size=64))
def test_fuzz_bytes(data: bytes) -> None:
    assert parse(data) is None


@given(st.binary(max_size=ALIGN - 200))
@example(b"".ljust(ALIGN - 200, b"["))
@example(b'"slots":"' + b"[" * 3000 + b'"}}')
@example(b'"slots":"' + b"9" * 3000 + b'"}}')
@example(b'"slots":' + b"9" * 3000 + b"}}")
@example(b'"format":"\xff"}}')
@example(b"}")
@example(b"}}")
def test_fuzz_headers_that_begin_well(text: bytes) -> None:
    assert parse(with_document(codec._OPENING + codec._ZEROS + b'",' + text)) is None
    assert parse(with_document(codec._OPENING + codec._ZEROS + b'"' + text)) is None
    assert parse(with_document(codec._OPENING + text)) is None
    assert parse(with_document(text)) is None


@pytest.mark.parametrize("nbytes", [codec.MAX_HEADER - 2 * ALIGN, (4 << 20) - 2 * ALIGN])
@pytest.mark.parametrize("what", hostile.HOSTILE)
def test_no_header_takes_long(what: str, nbytes: int) -> None:
    """Its reader would hold the interpreter's lock, and with it every thread of an engine or a janitor.

    Counted is this thread's own time on the CPU: some of these took more than a minute, none takes half a
    second now.
    """
    slots, tensors, more = hostile.HOSTILE[what](nbytes)
    header = hostile.header(JSON, keys.namespace_id(NAMESPACE), slots, tensors, more)
    began = time.thread_time()
    assert parse(header) is None
    assert time.thread_time() - began < 5


def test_a_header_of_the_most_slots_is_read() -> None:
    """The bounds are above all that a writer makes, with the longest keys and the most dimensions."""
    content = memoryview(bytes(1))
    made = [Slot(keys.ContentKey(i.to_bytes(66, "big")), content, "U8", (1,) * 8) for i in range(MAX_SLOTS)]
    assert len(codec.parse_header(encode(made).buffers[0])) == MAX_SLOTS


def test_deep_nesting_is_damage() -> None:
    assert parse(with_metadata({"slots": "[" * 1_000_000})) is None
    assert parse(with_document(codec._OPENING + codec._ZEROS + b'","x":' + b"[" * 1_000_000)) is None


@given(json_values)
def test_fuzz_json(value: Any) -> None:
    assert parse(with_document(value)) is None
    assert parse(with_document({"__metadata__": value})) is None
    assert parse(with_document({"__metadata__": {"xxh3": "0" * 16, "more": value}})) is None
    assert parse(with_document({"__metadata__": {"xxh3": "0" * 16}, "more": value})) is None


@given(st.sampled_from(sorted(set(DOCUMENT["__metadata__"]) - {"xxh3"})), json_values, st.booleans())
def test_fuzz_one_field_of_the_metadata(field: str, value: Any, as_text: bool) -> None:
    parse(with_metadata(DOCUMENT["__metadata__"] | {field: json.dumps(value) if as_text else value}))


@given(
    st.sampled_from(["key", "codec", "dtype", "shape", "raw_bytes", "xxh3"]),
    json_values | st.lists(st.integers(-9, 9), max_size=5),
)
def test_fuzz_one_field_of_a_slot(field: str, value: Any) -> None:
    slots = json.loads(DOCUMENT["__metadata__"]["slots"])
    slots[1][field] = value
    parse(with_metadata(DOCUMENT["__metadata__"] | {"slots": json.dumps(slots)}))


@given(st.sampled_from(["dtype", "shape", "data_offsets"]), json_values)
def test_fuzz_one_field_of_a_tensor(field: str, value: Any) -> None:
    name = keys.block_key(block(1)).hex()
    parse(with_metadata(DOCUMENT["__metadata__"], **{name: DOCUMENT[name] | {field: value}}))
    assert parse(with_metadata(DOCUMENT["__metadata__"], **{name: value})) is None


def test_the_fuzzed_document_is_valid_unchanged() -> None:
    """Or the tests above would pass for the wrong reason."""
    assert parse(with_metadata(DOCUMENT["__metadata__"])) == codec.parse_header(VALID)


@given(st.lists(st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_fuzz_several_changed_bytes(changes: list[tuple[int, int]]) -> None:
    damaged = bytearray(VALID)
    for position, value in changes:
        damaged[position] = value
    assert is_detected(bytes(damaged)) == (damaged != VALID)


@given(st.integers(0, 2**64 - 1))
def test_fuzz_the_length(length: int) -> None:
    data = length.to_bytes(8, "little") + VALID[8:]
    assert (parse(data) is None) == (data != VALID)


@pytest.mark.parametrize("form", [bytes, bytearray, memoryview])
def test_headers_may_be_any_buffer(form: Callable[[bytes], Any]) -> None:
    assert codec.parse_header(form(VALID)).meta == codec.parse_header(VALID).meta
    assert codec.header_length(form(VALID)) == ALIGN
