"""A segment from its payloads into the index: read, verified, committed as its ranks' writers would.

Order of a commit from payloads, so that one that is cut off, or runs beside a deletion, is harmless:
    1. read      the headers of all ranks           nothing has happened
    2. commit    every rank                         crash: seen, or incomplete until it expires
    3. look      whether all payloads are there     they were deleted meanwhile: it is evicted again
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass

from kvstore.admin.payloads import are_there, check_name, check_slot, read_bytes, read_header
from kvstore.admin.records import digests_of, namespace_of, record_of
from kvstore.codec import Header
from kvstore.errors import CorruptPayload, KVStoreError, NamespaceUnknown
from kvstore.index.redis import RedisIndex
from kvstore.index.sqlite import SqliteIndex
from kvstore.keys import NamespaceId, SegmentId, payload_name
from kvstore.ports import CommitState, PayloadStore
from schemas.namespace import Namespace
from schemas.records import SegmentRecord
from schemas.settings import Settings

AnyIndex = RedisIndex | SqliteIndex

#: Items differ in size; this is what the EC connector registers its namespaces with.
_ITEM_BYTES = 1 << 20
#: Slots are read together up to so many bytes: a bucket is asked per tens of slots, not per slot.
_TOGETHER = 32 << 20


class Patience:
    """With a store that fails on single payloads, until it fails on several in a row. Any thread."""

    def __init__(self, most: int = 5) -> None:
        self._most = most
        self._failures = 0
        self._lock = threading.Lock()

    def answered(self) -> None:
        """A payload could be read, or is not there."""
        with self._lock:
            self._failures = 0

    def unanswered(self, exc: KVStoreError) -> None:
        """A payload could not be read. Raises the error if that goes on: it is the store's failure then."""
        with self._lock:
            self._failures += 1
            if self._failures >= self._most:
                raise exc


class Incomplete(CorruptPayload):
    """A rank's payload is not there."""

    reason = "missing"


@dataclass(frozen=True, slots=True)
class Whole:
    """A segment of which every rank's payload is there, by its headers."""

    #: By rank.
    headers: tuple[Header, ...]
    record: SegmentRecord
    #: Packed.
    digests: bytes


def read_whole(
    payloads: PayloadStore, namespace: NamespaceId, segment: SegmentId, sizes: Mapping[int, int]
) -> Whole:
    """The headers of a segment whose payloads have these sizes (rank -> bytes).

    Raises Incomplete, CorruptPayload, and what the store raises. Payloads of ranks that the segment does not
    have are ignored: they are nobody's.
    """
    headers: list[Header] = []
    ranks = 1
    while len(headers) < ranks:
        rank = len(headers)
        if rank not in sizes:
            raise Incomplete(f"the payload of rank {rank} is missing")
        header = read_header(payloads, payload_name(namespace, segment, rank), sizes[rank], namespace)
        check_name(header, namespace, segment, rank)
        if header.part.nbytes != sizes[rank]:
            raise CorruptPayload(
                f"the payload of rank {rank} has {sizes[rank]} bytes, its header says {header.part.nbytes}"
            )
        headers.append(header)
        ranks = headers[0].meta.ranks
    return Whole(tuple(headers), record_of(headers), digests_of(headers[0]))


def verify(payloads: PayloadStore, namespace: NamespaceId, segment: SegmentId, whole: Whole) -> None:
    """Read every slot of every rank. Raises CorruptPayload and what the store raises."""
    for rank, header in enumerate(whole.headers):
        name = payload_name(namespace, segment, rank)
        slots, sizes = header.meta.slots, header.part.slot_sizes
        first, offset = 0, header.part.data_start
        while first < len(slots):
            end, nbytes = first + 1, sizes[first]
            while end < len(slots) and nbytes + sizes[end] <= _TOGETHER:
                nbytes += sizes[end]
                end += 1
            data = read_bytes(payloads, name, offset, nbytes)
            if len(data) < nbytes:
                raise CorruptPayload(f"the payload of rank {rank} ends at byte {offset + len(data)}")
            at = 0
            for slot, size in zip(slots[first:end], sizes[first:end], strict=True):
                check_slot(data[at : at + size], slot, decompress=False)
                at += size
            first, offset = end, offset + nbytes


def expected_blocks(settings: Settings, namespace: Namespace) -> int:
    """What an engine registers this namespace with."""
    block = max((group.slot_bytes for group in namespace.groups), default=_ITEM_BYTES)
    return max(1, settings.capacity_bytes // block)


def commit_whole(
    index: AnyIndex,
    payloads: PayloadStore,
    settings: Settings,
    segment: SegmentId,
    whole: Whole,
    now_s: float,
) -> CommitState:
    """Commit every rank; a namespace that the index has lost is registered.

    REFUSED: it is in the trash, or the index says something else of it. WAITING: its payloads were deleted
    meanwhile. Raises CorruptPayload for a namespace that this version can't spell, and what the backends
    raise.
    """
    namespace = namespace_of(whole.headers[0])
    name = NamespaceId(whole.headers[0].meta.namespace_id)
    state = CommitState.REFUSED
    for rank, header in enumerate(whole.headers):
        record = record_of([header])
        ranks = len(whole.headers)
        try:
            state = index.commit(name, segment, whole.digests, record, rank=rank, ranks=ranks)
        except NamespaceUnknown:
            index.register(namespace, expected_blocks=expected_blocks(settings, namespace))
            state = index.commit(name, segment, whole.digests, record, rank=rank, ranks=ranks)
        if state is CommitState.REFUSED:
            return state
    if state is CommitState.VISIBLE and not are_there(payloads, name, segment, whole.record.parts):
        index.evict(name, [segment], delete_after_s=now_s + settings.grace_s, rule="repair")
        return CommitState.WAITING
    return state
