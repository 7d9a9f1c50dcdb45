"""The stages of bench but the last: this machine, the index, the payload store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Literal

import numpy as np

from kvstore.admin.bench.material import Material, noise
from kvstore.admin.bench.measure import SideBySide, latency, rate, timed
from kvstore.admin.bench.pages import drop
from kvstore.admin.bench.reports import CodecSpeed, IndexSpeed, MachineSpeed, MatchTime, TransferSpeed
from kvstore.errors import CorruptPayload
from kvstore.format import segment as codec
from kvstore.index.maintenance import FullIndex
from kvstore.keys import DIGEST_BYTES, NamespaceId, SegmentId, block_key, new_segment_id
from kvstore.payloads.port import PayloadStore
from kvstore.rules.units import size
from schemas.records import CODECS, Codec, PartRecord, SegmentRecord

#: Bytes of a copy: twice a large last-level cache, so that memory is measured and not the cache.
_COPY = 128 << 20
_CODEC_SLOT = 2 << 20
_NO_NAMESPACE = NamespaceId("0" * 16)
#: Chain lengths in blocks that a match is measured with, and the blocks of a segment of that chain.
MATCHES = (256, 2048, 8192)
_SEGMENT_BLOCKS = 64
#: The numbers of parallel transfers that are measured.
CONCURRENCIES = (1, 8, 32)
#: Buffers that parallel reads go to; with more, this machine's memory would be measured rather than the
#: store.
_BUFFERS = 8


def machine(seconds: float) -> MachineSpeed:
    """Measures how fast one core copies memory and computes checksums."""
    source, target = np.ones(_COPY, np.uint8), np.zeros(_COPY, np.uint8)
    view, key = memoryview(source.data), "00" * 18
    return MachineSpeed(
        copy_bytes_s=rate(lambda: np.copyto(target, source), _COPY, seconds / 2),
        checksum_bytes_s=rate(
            lambda: codec.slot_checksum(view, key, "none", "U8", (_COPY,)), _COPY, seconds / 2
        ),
    )


def codecs(seconds: float) -> tuple[CodecSpeed, ...]:
    """Measures every codec, checksums included, as a save and a load use it."""
    data = noise(_CODEC_SLOT, seed=1)
    slot = codec.Slot(block_key(bytes(32)), data, "BF16", (_CODEC_SLOT // 2,))
    into = memoryview(bytearray(_CODEC_SLOT))
    found = []
    for name in CODECS:
        encode = _encoder(slot, name)
        encoded = encode()
        [meta] = codec.parse_header(encoded.buffers[0]).meta.slots
        stored = encoded.buffers[1]
        share = seconds / len(CODECS) / 2
        found.append(
            CodecSpeed(
                codec=name,
                ratio=_CODEC_SLOT / stored.nbytes,
                encode_bytes_s=rate(encode, _CODEC_SLOT, share),
                decode_bytes_s=rate(
                    lambda stored=stored, meta=meta: codec.decode_slot(stored, meta, into),  # type: ignore[misc]
                    _CODEC_SLOT,
                    share,
                ),
            )
        )
    return tuple(found)


def _encoder(slot: codec.Slot, name: Codec) -> Callable[[], codec.Encoded]:
    return lambda: codec.encode(
        [slot],
        namespace_json="{}",
        kind="kv",
        segment=SegmentId(bytes(8)),
        codec=name,
        writer="bench",
    )


def index(index: FullIndex, space: NamespaceId, seconds: float) -> IndexSpeed:
    """Measures round trips, commits and matches, with a chain whose segments have no payloads.

    No other process has its digests, and it is removed at the end. Raises what the index raises.
    """
    digests = os.urandom(DIGEST_BYTES * max(MATCHES))
    part = PartRecord(4096, (1,) * _SEGMENT_BLOCKS)
    record = SegmentRecord((part,), _SEGMENT_BLOCKS, "none", int(time.time()), raw_bytes=_SEGMENT_BLOCKS)
    step = DIGEST_BYTES * _SEGMENT_BLOCKS
    blobs = [digests[at : at + step] for at in range(0, len(digests), step)]
    segments = [new_segment_id(digests) for _ in blobs]
    left = iter(list(zip(segments, blobs, strict=True)))

    def commit() -> None:
        segment, blob = next(left)
        index.commit(space, segment, blob, record, rank=0, ranks=1)

    try:
        commits = latency(timed(commit, seconds, least=len(blobs), most=len(blobs)))
        share = seconds / (len(MATCHES) + 1)
        return IndexSpeed(
            round_trip=latency(timed(lambda: index.match(_NO_NAMESPACE, bytes(DIGEST_BYTES)), share)),
            matches=tuple(_match(index, space, digests, blocks, share) for blocks in MATCHES),
            commit=commits,
        )
    finally:
        forget(index, space, segments)


def _match(index: FullIndex, space: NamespaceId, digests: bytes, blocks: int, seconds: float) -> MatchTime:
    asked = digests[: DIGEST_BYTES * blocks]

    def match() -> None:
        found = sum(run.count for run in index.match(space, asked))
        if found != blocks:
            raise CorruptPayload(f"the index found {found} of {blocks} blocks that were just committed")

    return MatchTime(blocks=blocks, latency=latency(timed(match, seconds)))


def forget(index: FullIndex, space: NamespaceId, segments: list[SegmentId]) -> None:
    """Removes segments from the index as if they had never been there; the caller deletes their payloads."""
    index.evict(space, segments, delete_after_s=0, rule="admin")
    index.reaped(space, segments)
    # All entries of this namespace dangle, but a sweep may begin anywhere.
    idle = 0
    while idle < 2:
        idle = 0 if index.sweep(space, 4096) else idle + 1


class Payloads:
    """Measures transfers of whole payloads, at every concurrency."""

    def __init__(
        self, store: PayloadStore, material: Material, *, bytes_budget: int, folder: Path | None
    ) -> None:
        """Takes the payloads' `folder` if they are files."""
        self._store = store
        self._material = material
        self._budget = bytes_budget
        self._folder = folder

    def too_much(self, concurrency: int) -> str:
        """Returns why so many puts would write too much, or ""."""
        nbytes = concurrency * self._material.shape.segment_bytes
        if nbytes <= self._budget or concurrency == 1:
            return ""
        return f"it would write {size(nbytes)}, and {size(self._budget)} are left for it"

    def put(self, concurrency: int, seconds: float) -> TransferSpeed:
        """Measures puts of fresh payloads. Raises what a put raises if none succeeded."""
        material, object_bytes = self._material, self._material.shape.segment_bytes

        def prepare() -> Callable[[], int]:
            stored, buffers = material.segment()

            def put() -> int:
                self._store.put(material.name(stored), buffers)
                material.keep(stored)
                return stored.nbytes

            return put

        most = -(-self._budget // (len(CONCURRENCIES) * object_bytes))
        done = SideBySide(concurrency).run(prepare, seconds, most)
        if done.error is not None and not material.stored:
            raise done.error
        return self._speed("put", done)

    def get(self, concurrency: int, seconds: float) -> TransferSpeed:
        """Measures reads of the payloads that were put, into memory that has been used before.

        Files are to be read from the disk, so each of them is read only once.
        """
        sizes = [stored.nbytes for stored in self._material.stored]
        drop(self._folder, self._material.names)
        buffers = cycle([touched(max(sizes)) for _ in range(min(concurrency, _BUFFERS))])
        turns = cycle(self._material.stored)

        def prepare() -> Callable[[], int]:
            stored, buffer = next(turns), next(buffers)
            view = buffer[: stored.nbytes]
            name = self._material.name(stored)

            def get() -> int:
                got = self._store.read(name, 0, [view], size=stored.nbytes)
                if got != stored.nbytes:
                    raise CorruptPayload(f"read {got} of {stored.nbytes} bytes")
                return got

            return get

        most = len(sizes) if self._folder is not None else 10_000
        return self._speed("get", SideBySide(concurrency).run(prepare, seconds, most))

    def _speed(self, operation: Literal["put", "get"], done: SideBySide) -> TransferSpeed:
        return TransferSpeed(
            tier="shared",
            operation=operation,
            concurrency=done.concurrency,
            object_bytes=self._material.shape.segment_bytes,
            bytes_s=done.bytes_s,
            latency=latency(done.times) if done.times else None,
            errors=dict(done.errors),
            skipped="",
        )

    def skipped(self, operation: Literal["put", "get"], concurrency: int, reason: str) -> TransferSpeed:
        """Returns the line of a measurement that is skipped for `reason`."""
        return self._speed(operation, SideBySide(concurrency)).model_copy(update={"skipped": reason})

    def small_reads(self, seconds: float) -> list[float]:
        """Returns the times of reads of a header, in seconds."""
        turns = cycle(self._material.stored)
        drop(self._folder, self._material.names)

        def read() -> None:
            stored = next(turns)
            head = memoryview(bytearray(stored.record.parts[0].data_start))
            self._store.read(self._material.name(stored), 0, [head])

        return timed(read, seconds, least=5, most=500 if self._folder is None else len(self._material.stored))


def touched(nbytes: int) -> memoryview:
    """Returns memory whose pages are mapped already, as those of an engine's staging memory are."""
    return memoryview(np.ones(nbytes, np.uint8).data)
