"""A whole segment from its payloads: reads it, verifies it, and commits it as its ranks' writers would.

Order of a commit from payloads, so that one that is cut off, or runs beside a deletion, is harmless:
    1. read      the headers of all ranks           crash: nothing has happened
    2. commit    every rank                         crash: visible, or incomplete until it expires
    3. look      whether all payloads are there     if they were deleted meanwhile, it is evicted again
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from kvstore.errors import CorruptPayload, NamespaceUnknown, PayloadMissing
from kvstore.format.keyring import Keyring
from kvstore.format.segment import Header
from kvstore.index.port import CommitState, Index
from kvstore.keys import NamespaceId, SegmentId, payload_name
from kvstore.payloads.port import PayloadStore
from kvstore.verify.headers import digests_of, record_of
from kvstore.verify.payloads import are_there, check_name, read_header, verify_slots
from kvstore.verify.returning import Returns
from schemas.records import SegmentRecord


@dataclass(frozen=True, slots=True)
class Whole:
    """A segment with the payloads of all ranks, as their headers describe it."""

    #: The ranks' headers, rank 0 first.
    headers: tuple[Header, ...]
    record: SegmentRecord
    #: The packed digests of its slots.
    digests: bytes

    @classmethod
    def of(cls, headers: Sequence[Header]) -> Self:
        """Returns the segment of all ranks' headers. Raises CorruptPayload if they disagree."""
        return cls(tuple(headers), record_of(headers), digests_of(headers[0]))


def read_whole(
    payloads: PayloadStore,
    keyring: Keyring,
    namespace: NamespaceId,
    segment: SegmentId,
    sizes: Mapping[int, int],
) -> Whole:
    """Reads the headers of a segment whose payloads have these sizes (rank -> bytes).

    Raises PayloadMissing, CorruptPayload, UnreadablePayload, and what the store raises. Payloads of ranks
    that the segment does not have are ignored: they are strays.
    """
    headers: list[Header] = []
    ranks = 1
    while len(headers) < ranks:
        rank = len(headers)
        if rank not in sizes:
            raise PayloadMissing(f"the payload of rank {rank} is missing")
        header = read_header(
            payloads, keyring, payload_name(namespace, segment, rank), sizes[rank], namespace
        )
        check_name(header, namespace, segment, rank)
        if header.part.nbytes != sizes[rank]:
            raise CorruptPayload(
                f"the payload of rank {rank} has {sizes[rank]} bytes, its header says {header.part.nbytes}"
            )
        headers.append(header)
        ranks = headers[0].meta.ranks
    return Whole.of(headers)


def verify_whole(payloads: PayloadStore, namespace: NamespaceId, segment: SegmentId, whole: Whole) -> None:
    """Verifies every slot of every rank. Raises CorruptPayload and what the store raises."""
    for rank, header in enumerate(whole.headers):
        verify_slots(payloads, payload_name(namespace, segment, rank), header)


def commit_whole(
    index: Index,
    payloads: PayloadStore,
    segment: SegmentId,
    whole: Whole,
    *,
    returns: Returns,
    register: Callable[[], object],
    delete_after_s: float,
) -> CommitState:
    """Commits every rank of what `returns` lets in; calls `register` if the index has lost the namespace.

    Returns VISIBLE; or REFUSED if it is barred or in the trash, or the index has another record of it; or
    WAITING if its payloads were deleted meanwhile, so that it is evicted again, and the rest of them deleted
    after `delete_after_s` (unix time). Raises what the backends raise.
    """
    name = NamespaceId(whole.headers[0].meta.namespace_id)
    state = CommitState.REFUSED
    if returns.barred(name, segment, whole.record) is not None:
        return state
    for rank, header in enumerate(whole.headers):
        record, ranks = record_of([header]), len(whole.headers)
        try:
            state = index.commit(name, segment, whole.digests, record, rank=rank, ranks=ranks)
        except NamespaceUnknown:
            register()
            state = index.commit(name, segment, whole.digests, record, rank=rank, ranks=ranks)
        if state is CommitState.REFUSED:
            return state
    if state is CommitState.VISIBLE and not are_there(payloads, name, segment, whole.record.parts):
        index.evict(name, [segment], delete_after_s=delete_after_s, rule="repair")
        return CommitState.WAITING
    return state
