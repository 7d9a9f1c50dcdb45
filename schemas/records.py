"""Index records: what the index knows of a segment, packed small because there are millions.

They are slotted dataclasses, not pydantic models: a match unpacks a record per segment on the path
of a request. The packed layout is part of the Redis schema and of the SQLite file (golden test:
tests/schemas/test_records.py):

    u8  version (2)          u8  flags (1: slots of equal size, 2: salted)    u16 slots
    u8  ranks                u8  codec (its place in `CODECS`)        u16 cost to compute it again
    u32 created, unix seconds                                         u32 depth: blocks before slot 0
    u64 raw bytes            (before the codec; 0 with several ranks)
    8 bytes id of the writer (kvstore.keys.writer_id)
    16 bytes id of the salt  (flag 2 only)
    per rank: u32 data start; then u32 slot size once (flag 1) or u32 slot size x slots

The cost is in microseconds, as a number of 11 bits shifted left by the 5 bits above them; 0: unknown.
"""

from __future__ import annotations

import struct
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from operator import eq
from typing import Final, Literal, TypeVar, get_args, overload

#: Why a segment was evicted. `capacity`: the whole store's quota. `bad`: it failed verification. `abandoned`:
#: a rank did not write its part. `named`: an operator named a prompt, a request or a session that it belonged
#: to. `ttl`: it was older than its time to live. `erased`: a tenant's or a salt's data was erased. `repair`:
#: fsck found it damaged. `joined`: a later segment begins with its blocks and has replaced it.
EvictionRule = Literal[
    "capacity",
    "tenant_quota",
    "namespace_quota",
    "salt_quota",
    "bad",
    "abandoned",
    "admin",
    "named",
    "ttl",
    "erased",
    "invalidated",
    "repair",
    "joined",
]
#: The operation of an outcome, on blocks asked for, blocks being loaded, or blocks offered for saving.
OutcomeOp = Literal["match", "load", "save"]

#: How a slot is stored (kvstore/format/codecs.py). A codec's number in a record is its place here.
Codec = Literal["none", "lz4", "planes-lz4"]
CODECS: Final[tuple[Codec, ...]] = get_args(Codec)

#: Largest product of slots and ranks: 255 ranks of 1024 slots. A packed record is small however many it has.
_MOST_SIZES: Final = 1 << 18

_HEAD = struct.Struct("<BBHBBHIIQ8s")
_VERSION = 2
#: Bytes of `pack_head` without a salt.
HEAD_BYTES = _HEAD.size
#: Place of the time of creation in it: a u32.
CREATED_AT: Final = 8
_UNIFORM, _SALTED = 1, 2
#: Bytes of the id of a salt.
SALT_ID_BYTES = 16
#: Bytes of the id of a writer: one start of one engine, or another process that saves.
WRITER_ID_BYTES = 8
#: The id of an unknown writer.
NO_WRITER: Final = bytes(WRITER_ID_BYTES)


_T_co = TypeVar("_T_co", covariant=True)


class _Compact(Sequence[_T_co]):
    """A sequence that equals a tuple and takes no more memory than its packed form. An answer of the index
    can bring thousands of records of 2 kB whose tuples would take 2 MiB each."""

    __slots__ = ()

    @overload
    def __getitem__(self, index: int) -> _T_co: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[_T_co]: ...
    def __getitem__(self, index: int | slice) -> _T_co | Sequence[_T_co]:
        which = range(len(self))[index]
        return self._at(which) if isinstance(which, int) else self._some(which)

    def __iter__(self) -> Iterator[_T_co]:
        return map(self._at, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, tuple | _Compact):
            return NotImplemented
        return len(self) == len(other) and all(map(eq, self, other))

    def __hash__(self) -> int:
        return hash(tuple(self))

    @abstractmethod
    def _at(self, index: int) -> _T_co:
        """Returns what stands at a place that exists."""

    def _some(self, which: range) -> Sequence[_T_co]:
        """Returns what stands at places that exist."""
        return tuple(map(self._at, which))


@dataclass(frozen=True, slots=True, eq=False)
class EqualSizes(_Compact[int]):
    """`(size,) * times`."""

    size: int
    times: int

    def __len__(self) -> int:
        return self.times

    def __iter__(self) -> Iterator[int]:
        return repeat(self.size, self.times)

    def _at(self, index: int) -> int:
        return self.size

    def _some(self, which: range) -> Sequence[int]:
        return EqualSizes(self.size, len(which))


@dataclass(frozen=True, slots=True)
class PartRecord:
    """Layout of one rank's payload: `data_start` bytes of header, then the slots back to back."""

    data_start: int
    slot_sizes: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Size of the whole payload in bytes."""
        return self.data_start + _total(self.slot_sizes)

    def slot_range(self, first: int, count: int) -> tuple[int, int]:
        """Returns the (offset, length) in bytes of `count` adjacent slots."""
        start = self.data_start + _total(self.slot_sizes[:first])
        return start, _total(self.slot_sizes[first : first + count])


def _total(sizes: Sequence[int]) -> int:
    return sizes.size * sizes.times if isinstance(sizes, EqualSizes) else sum(sizes)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class _PackedParts(_Compact[PartRecord]):
    """The parts in a packed record of the right length, each unpacked on access."""

    data: bytes
    begin: int
    ranks: int
    slots: int

    def __repr__(self) -> str:
        return repr(tuple(self))

    def __len__(self) -> int:
        return self.ranks

    def _at(self, index: int) -> PartRecord:
        nbytes = (len(self.data) - self.begin) // self.ranks
        at = self.begin + index * nbytes
        start, *sizes = struct.unpack_from(f"<{nbytes // 4}I", self.data, at)
        return PartRecord(
            start, tuple(sizes) if len(sizes) == self.slots else EqualSizes(sizes[0], self.slots)
        )


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """One visible segment: all of its ranks' parts are durable."""

    parts: Sequence[PartRecord]
    slots: int
    codec: Codec
    created_s: int
    #: Place of the segment's first block in its chain; orders eviction (tails before heads).
    depth: int = 0
    #: Bytes of the slots before the codec; 0 with several ranks, as each one's header says its own.
    raw_bytes: int = 0
    #: Time that an engine took to compute it, in microseconds, rounded by `rounded_cost`; 0: unknown.
    cost_us: int = 0
    #: Id of the salt that its requests came with (kvstore.keys.salt_id); empty without one.
    salt: bytes = b""
    #: Id of the start of an engine that saved it (kvstore.keys.writer_id).
    writer: bytes = NO_WRITER

    @property
    def nbytes(self) -> int:
        """Bytes of all ranks' payloads, headers included, as quotas count them."""
        return sum(part.nbytes for part in self.parts)


def pack_head(record: SegmentRecord, ranks: int) -> bytes:
    """Returns the part of the packed form that all ranks' commits must agree on."""
    if len(record.salt) not in (0, SALT_ID_BYTES):
        raise ValueError(f"id of a salt has {SALT_ID_BYTES} bytes, not {len(record.salt)}")
    if len(record.writer) != WRITER_ID_BYTES:
        raise ValueError(f"id of a writer has {WRITER_ID_BYTES} bytes, not {len(record.writer)}")
    head = _HEAD.pack(
        _VERSION,
        (_UNIFORM if _uniform(record) else 0) | (_SALTED if record.salt else 0),
        record.slots,
        ranks,
        CODECS.index(record.codec),
        _pack_cost(record.cost_us),
        record.created_s,
        record.depth,
        record.raw_bytes,
        record.writer,
    )
    return head + record.salt


def pack_part(record: SegmentRecord, part: PartRecord) -> bytes:
    """Returns the packed form of one rank's layout."""
    sizes = part.slot_sizes[:1] if _uniform(record) else part.slot_sizes
    return struct.pack(f"<I{len(sizes)}I", part.data_start, *sizes)


def _uniform(record: SegmentRecord) -> bool:
    # For more than one slot the codec alone decides, so that ranks can't disagree on the flag: without a
    # codec every slot of a group has one size, with a codec they hardly ever have.
    return record.slots == 1 or (
        record.codec == "none" and all(len(set(part.slot_sizes)) == 1 for part in record.parts)
    )


def pack_record(record: SegmentRecord) -> bytes:
    """Returns the packed form; see the module's table."""
    return pack_head(record, len(record.parts)) + b"".join(pack_part(record, part) for part in record.parts)


def unpack_record(data: bytes) -> SegmentRecord | None:
    """Returns a packed record, or None if it is damaged or of another version: the segment is then a miss."""
    if len(data) < _HEAD.size:
        return None
    version, flags, slots, ranks, codec, cost, created, depth, raw, writer = _HEAD.unpack_from(data)
    if version != _VERSION or codec >= len(CODECS) or not slots or not ranks or slots * ranks > _MOST_SIZES:
        return None
    begin = _HEAD.size + (SALT_ID_BYTES if flags & _SALTED else 0)
    if len(data) != begin + 4 * ranks * (2 if flags & _UNIFORM else 1 + slots):
        return None
    parts, salt = _PackedParts(data, begin, ranks, slots), data[_HEAD.size : begin]
    cost_us = _unpack_cost(cost)
    return SegmentRecord(parts, slots, CODECS[codec], created, depth, raw, cost_us, salt, writer)


def rounded_cost(cost_us: float) -> int:
    """Returns the largest cost up to `cost_us` that a record can hold: 11 significant bits, up to 50 days."""
    return _unpack_cost(_pack_cost(max(0, int(cost_us))))


def _pack_cost(cost_us: int) -> int:
    shift = max(0, cost_us.bit_length() - 11)
    return 0xFFFF if shift > 31 else shift << 11 | cost_us >> shift


def _unpack_cost(packed: int) -> int:
    return (packed & 0x7FF) << (packed >> 11)
