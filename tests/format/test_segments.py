"""Segments: what kvstore wrote, read by the second implementation, and the other way round."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from connectors.engine.weights_digest import weights_digest
from kvstore.errors import CorruptPayload
from kvstore.format import segment as codec
from kvstore.format.segment import Slot
from kvstore.keys import (
    NO_SALT,
    ContentKey,
    NamespaceId,
    SaltId,
    SegmentId,
    canonical_json,
    namespace_id,
    payload_name,
    salt_id,
)
from kvstore.rules.hashing import block_hashes
from kvstore.verify.headers import record_of
from schemas.namespace import Namespace
from schemas.records import CODECS, Codec, pack_record, rounded_cost
from tests.format import second
from tests.format.world import NOW_S, SHAPES, content, ec, kv, path
from tests.store.world import item

SEGMENT = SegmentId(bytes.fromhex("00ff1020a0b0c0d0"))


def slots(namespace: Namespace, count: int, rank: int = 0) -> list[Slot]:
    dtype = namespace.groups[0].dtype
    return [
        Slot(
            ContentKey(second.block_key(one)),
            memoryview(content(one, rank, dtype, SHAPES[dtype])),
            dtype,
            SHAPES[dtype],
        )
        for one in path("s", count)
    ]


salts = pytest.mark.parametrize("salt", [NO_SALT, salt_id("pepper")], ids=["unsalted", "salted"])


def encoded(
    namespace: Namespace, made: Sequence[Slot], rank: int = 0, ranks: int = 1, salt: SaltId = NO_SALT
) -> bytes:
    out = codec.encode(
        made,
        namespace_json=canonical_json(namespace),
        kind=namespace.kind,
        segment=SEGMENT,
        rank=rank,
        ranks=ranks,
        codec=namespace.codec,
        depth=7,
        created_s=NOW_S,
        writer="ours",
        cost_us=rounded_cost(123_456_789),
        salt=salt,
    )
    return b"".join(out.buffers)


@pytest.mark.parametrize("how", CODECS)
@pytest.mark.parametrize("dtype", SHAPES)
@salts
def test_ours_is_read(how: Codec, dtype: str, salt: SaltId) -> None:
    namespace, ranks = kv(how, dtype=dtype, shards=2), 2
    headers = []
    for rank in range(ranks):
        made = slots(namespace, 40, rank)
        data = encoded(namespace, made, rank, ranks, salt)
        header = second.read_header(data, namespace=second.namespace_id(canonical_json(namespace)))
        assert header.nbytes == len(data)
        raws = [second.decode(data[slot.start : slot.end], slot) for slot in header.slots]
        assert raws == [bytes(slot.data) for slot in made]
        assert [slot.key for slot in header.slots] == [slot.key for slot in made]
        headers.append(header)
    used = {slot.codec for header in headers for slot in header.slots}
    assert used == {"none": {"none"}, "lz4": {"none", "lz4"}, "planes-lz4": {"lz4", "planes-lz4"}}[how]
    # The record that both make of the headers is one.
    theirs = second.record_of(headers)
    assert theirs.salt == salt
    packed = second.pack_head(theirs, ranks) + second.pack_parts(theirs)
    ours = record_of(
        [codec.parse_header(encoded(namespace, slots(namespace, 40, r), r, ranks, salt)) for r in (0, 1)]
    )
    assert packed == pack_record(ours)
    assert second.unpack_record(packed) == theirs


@pytest.mark.parametrize("how", CODECS)
@pytest.mark.parametrize("dtype", SHAPES)
@salts
def test_theirs_is_read(how: Codec, dtype: str, salt: SaltId) -> None:
    namespace = kv(how, dtype=dtype)
    tensors = [
        second.Tensor(second.block_key(one, 1), dtype, SHAPES[dtype], content(one, 0, dtype, SHAPES[dtype]))
        for one in path("s", 40)
    ]
    data = second.write_segment(
        tensors, namespace=canonical_json(namespace), segment=SEGMENT, created_s=NOW_S, depth=3, salt=salt
    )
    header = codec.parse_header(data, namespace=namespace_id(namespace))
    assert record_of([header]).salt == salt
    assert header.meta.format == (2 if salt else 1)
    offset, used = header.part.data_start, set()
    for tensor, slot, size in zip(tensors, header.meta.slots, header.part.slot_sizes, strict=True):
        raw = bytearray(slot.raw_bytes)
        codec.decode_slot(memoryview(data)[offset : offset + size], slot, memoryview(raw))
        assert raw == tensor.raw
        offset += size
        used.add(slot.codec)
    assert offset == len(data)
    assert how in used


def test_items_with_any_identifier_and_empty_ones() -> None:
    namespace = ec("lz4")
    for identifier in ("", "../../x", "\udc80\u2028", "x" * 10_000):
        for shape in ((0, 8), (3, 8)):
            key = item(identifier)
            tensor = second.Tensor(key, "F32", shape, bytes(4 * shape[0] * shape[1]))
            data = second.write_segment(
                [tensor], namespace=canonical_json(namespace), segment=SEGMENT, created_s=1
            )
            assert codec.parse_header(data).meta == codec.parse_header(data).meta
            (slot,) = second.read_header(data).slots
            assert second.decode(data[slot.start : slot.end], slot) == tensor.raw


def test_whatever_bit_is_flipped_both_notice() -> None:
    namespace = kv("planes-lz4")
    data = encoded(namespace, slots(namespace, 3), salt=salt_id("pepper"))
    length = second.read_header(data).data_start
    text = len(data[:length].rstrip(b" "))
    places = [*range(0, text, 37), *range(text, length, 500), *range(length, len(data), 23)]
    for place in places:
        bad = bytearray(data)
        bad[place] ^= 1 << place % 8
        with pytest.raises(Exception):
            header = second.read_header(bytes(bad))
            for slot in header.slots:
                second.decode(bytes(bad[slot.start : slot.end]), slot)
        with pytest.raises(CorruptPayload):
            ours = codec.parse_header(bytes(bad))
            offset = ours.part.data_start
            for slot, size in zip(ours.meta.slots, ours.part.slot_sizes, strict=True):
                codec.decode_slot(memoryview(bad)[offset : offset + size], slot, None)
                offset += size


def test_names_and_ids() -> None:
    for namespace in (kv(), kv(shards=2), ec(), kv(model='\x00\x7f/\\"\u0080\U0010ffff')):
        text = canonical_json(namespace)
        assert second.canonical(json.loads(text)) == text
        assert second.namespace_id(text) == namespace_id(namespace)
    name = NamespaceId("0123456789abcdef")
    assert second.payload_name(name, SEGMENT, 254) == payload_name(name, SEGMENT, 254)
    for salt in ("", "a", "tenant-\u00e9\U0001f600", "\udc80", "x" * 10_000):
        assert second.salt_id(salt) == salt_id(salt)
        assert len(salt_id(salt)) == (16 if salt else 0)


@pytest.mark.parametrize("salt", ["", "pepper"])
def test_block_hashes(salt: str) -> None:
    tokens = [0, 23, 24, 255, 256, 65535, 65536, 1 << 32, *range(100)]
    ours = block_hashes(tokens, algorithm="sha256_cbor", block_tokens=16, seed="42", salt=salt)
    assert second.chain(tokens, 16, "42", salt) == ours


def test_digest_of_weights(tmp_path: Path) -> None:
    data = second.write_segment(
        [second.Tensor(item(str(i)), "U8", (i,), bytes(range(i))) for i in (0, 3, 63, 64, 65, 200)],
        namespace=canonical_json(ec()),
        segment=SEGMENT,
        created_s=1,
    )
    (tmp_path / "model-2.safetensors").write_bytes(data)
    (tmp_path / "model-10.safetensors").write_bytes(data[:-1] + b"x")
    (tmp_path / "extra.bin").write_bytes(bytes(range(256)) * 50)
    (tmp_path / "tiny.pt").write_bytes(b"short")
    (tmp_path / "config.json").write_bytes(b"{}")
    assert second.weights_digest(tmp_path) == weights_digest(tmp_path)
