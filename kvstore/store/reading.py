"""Reads one run of slots out of one segment, and verifies it before it is handed over.

The bytes go straight into the caller's buffers where the codec allows it. One read brings header and slots;
it takes two if the gap between them is so large that reading through it would cost more than another request
(kvstore.build chooses: any gap for a disk, more than about a MiB for a bucket). The index says where the
slots lie, and the header must agree with it.

Reading in pieces with a checksum after each made no clear difference from the page cache or a cold disk
(trials/benchmarks/bench_disk.py). It would cost an object store a request per piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvstore.errors import CapacityExceeded, CorruptPayload, DeadlineExceeded, PayloadMissing, TransientError
from kvstore.format import codecs
from kvstore.format import segment as codec
from kvstore.format.keyring import Keyring
from kvstore.index.port import Run
from kvstore.keys import ContentKey, NamespaceId, payload_name
from kvstore.payloads.port import PayloadStore
from schemas.records import PartRecord
from schemas.segment import SlotMeta

#: Memory that a reader takes on the index's word alone, in bytes. A larger item's header is read first, which
#: costs a request that is little beside its bytes.
_FREELY = 4 << 20


class PayloadLate(TransientError):
    """The index names a payload that another node has not uploaded yet."""

    reason = "missing"


def read_run(
    payloads: PayloadStore,
    keyring: Keyring,
    namespace: NamespaceId,
    run: Run,
    keys: Sequence[ContentKey],
    into: Sequence[memoryview],
    *,
    rank: int,
    end: float,
    gap_bytes: int,
    clock: Callable[[], float] = time.monotonic,
    arrived: Callable[[], None] | None = None,
) -> tuple[SlotMeta, ...]:
    """Fills `into[i]` with the raw bytes of the run's i-th slot, whose content key must be `keys[i]`.

    `into` are writable byte views of exactly the slots' raw sizes. Returns the slots' metadata.
    `end` is the `clock` time after which no further read begins, `gap_bytes` the largest gap to read through.
    `arrived` is called when all bytes are there, before they are verified.

    Raises CorruptPayload (PayloadMissing, NamespaceMismatch) if anything differs from what the index
    and the keys promise, UnreadablePayload if this process can't judge it, DeadlineExceeded, and the payload
    store's errors. The buffers may then hold anything and must not be used.
    """
    if not len(keys) == len(into) == run.count:
        raise ValueError(f"run of {run.count} slots, {len(keys)} keys, {len(into)} buffers")
    parts = run.record.parts
    part = parts[rank] if rank < len(parts) else PartRecord(0, ())
    name = payload_name(namespace, run.segment, rank)
    sizes = part.slot_sizes[run.slot : run.slot + run.count]
    if (
        len(sizes) < run.count
        or part.data_start > codec.MAX_HEADER
        or any(size > view.nbytes for size, view in zip(sizes, into, strict=True))
    ):
        raise CorruptPayload(f"segment {run.segment.hex()}: the index's record of it makes no sense")
    start, _ = part.slot_range(run.slot, run.count)
    gap = start - part.data_start
    head = _scratch(part.data_start)
    # Only what a codec has shrunk is stored in fewer bytes.
    stored = [view if size == view.nbytes else _scratch(size) for size, view in zip(sizes, into, strict=True)]
    raw_sizes = [view.nbytes for view in into]
    if gap <= gap_bytes:
        _read(payloads, name, 0, [head, _scratch(gap), *stored], part.nbytes, end, clock)
        if arrived is not None:
            arrived()
        header = _check_header(head, keyring, namespace, run, keys, raw_sizes, rank)
    else:
        _read(payloads, name, 0, [head], part.nbytes, end, clock)
        header = _check_header(head, keyring, namespace, run, keys, raw_sizes, rank)
        _read(payloads, name, start, stored, part.nbytes, end, clock)
        if arrived is not None:
            arrived()
    slots = header.meta.slots[run.slot : run.slot + run.count]
    for i, (data, slot, view) in enumerate(zip(stored, slots, into, strict=True)):
        codec.decode_slot(data, slot, None if slot.codec == "none" else view, header.opener(run.slot + i))
    return slots


def requests_of(run: Run, rank: int, gap_bytes: int) -> int:
    """Returns how many requests `read_run` makes for a run, one after the other."""
    parts = run.record.parts
    if rank >= len(parts) or run.slot + run.count > len(parts[rank].slot_sizes):
        return 1  # it raises before
    start, _ = parts[rank].slot_range(run.slot, run.count)
    return 1 + (start - parts[rank].data_start > gap_bytes)


def read_header_of(
    payloads: PayloadStore,
    keyring: Keyring,
    namespace: NamespaceId,
    run: Run,
    *,
    end: float,
    clock: Callable[[], float] = time.monotonic,
) -> codec.Header:
    """Returns the header of the first rank's payload of a run's segment. Raises what `read_run` raises."""
    part = run.record.parts[0]
    if part.data_start > codec.MAX_HEADER:
        raise CorruptPayload(f"segment {run.segment.hex()}: the index's record of it makes no sense")
    head = _scratch(part.data_start)
    _read(payloads, payload_name(namespace, run.segment, 0), 0, [head], part.nbytes, end, clock)
    return codec.parse_header(head, namespace=namespace, keyring=keyring)


def item_room(
    payloads: PayloadStore,
    keyring: Keyring,
    namespace: NamespaceId,
    run: Run,
    key: ContentKey,
    *,
    most: int,
    end: float,
    clock: Callable[[], float] = time.monotonic,
) -> memoryview:
    """Returns memory to read an item into: a segment of one slot, whose size the index alone tells.

    An index may say any size, so a large item's own header is read first. Raises CapacityExceeded if it has
    more than `most` bytes, CorruptPayload if index and header disagree, and what `read_run` raises.
    """
    record = run.record
    if record.slots != 1 or len(record.parts) != 1:
        raise CorruptPayload(f"segment {run.segment.hex()}: the index's record is not an item's")
    (part,) = record.parts
    (stored,) = part.slot_sizes
    if not stored <= record.raw_bytes <= codecs.MOST_RATIO * stored or part.data_start > codec.MAX_HEADER:
        raise CorruptPayload(f"segment {run.segment.hex()}: the index's record of it makes no sense")
    if record.raw_bytes > most:
        raise CapacityExceeded(f"an item of {record.raw_bytes} bytes is larger than {most}")
    if record.raw_bytes > _FREELY:
        head = _scratch(part.data_start)
        _read(payloads, payload_name(namespace, run.segment, 0), 0, [head], part.nbytes, end, clock)
        _check_header(head, keyring, namespace, run, [key], [record.raw_bytes], 0)
    return _scratch(record.raw_bytes)


def _scratch(size: int) -> memoryview:
    return memoryview(bytearray(size))


def _read(
    payloads: PayloadStore,
    name: str,
    offset: int,
    into: Sequence[memoryview],
    size: int,
    end: float,
    clock: Callable[[], float],
) -> None:
    if clock() >= end:
        raise DeadlineExceeded(f"load of {name}: deadline passed")
    want = sum(view.nbytes for view in into)
    got = payloads.read(name, offset, into, size=size)
    if got is None:
        raise PayloadMissing(f"payload {name} is missing")
    if got != want:
        raise CorruptPayload(f"payload {name} ends at byte {offset + got}, expected {offset + want}")


def _check_header(
    head: memoryview,
    keyring: Keyring,
    namespace: NamespaceId,
    run: Run,
    keys: Sequence[ContentKey],
    raw_sizes: Sequence[int],
    rank: int,
) -> codec.Header:
    header = codec.parse_header(head, namespace=namespace, keyring=keyring)
    meta = header.meta
    if meta.segment != run.segment.hex() or meta.rank != rank or meta.ranks != len(run.record.parts):
        raise CorruptPayload(f"payload of segment {meta.segment} rank {meta.rank} under the wrong name")
    if header.part != run.record.parts[rank]:
        raise CorruptPayload(f"segment {meta.segment}: header and index disagree on the layout")
    slots = meta.slots[run.slot : run.slot + run.count]
    if [slot.key for slot in slots] != [key.hex() for key in keys]:
        raise CorruptPayload(f"segment {meta.segment} holds other blocks than the index says")
    if [slot.raw_bytes for slot in slots] != list(raw_sizes):
        raise CorruptPayload(f"segment {meta.segment}: slots are not of the expected size")
    return header
