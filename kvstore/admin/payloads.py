"""Payloads read and verified outside of a request: headers, slots, whole payloads."""

from __future__ import annotations

from collections.abc import Sequence

from kvstore import codec
from kvstore.errors import CorruptPayload
from kvstore.keys import NamespaceId, SegmentId, payload_name
from kvstore.ports import PayloadStore
from schemas.records import PartRecord, SegmentRecord
from schemas.segment import SlotMeta

#: No codec makes less than a 256th of a slot.
_MOST = 256


def read_header(
    payloads: PayloadStore, name: str, nbytes: int, namespace: NamespaceId | None = None
) -> codec.Header:
    """The header of a payload of `nbytes` bytes. Raises CorruptPayload and what the store raises."""
    start = read_bytes(payloads, name, 0, min(codec.HEADER_GUESS, nbytes))
    length = codec.header_length(start)
    if length > len(start):
        # Longer than the payload: parse_header says that it is truncated.
        start = read_bytes(payloads, name, 0, min(length, nbytes))
    return codec.parse_header(start, namespace=namespace)


def read_bytes(payloads: PayloadStore, name: str, offset: int, nbytes: int) -> memoryview:
    """Up to `nbytes` bytes, fewer where the payload ends. Raises CorruptPayload if it is gone."""
    data = memoryview(bytearray(nbytes))
    count = payloads.read(name, offset, [data])
    if count is None:
        raise CorruptPayload("the payload has just been deleted")
    return data[:count]


def read_part(
    payloads: PayloadStore,
    namespace: NamespaceId,
    segment: SegmentId,
    rank: int,
    record: SegmentRecord,
    buffer: memoryview,
) -> codec.Header:
    """Read one whole payload into `buffer` (of the size that the index says) and verify all of it.

    Raises CorruptPayload if it isn't what its name and the index promise, and what the store raises.
    """
    part = record.parts[rank]
    got = payloads.read(payload_name(namespace, segment, rank), 0, [buffer], size=part.nbytes)
    if got is None:
        raise CorruptPayload(f"the payload of rank {rank} is missing")
    if got != part.nbytes:
        raise CorruptPayload(f"the payload of rank {rank} has {got} bytes, the index says {part.nbytes}")
    header = codec.parse_header(buffer, namespace=namespace)
    check_name(header, namespace, segment, rank)
    if header.part != part or header.meta.ranks != len(record.parts):
        raise CorruptPayload(f"header and index disagree on the layout of rank {rank}")
    check_slots(header, buffer[part.data_start :], decompress=False)
    return header


def check_name(header: codec.Header, namespace: NamespaceId, segment: SegmentId, rank: int) -> None:
    """Whether a header belongs under this name. Raises CorruptPayload."""
    meta = header.meta
    if (meta.namespace_id, meta.segment, meta.rank) != (namespace, segment.hex(), rank):
        own = payload_name(NamespaceId(meta.namespace_id), SegmentId(bytes.fromhex(meta.segment)), meta.rank)
        raise CorruptPayload(f"it is the payload {own} by its header")


def check_slots(header: codec.Header, data: memoryview, *, decompress: bool) -> None:
    """Verify every slot of `data`, which is all that follows the header. Raises CorruptPayload."""
    offset = 0
    for slot, size in zip(header.meta.slots, header.part.slot_sizes, strict=True):
        check_slot(data[offset : offset + size], slot, decompress=decompress)
        offset += size


def check_slot(stored: memoryview, slot: SlotMeta, *, decompress: bool) -> None:
    """Verify one slot's stored bytes. Raises CorruptPayload."""
    # Memory for the decompressed bytes only after the checksum has vouched for their number, and only
    # as much as these bytes can decompress to: a hostile payload has good checksums as well.
    codec.decode_slot(stored, slot, None)
    if decompress and slot.codec != "none":
        if slot.raw_bytes > _MOST * stored.nbytes:
            raise CorruptPayload(f"slot {slot.key[:16]}... can't decompress to {slot.raw_bytes} bytes")
        codec.decode_slot(stored, slot, memoryview(bytearray(slot.raw_bytes)))


def are_there(
    payloads: PayloadStore, namespace: NamespaceId, segment: SegmentId, parts: Sequence[PartRecord]
) -> bool:
    """Whether every rank's payload exists and has the size that the index says, by a read of two bytes."""
    for rank, part in enumerate(parts):
        # Of two bytes from the last one on there is one.
        last = memoryview(bytearray(2))
        if payloads.read(payload_name(namespace, segment, rank), part.nbytes - 1, [last]) != 1:
            return False
    return True
