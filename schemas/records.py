"""Index records: what the index knows of a segment, packed small because there are millions.

Slotted dataclasses rather than pydantic models: a match unpacks a record per segment on the path
of a request. The packed layout is part of the Redis schema and of the SQLite file (golden test:
tests/test_records.py):

    u8  version (1)          u8  flags (1: slots of equal size)       u16 slots
    u8  ranks                u8  codec (0 none, 1 lz4, 2 planes-lz4)  u16 cost to compute it again
    u32 created, unix seconds                                         u32 depth: blocks before slot 0
    u64 raw bytes            (before the codec; 0 with several ranks)
    per rank: u32 data start; then u32 slot size once (flag 1) or u32 slot size x slots

The cost is in microseconds, as a number of 11 bits shifted left by the 5 bits above them; 0: unknown.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

#: Why a segment was evicted. `capacity`: the whole store's quota. `bad`: it failed verification. `abandoned`:
#: a rank did not write its part. `repair`: fsck found it damaged.
EvictionRule = Literal[
    "capacity", "tenant_quota", "namespace_quota", "bad", "abandoned", "admin", "invalidated", "repair"
]
#: What an outcome is of: blocks asked for, blocks that were being loaded, blocks offered for saving.
OutcomeOp = Literal["match", "load", "save"]

#: How a segment's slots are stored, see kvstore/codec.py.
Codec = Literal["none", "lz4", "planes-lz4"]
#: A codec's number is its place here.
CODECS: tuple[Codec, ...] = ("none", "lz4", "planes-lz4")

_HEAD = struct.Struct("<BBHBBHIIQ")
_VERSION = 1
_UNIFORM = 1


@dataclass(frozen=True, slots=True)
class PartRecord:
    """Layout of one rank's payload: `data_start` bytes of header, then the slots back to back."""

    data_start: int
    slot_sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the whole payload in bytes."""
        return self.data_start + sum(self.slot_sizes)

    def slot_range(self, first: int, count: int) -> tuple[int, int]:
        """(offset, length) in bytes of `count` adjacent slots."""
        start = self.data_start + sum(self.slot_sizes[:first])
        return start, sum(self.slot_sizes[first : first + count])


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """One visible segment: all of its ranks' parts are durable."""

    parts: tuple[PartRecord, ...]
    slots: int
    codec: Codec
    created_s: int
    #: Index in its chain of the segment's first block: orders eviction (tails before heads).
    depth: int = 0
    #: Bytes of the slots before the codec; 0 with several ranks, whose headers say each its own.
    raw_bytes: int = 0
    #: What an engine says it took to compute, in microseconds, rounded by `rounded_cost`; 0: unknown.
    cost_us: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all ranks' payloads, headers included: what a quota counts."""
        return sum(part.nbytes for part in self.parts)


def pack_head(record: SegmentRecord, ranks: int) -> bytes:
    """The part of the packed form that all ranks' commits must agree on."""
    return _HEAD.pack(
        _VERSION,
        _UNIFORM if _uniform(record) else 0,
        record.slots,
        ranks,
        CODECS.index(record.codec),
        _pack_cost(record.cost_us),
        record.created_s,
        record.depth,
        record.raw_bytes,
    )


def pack_part(record: SegmentRecord, part: PartRecord) -> bytes:
    """The packed form of one rank's layout."""
    sizes = part.slot_sizes[:1] if _uniform(record) else part.slot_sizes
    return struct.pack(f"<I{len(sizes)}I", part.data_start, *sizes)


def _uniform(record: SegmentRecord) -> bool:
    # Decided by the codec alone for more than one slot, so that ranks can't disagree on the flag:
    # without a codec every slot of a group has one size, with one they hardly ever do.
    return record.slots == 1 or (
        record.codec == "none" and all(len(set(part.slot_sizes)) == 1 for part in record.parts)
    )


def pack_record(record: SegmentRecord) -> bytes:
    """The packed form; see the module's table."""
    return pack_head(record, len(record.parts)) + b"".join(pack_part(record, part) for part in record.parts)


def unpack_record(data: bytes) -> SegmentRecord | None:
    """A packed record, or None if it is damaged or of another version: the segment is then a miss."""
    if len(data) < _HEAD.size:
        return None
    version, flags, slots, ranks, codec, cost, created, depth, raw = _HEAD.unpack_from(data)
    if version != _VERSION or codec >= len(CODECS) or not slots or not ranks:
        return None
    count = 1 if flags & _UNIFORM else slots
    part_format = struct.Struct(f"<I{count}I")
    if len(data) != _HEAD.size + ranks * part_format.size:
        return None
    parts = []
    for rank in range(ranks):
        start, *sizes = part_format.unpack_from(data, _HEAD.size + rank * part_format.size)
        parts.append(PartRecord(start, tuple(sizes) * slots if flags & _UNIFORM else tuple(sizes)))
    return SegmentRecord(tuple(parts), slots, CODECS[codec], created, depth, raw, _unpack_cost(cost))


def rounded_cost(cost_us: float) -> int:
    """The largest cost that a record can hold and that is at most `cost_us`: to 11 bits, up to 50 days."""
    return _unpack_cost(_pack_cost(max(0, int(cost_us))))


def _pack_cost(cost_us: int) -> int:
    shift = max(0, cost_us.bit_length() - 11)
    return 0xFFFF if shift > 31 else shift << 11 | cost_us >> shift


def _unpack_cost(packed: int) -> int:
    return (packed & 0x7FF) << (packed >> 11)
