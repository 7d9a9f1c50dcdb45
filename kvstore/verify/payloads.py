"""Payloads read and verified outside of a request: headers, slots, whole payloads.

Requests read by kvstore.store.reading instead: straight into their buffers, header and slots at once, and
only the bytes that they need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvstore.errors import CorruptPayload, PayloadMissing
from kvstore.format import lz4
from kvstore.format import segment as codec
from kvstore.format.keyring import Keyring
from kvstore.keys import NamespaceId, SegmentId, payload_name
from kvstore.payloads.port import PayloadStore
from schemas.records import PartRecord, SegmentRecord
from schemas.segment import SlotMeta

#: Most bytes of slots read together, so that a bucket is asked once for tens of slots, not for each.
_TOGETHER = 32 << 20


def read_header(
    payloads: PayloadStore, keyring: Keyring, name: str, nbytes: int, namespace: NamespaceId | None = None
) -> codec.Header:
    """Returns the header of a payload of `nbytes` bytes.

    Raises CorruptPayload, UnreadablePayload and what the store raises.
    """
    start = read_bytes(payloads, name, 0, min(codec.HEADER_GUESS, nbytes))
    length = codec.header_length(start)
    if length > len(start):
        # Longer than the payload: parse_header says that it is truncated.
        start = read_bytes(payloads, name, 0, min(length, nbytes))
    return codec.parse_header(start, namespace=namespace, keyring=keyring)


def read_bytes(payloads: PayloadStore, name: str, offset: int, nbytes: int) -> memoryview:
    """Returns `nbytes` bytes, or fewer if the payload ends before. Raises CorruptPayload if it is gone, and
    what the store raises.
    """
    data = memoryview(bytearray(nbytes))
    count = payloads.read(name, offset, [data])
    if count is None:
        raise CorruptPayload("the payload has just been deleted")
    return data[:count]


def read_part(
    payloads: PayloadStore,
    keyring: Keyring,
    namespace: NamespaceId,
    segment: SegmentId,
    rank: int,
    record: SegmentRecord,
    buffer: memoryview,
) -> codec.Header:
    """Reads one whole payload into `buffer` (of the size that the index says) and verifies all of it.

    Raises CorruptPayload if it isn't what its name and the index promise, UnreadablePayload if that can't be
    told here, and what the store raises.
    """
    part = record.parts[rank]
    got = payloads.read(payload_name(namespace, segment, rank), 0, [buffer], size=part.nbytes)
    if got is None:
        raise PayloadMissing(f"the payload of rank {rank} is missing")
    if got != part.nbytes:
        raise CorruptPayload(f"the payload of rank {rank} has {got} bytes, the index says {part.nbytes}")
    header = codec.parse_header(buffer, namespace=namespace, keyring=keyring)
    _check_promised(header, namespace, segment, rank, record)
    check_slots(header, buffer[part.data_start :], decompress=False)
    return header


def promised_header(
    payloads: PayloadStore,
    keyring: Keyring,
    namespace: NamespaceId,
    segment: SegmentId,
    rank: int,
    record: SegmentRecord,
) -> codec.Header:
    """Returns the header of a payload whose name, size and layout are what the index says.

    Raises CorruptPayload if they aren't, UnreadablePayload if that can't be told here, and what the store
    raises.
    """
    part, name = record.parts[rank], payload_name(namespace, segment, rank)
    # Before memory is taken for the size that the index says: a read of two bytes from the last one on must
    # bring one.
    end = payloads.read(name, max(0, part.nbytes - 1), [memoryview(bytearray(2))])
    if end is None:
        raise PayloadMissing(f"the payload of rank {rank} is missing")
    if end != 1:
        raise CorruptPayload(
            f"the payload of rank {rank} is {'longer' if end else 'shorter'} than the index says"
        )
    header = read_header(payloads, keyring, name, part.nbytes, namespace)
    _check_promised(header, namespace, segment, rank, record)
    return header


def read_slots(
    payloads: PayloadStore,
    name: str,
    header: codec.Header,
    *,
    stored: int | None = None,
    most: int = _TOGETHER,
    before: Callable[[int], None] = lambda nbytes: None,
) -> Iterator[tuple[SlotMeta, memoryview]]:
    """Yields every slot with its stored bytes: not verified, and too few if the payload ends before.

    `stored` is the payload's real size, where the header's word for it has not been checked: no memory is
    taken for what lies beyond.

    Slots are read together up to `most` bytes, a larger one by itself. `before` is called before each read
    with the number of bytes that it asks for. Raises CorruptPayload if the payload is gone, and what the
    store raises.
    """
    sizes, first, offset = header.part.slot_sizes, 0, header.part.data_start
    for count in batches(sizes, most):
        nbytes = sum(sizes[first : first + count])
        before(nbytes)
        there = nbytes if stored is None else max(0, min(nbytes, stored - offset))
        data, at = read_bytes(payloads, name, offset, there), 0
        for slot, size in zip(
            header.meta.slots[first : first + count], sizes[first : first + count], strict=True
        ):
            yield slot, data[at : at + size]
            at += size
        first, offset = first + count, offset + nbytes


def batches(sizes: Sequence[int], most: int) -> Iterator[int]:
    """Yields how many neighbours are read together, up to `most` bytes; a larger one is read by itself."""
    count = nbytes = 0
    for size in sizes:
        if count and nbytes + size > most:
            yield count
            count = nbytes = 0
        count, nbytes = count + 1, nbytes + size
    if count:
        yield count


def verify_slots(
    payloads: PayloadStore,
    name: str,
    header: codec.Header,
    *,
    most: int = _TOGETHER,
    before: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Verifies every slot, read by `read_slots`. Raises CorruptPayload and what the store raises."""
    end = header.part.data_start
    slots = read_slots(payloads, name, header, most=most, before=before)
    for number, ((_, data), size) in enumerate(zip(slots, header.part.slot_sizes, strict=True)):
        if data.nbytes < size:
            raise CorruptPayload(f"the payload of rank {header.meta.rank} ends at byte {end + data.nbytes}")
        check_slot(data, header, number, decompress=False)
        end += size


def _check_promised(
    header: codec.Header, namespace: NamespaceId, segment: SegmentId, rank: int, record: SegmentRecord
) -> None:
    check_name(header, namespace, segment, rank)
    if header.part != record.parts[rank] or header.meta.ranks != len(record.parts):
        raise CorruptPayload(f"header and index disagree on the layout of rank {rank}")


def check_name(header: codec.Header, namespace: NamespaceId, segment: SegmentId, rank: int) -> None:
    """Checks that a header belongs under this name. Raises CorruptPayload."""
    meta = header.meta
    if (meta.namespace_id, meta.segment, meta.rank) != (namespace, segment.hex(), rank):
        own = payload_name(NamespaceId(meta.namespace_id), SegmentId(bytes.fromhex(meta.segment)), meta.rank)
        raise CorruptPayload(f"it is the payload {own} by its header")


def check_slots(header: codec.Header, data: memoryview, *, decompress: bool) -> None:
    """Verifies every slot of `data`, all bytes behind the header. Raises CorruptPayload."""
    offset = 0
    for number, size in enumerate(header.part.slot_sizes):
        check_slot(data[offset : offset + size], header, number, decompress=decompress)
        offset += size


def check_slot(stored: memoryview, header: codec.Header, number: int, *, decompress: bool) -> None:
    """Verifies the stored bytes of slot `number`, which stay as they are; `decompress`: also that they
    decompress. Raises CorruptPayload.
    """
    slot = header.meta.slots[number]
    if (opener := header.opener(number)) is not None:
        # A slot is decrypted where it is, and these bytes may be on their way to somewhere else.
        stored = memoryview(bytearray(stored))
    # Memory for the decompressed bytes is taken only after the checksum has vouched for their number.
    codec.decode_slot(stored, slot, None, opener)
    if decompress and slot.codec == "lz4":
        lz4.expand(stored, slot.raw_bytes)  # into nothing but itself: a slot's memory once less
    elif decompress and slot.codec != "none":
        codec.decompress_slot(stored, slot, memoryview(bytearray(slot.raw_bytes)))


def are_there(
    payloads: PayloadStore, namespace: NamespaceId, segment: SegmentId, parts: Sequence[PartRecord]
) -> bool:
    """Tells whether every rank's payload exists and has the size that the index says; reads two bytes of
    each.

    Raises what the store raises.
    """
    for rank, part in enumerate(parts):
        # A read of two bytes from the last one on must bring one.
        last = memoryview(bytearray(2))
        if payloads.read(payload_name(namespace, segment, rank), part.nbytes - 1, [last]) != 1:
            return False
    return True
