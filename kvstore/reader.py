"""Read one run of slots out of one segment, verified before it is handed over.

The bytes go straight into the caller's buffers where the codec allows it, header and slots with one read;
with two if so much lies between them that reading through it would cost more than another request (what
the payload store says: nothing for a disk, about a MiB for a bucket). Where the slots lie is known from the
index, and the header must agree with it.

Reading in pieces with a checksum after each made no clear difference from the page cache or from a cold
disk (tests/benchmarks/bench_disk.py), and would cost an object store a request per piece.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from kvstore import codec
from kvstore.errors import CorruptPayload, DeadlineExceeded, TransientError
from kvstore.keys import ContentKey, NamespaceId, payload_name
from kvstore.ports import PayloadStore, Run
from schemas.records import PartRecord
from schemas.segment import SlotMeta


class PayloadMissing(CorruptPayload):
    """The index names a payload that isn't there."""

    reason = "missing"


class PayloadLate(TransientError):
    """The index names a payload that another node has not uploaded yet."""

    reason = "missing"


def read_run(
    payloads: PayloadStore,
    namespace: NamespaceId,
    run: Run,
    keys: Sequence[ContentKey],
    into: Sequence[memoryview],
    *,
    rank: int,
    end: float,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[SlotMeta, ...]:
    """Fill `into[i]` with the raw bytes of the run's i-th slot, whose content key must be `keys[i]`.

    `into` are writable byte views of exactly the slots' raw sizes. Returns the slots' metadata.
    `end` is a `clock` time past which the rest is not read.

    Raises CorruptPayload (PayloadMissing, NamespaceMismatch) if anything differs from what the index
    and the keys promise, DeadlineExceeded, or what the payload store raises. The buffers may then
    hold anything and must not be used.
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
    if gap <= payloads.gap_bytes:
        _read(payloads, name, 0, [head, _scratch(gap), *stored], part.nbytes, end, clock)
        slots = _check_header(head, namespace, run, keys, into, rank)
    else:
        _read(payloads, name, 0, [head], part.nbytes, end, clock)
        slots = _check_header(head, namespace, run, keys, into, rank)
        _read(payloads, name, start, stored, part.nbytes, end, clock)
    for data, slot, view in zip(stored, slots, into, strict=True):
        codec.decode_slot(data, slot, None if slot.codec == "none" else view)
    return slots


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
    namespace: NamespaceId,
    run: Run,
    keys: Sequence[ContentKey],
    into: Sequence[memoryview],
    rank: int,
) -> tuple[SlotMeta, ...]:
    header = codec.parse_header(head, namespace=namespace)
    meta = header.meta
    if meta.segment != run.segment.hex() or meta.rank != rank or meta.ranks != len(run.record.parts):
        raise CorruptPayload(f"payload of segment {meta.segment} rank {meta.rank} under the wrong name")
    if header.part != run.record.parts[rank]:
        raise CorruptPayload(f"segment {meta.segment}: header and index disagree on the layout")
    slots = meta.slots[run.slot : run.slot + run.count]
    if [slot.key for slot in slots] != [key.hex() for key in keys]:
        raise CorruptPayload(f"segment {meta.segment} holds other blocks than the index says")
    if any(slot.raw_bytes != view.nbytes for slot, view in zip(slots, into, strict=True)):
        raise CorruptPayload(f"segment {meta.segment}: slots are not of the expected size")
    return slots
