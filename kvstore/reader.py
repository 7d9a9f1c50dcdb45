"""Read one run of slots out of one segment, verified before it is handed over.

The bytes go straight into the caller's buffers where the codec allows it. They are read in pieces
of a few MiB that are checksummed right after they arrive: large enough for the disk, small enough
that the checksum finds them in the processor's cache (measured: tests/benchmarks/bench_disk.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from kvstore import codec
from kvstore.errors import CorruptPayload, DeadlineExceeded
from kvstore.keys import ContentKey, NamespaceId, payload_name
from kvstore.ports import PayloadStore, Run
from schemas.segment import SlotMeta

#: Bytes per read call.
PIECE_BYTES = 4 << 20


class PayloadMissing(CorruptPayload):
    """The index names a payload that isn't there."""

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
    part = run.record.parts[rank]
    name = payload_name(namespace, run.segment, rank)
    head = memoryview(bytearray(part.data_start))
    offset, _ = part.slot_range(run.slot, run.count)
    plain = run.record.codec == "none"
    pieces = _pieces(part.slot_sizes[run.slot : run.slot + run.count])

    # A run from the segment's start lies right behind the header: one read gets both.
    first = pieces[0] if plain and run.slot == 0 else range(0)
    _read(payloads, name, 0, [head, *(into[i] for i in first)], end, clock)
    slots = _check_header(head, namespace, run, keys, into, rank)
    for i in first:
        codec.decode_slot(into[i], slots[i], None)
        offset += part.slot_sizes[i]
    for piece in pieces[1:] if first else pieces:
        stored = [
            into[i] if slots[i].codec == "none" else _scratch(part.slot_sizes[run.slot + i]) for i in piece
        ]
        _read(payloads, name, offset, stored, end, clock)
        for i, data in zip(piece, stored, strict=True):
            codec.decode_slot(data, slots[i], None if slots[i].codec == "none" else into[i])
            offset += data.nbytes
    return slots


def _pieces(sizes: Sequence[int]) -> list[range]:
    """Consecutive positions whose sizes add up to about PIECE_BYTES."""
    return list(_split(sizes)) or [range(0)]


def _split(sizes: Sequence[int]) -> Iterator[range]:
    start = total = 0
    for i, size in enumerate(sizes):
        if total and total + size > PIECE_BYTES:
            yield range(start, i)
            start, total = i, 0
        total += size
    yield range(start, len(sizes))


def _scratch(size: int) -> memoryview:
    return memoryview(bytearray(size))


def _read(
    payloads: PayloadStore,
    name: str,
    offset: int,
    into: Sequence[memoryview],
    end: float,
    clock: Callable[[], float],
) -> None:
    if clock() >= end:
        raise DeadlineExceeded(f"load of {name}: deadline passed")
    want = sum(view.nbytes for view in into)
    got = payloads.read(name, offset, into)
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
