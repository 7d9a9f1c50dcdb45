"""Helpers of the index suites: namespaces, hash chains, records, and commits of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal

from kvstore.index.port import CommitState, Index, Run
from kvstore.keys import DIGEST_BYTES, NamespaceId, SegmentId, new_segment_id
from schemas.namespace import GroupSpec, Namespace
from schemas.records import PartRecord, SegmentRecord

#: When the suites' segments were made, unless a test says otherwise, in unix seconds.
CREATED_S = 1_700_000_040
#: An hour after that.
LATER_S = CREATED_S + 3600.0
EXPECTED_BLOCKS = 1000
#: An id that no namespace has.
UNKNOWN = NamespaceId("0" * 16)


def namespace(model: str = "model") -> Namespace:
    """Returns a namespace of chains; another model is another namespace."""
    group = GroupSpec(kind="full", block_tokens=16, dtype="BF16", shape=(2, 2, 16, 8))
    return Namespace(
        kind="kv",
        model=model,
        weights="w",
        dtype="bfloat16",
        block_tokens=16,
        hash_algo="sha256",
        groups=(group,),
    )


def items(model: str = "encoder") -> Namespace:
    """Returns a namespace of encoder items."""
    return Namespace(kind="ec", model=model, weights="w", dtype="float32")


def chain(blocks: int, *, seed: str = "", after: bytes = b"") -> bytes:
    """Returns the packed digests of a hash chain: `after`, then `blocks` more, which differ by seed."""
    packed, parent = [after], after[-DIGEST_BYTES:]
    for i in range(blocks):
        parent = hashlib.sha256(parent + f"{seed}/{i}".encode()).digest()[:DIGEST_BYTES]
        packed.append(parent)
    return b"".join(packed)


def part_of(digests: bytes, first: int, count: int | None = None) -> bytes:
    """Returns the digests of `count` blocks from block `first` on, or of all that follow."""
    end = len(digests) if count is None else (first + count) * DIGEST_BYTES
    return digests[first * DIGEST_BYTES : end]


def blocks_of(digests: bytes) -> int:
    """Returns how many blocks a packed chain has."""
    return len(digests) // DIGEST_BYTES


def record(
    slots: int,
    *,
    depth: int = 0,
    created_s: int = CREATED_S,
    sizes: Sequence[int] | None = None,
    codec: Literal["none", "lz4"] = "none",
    data_start: int = 4096,
    cost_us: int = 0,
    salt: bytes = b"",
) -> SegmentRecord:
    """Returns a record of one part. All slots have the same size, unless `sizes` names them."""
    part = PartRecord(data_start, tuple(sizes or (512,) * slots))
    return SegmentRecord((part,), slots, codec, created_s, depth, 512 * slots, cost_us, salt)


def put(
    index: Index,
    name: NamespaceId,
    digests: bytes,
    first: int = 0,
    count: int | None = None,
    *,
    created_s: int = CREATED_S,
    segment: SegmentId | None = None,
    cost_us: int = 0,
    salt: bytes = b"",
) -> SegmentId:
    """Commits blocks of a chain as one segment of one rank, and returns its id."""
    mine = part_of(digests, first, count)
    segment = segment or new_segment_id(digests)
    state = index.commit(
        name,
        segment,
        mine,
        record(blocks_of(mine), depth=first, created_s=created_s, cost_us=cost_us, salt=salt),
        rank=0,
        ranks=1,
    )
    assert state is CommitState.VISIBLE
    return segment


def put_all(index: Index, name: NamespaceId, digests: bytes, sizes: Iterable[int]) -> list[SegmentId]:
    """Commits a chain as segments of these sizes, one after the other."""
    segments, first = [], 0
    for size in sizes:
        segments.append(put(index, name, digests, first, size))
        first += size
    return segments


def served(runs: Sequence[Run]) -> int:
    """Returns how many blocks a match serves, and asserts that its runs follow each other from block 0 on."""
    position = 0
    for run in runs:
        assert run.start == position
        assert run.count > 0
        assert 0 <= run.slot <= run.slot + run.count <= run.record.slots
        position += run.count
    return position


def places(runs: Iterable[Run]) -> list[tuple[SegmentId, int]]:
    """Returns the segment and slot of every block of a match."""
    return [(run.segment, run.slot + i) for run in runs for i in range(run.count)]
