"""Which slots of a payload are read together, and how one that has changed meanwhile is found out."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import CorruptPayload
from kvstore.format.segment import Header, Slot, encode, parse_header
from kvstore.keys import SegmentId, block_key, canonical_json, namespace_id_of_json, payload_name
from kvstore.payloads.memory import MemoryPayloads
from kvstore.verify.payloads import batches, read_slots, verify_slots
from schemas.namespace import Namespace

NAMESPACE = canonical_json(Namespace(kind="ec", model="m", weights="w", dtype="float32"))
SEGMENT = SegmentId(bytes(8))
NAME = payload_name(namespace_id_of_json(NAMESPACE), SEGMENT, 0)


@pytest.fixture
def payloads(request: pytest.FixtureRequest) -> MemoryPayloads:
    return MemoryPayloads(request.node.name)


def put(payloads: MemoryPayloads, *, cut: int = 0, flip: int | None = None) -> Header:
    """A payload of four slots of 8 bytes, without its last `cut` bytes, or with one changed."""
    slots = [Slot(block_key(bytes([i]) * 32), memoryview(bytes([i]) * 8), "U8", (8,)) for i in range(4)]
    made = encode(
        slots, namespace_json=NAMESPACE, kind="ec", segment=SEGMENT, rank=0, ranks=1,
        codec="none", depth=0, created_s=1, writer="test",
    )  # fmt: skip
    data = bytearray(b"".join(made.buffers))
    header = parse_header(bytes(data))
    if flip is not None:
        data[flip] ^= 1
    payloads.put(NAME, [memoryview(data)[: len(data) - cut]])
    return header


@given(sizes=st.lists(st.integers(0, 50), max_size=30), most=st.integers(1, 60))
def test_batches_are_as_large_as_allowed(sizes: list[int], most: int) -> None:
    found = list(batches(sizes, most))
    assert sum(found) == len(sizes)
    first = 0
    for count in found:
        assert count >= 1
        nbytes = sum(sizes[first : first + count])
        assert nbytes <= most or count == 1
        first += count
        if first < len(sizes):
            assert nbytes + sizes[first] > most


@pytest.mark.parametrize(("most", "reads"), [(7, [8, 8, 8, 8]), (16, [16, 16]), (24, [24, 8]), (99, [32])])
def test_every_slot_is_read_once_and_each_read_is_announced(
    payloads: MemoryPayloads, most: int, reads: list[int]
) -> None:
    header, announced = put(payloads), []
    found = read_slots(payloads, NAME, header, most=most, before=announced.append)
    assert [bytes(data) for _, data in found] == [bytes([i]) * 8 for i in range(4)]
    assert announced == reads


def test_a_slot_that_has_changed_is_found(payloads: MemoryPayloads) -> None:
    verify_slots(payloads, NAME, put(payloads))
    with pytest.raises(CorruptPayload, match="checksum of slot 0303"):
        verify_slots(payloads, NAME, put(payloads, flip=-1))


@pytest.mark.parametrize("most", [8, 99])
def test_a_payload_that_ends_early_yields_what_there_is_and_is_corrupt(
    payloads: MemoryPayloads, most: int
) -> None:
    header = put(payloads, cut=12)
    assert [data.nbytes for _, data in read_slots(payloads, NAME, header, most=most)] == [8, 8, 4, 0]
    with pytest.raises(CorruptPayload, match=f"ends at byte {header.part.nbytes - 12}$"):
        verify_slots(payloads, NAME, header, most=most)


def test_a_payload_that_is_gone_is_corrupt(payloads: MemoryPayloads) -> None:
    header = put(payloads)
    payloads.delete([NAME])
    with pytest.raises(CorruptPayload, match="deleted"):
        verify_slots(payloads, NAME, header)
