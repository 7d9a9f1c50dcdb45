"""What an index knows of a segment; runs of a match; scores."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import xxhash

from tests.format.second.basics import CODECS, need
from tests.format.second.names import payload_name
from tests.format.second.segments import Header, decode, read_header


@dataclass(frozen=True)
class Record:
    slots: int
    codec: str
    cost_us: int
    created_s: int
    depth: int
    raw_bytes: int
    #: Per rank: data start and the slots' stored sizes.
    parts: tuple[tuple[int, tuple[int, ...]], ...]
    #: Id of the salt; empty without one.
    salt: bytes = b""
    #: Id of the writer.
    writer: bytes = bytes(8)

    @property
    def nbytes(self) -> int:
        return sum(start + sum(sizes) for start, sizes in self.parts)


def pack_cost(cost_us: int) -> int:
    shift = max(0, cost_us.bit_length() - 11)
    return 0xFFFF if shift > 31 else shift << 11 | cost_us >> shift


def unpack_cost(packed: int) -> int:
    return (packed & 0x7FF) << (packed >> 11)


def is_uniform(record: Record) -> bool:
    sizes = [set(one) for _, one in record.parts]
    return record.slots == 1 or (record.codec == "none" and all(len(one) == 1 for one in sizes))


def pack_head(record: Record, ranks: int) -> bytes:
    head = struct.pack(
        "<BBHBBHIIQ8s",
        2,
        int(is_uniform(record)) + (2 if record.salt else 0),
        record.slots,
        ranks,
        CODECS.index(record.codec),
        pack_cost(record.cost_us),
        record.created_s,
        record.depth,
        record.raw_bytes,
        record.writer,
    )
    return head + record.salt


def pack_parts(record: Record) -> bytes:
    out = b""
    for start, sizes in record.parts:
        shown = sizes[:1] if is_uniform(record) else sizes
        out += struct.pack(f"<{1 + len(shown)}I", start, *shown)
    return out


def unpack_record(data: bytes) -> Record:
    need(len(data) >= 32, "a short record")
    (version, flags, slots, ranks, codec, cost, created, depth, raw, writer) = struct.unpack_from(
        "<BBHBBHIIQ8s", data
    )
    need(version == 2 and slots and ranks and codec < len(CODECS), "a record of another version")
    need(slots * ranks <= 262144, "more slots than a record can have")
    count = 1 if flags & 1 else slots
    begin = 48 if flags & 2 else 32
    need(len(data) == begin + ranks * 4 * (1 + count), "length of a record")
    parts = []
    for rank in range(ranks):
        start, *sizes = struct.unpack_from(f"<{1 + count}I", data, begin + rank * 4 * (1 + count))
        parts.append((start, tuple(sizes) * (slots if flags & 1 else 1)))
    salt = data[32:begin]
    cost_us = unpack_cost(cost)
    return Record(slots, CODECS[codec], cost_us, created, depth, raw, tuple(parts), salt, writer)


def record_of(headers: Sequence[Header]) -> Record:
    """The record of a segment, or of one rank's part, by the headers."""
    meta = headers[0].meta
    return Record(
        len(headers[0].slots),
        meta["codec"],
        unpack_cost(pack_cost(meta["cost_us"])),
        meta["created_s"],
        meta["depth"],
        sum(slot.raw_bytes for slot in headers[0].slots) if meta["ranks"] == 1 else 0,
        tuple((one.data_start, tuple(slot.end - slot.start for slot in one.slots)) for one in headers),
        bytes.fromhex(meta["salt"]),
        hashlib.sha256(b"kvstore writer\0" + meta["writer"].encode()).digest()[:8],
    )


def agreement(digests: bytes, record: Record, ranks: int) -> bytes:
    return xxhash.xxh3_64_intdigest(digests).to_bytes(8, "big") + pack_head(record, ranks)


def worth(kind: str, record: Record) -> int:
    if kind != "ec" or not record.nbytes:
        return 0
    return min(15, int(np.log2(1 + record.cost_us * 1024 / record.nbytes)))


def saved_minute(created_s: int) -> float:
    return max(0, (created_s - 30) // 15) / 4


def score(minute: float, depth: int, worth: int) -> float:
    return minute + 10 * worth - (min(depth, (1 << 20) - 1) * 16 + worth) / (1 << 26)


def unscore(value: float) -> tuple[float, int, int]:
    """Minute of the last use, depth, worth."""
    keep = -(-value * 4 // 1) / 4
    x = round((keep - value) * (1 << 26))
    return keep - 10 * (x % 16), x // 16, x % 16


def session_record(value: bytes) -> tuple[int, bool, int, int, list[bytes]]:
    """Minute of the last use, whether it has ended, priority, second until which it retains, its own."""
    head, until = int.from_bytes(value[:4], "big"), int.from_bytes(value[4:8], "big")
    own = [value[at : at + 8] for at in range(8, len(value), 8)]
    return head // 8, bool(head & 4), head & 3, until, own


def retention(value: float) -> tuple[int, int]:
    """Second of the end, minute of the last use."""
    until = int(value)
    return until, until // 60 - round((value - until) * (1 << 21))


@dataclass(frozen=True)
class Run:
    start: int
    segment: bytes
    slot: int
    count: int
    record: Record


def simple_match(
    digests: bytes,
    entry: Callable[[bytes], tuple[bytes, int] | None],
    record: Callable[[bytes], Record | None],
) -> list[Run]:
    """The document's first way: block by block until one is not present."""
    runs: list[Run] = []
    for position in range(len(digests) // 16):
        found = entry(digests[16 * position : 16 * position + 16])
        known = record(found[0]) if found else None
        if found is None or known is None or found[1] >= known.slots:
            break
        last = runs[-1] if runs else None
        if last and (last.segment, last.slot + last.count) == found:
            runs[-1] = Run(last.start, last.segment, last.slot, last.count + 1, last.record)
        else:
            runs.append(Run(position, found[0], found[1], 1, known))
    return runs


def load(root: Path, namespace: str, run: Run, keys: Sequence[bytes], rank: int = 0) -> Iterator[bytes]:
    """The raw bytes of a run's slots, one rank's part of each, verified in the document's order."""
    need(rank < len(run.record.parts), "no such rank")
    need(run.slot + run.count <= run.record.slots, "slots beyond the record")
    data = (root / payload_name(namespace, run.segment, rank)).read_bytes()
    header = read_header(data, namespace=namespace)
    meta = header.meta
    need((meta["segment"], meta["rank"]) == (run.segment.hex(), rank), "another payload's name")
    need(meta["ranks"] == len(run.record.parts), "ranks of record and header")
    need(record_of([header]).parts[0] == run.record.parts[rank], "layout of record and header")
    slots = header.slots[run.slot : run.slot + run.count]
    need([slot.key for slot in slots] == list(keys), "other blocks than asked for")
    for slot in slots:
        yield decode(data[slot.start : slot.end], slot)


def is_forbidden(created_s: int, until: list[int], now_s: int) -> bool:
    """Whether a commit is of what an erasure covers, or may be: its time is yet to come."""
    last = max([-1, *until])
    return min(created_s, now_s) <= last or (last >= 0 and created_s > now_s + 60)
