"""Makes the index's record of a segment from the headers of its payloads alone.

Every field of a record, and every digest, stands in the headers, so that what was saved once can be
committed again: from an archive, or from a payload store whose index is lost.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from pydantic import ValidationError

from kvstore.errors import CorruptPayload
from kvstore.format.segment import Header
from kvstore.index.contract import MAX_RANKS
from kvstore.keys import ContentKey, canonical_json, digest, writer_id
from schemas.namespace import Namespace
from schemas.records import SegmentRecord, pack_record, rounded_cost


def digests_of(header: Header) -> bytes:
    """Returns the packed digests of a header's slots, in order."""
    return b"".join(digest(ContentKey(bytes.fromhex(slot.key))) for slot in header.meta.slots)


def record_of(headers: Sequence[Header]) -> SegmentRecord:
    """Returns the record with these ranks' parts: one for a rank's commit, all of them for the whole segment.

    Raises CorruptPayload if the headers disagree, or hold what this product never writes.
    """
    first = headers[0].meta
    for header in headers[1:]:
        check_same_segment(headers[0], header)
    record = SegmentRecord(
        parts=tuple(header.part for header in headers),
        slots=len(first.slots),
        codec=first.codec,
        created_s=max(header.meta.created_s for header in headers),
        depth=first.depth,
        # Stages of a pipeline have slots of different sizes, so the index keeps no size for several ranks.
        raw_bytes=sum(slot.raw_bytes for slot in first.slots) if first.ranks == 1 else 0,
        cost_us=rounded_cost(first.cost_us),
        salt=headers[0].salt,
        writer=writer_id(first.writer),
    )
    try:
        pack_record(record)
    except (struct.error, ValueError, OverflowError) as exc:
        raise CorruptPayload("the header's numbers don't fit into an index record") from exc
    if first.ranks > MAX_RANKS:
        raise CorruptPayload(f"a segment of {first.ranks} ranks is not ours")
    return record


def check_same_segment(one: Header, other: Header) -> None:
    """Checks that two headers are of ranks of one segment, to be committed together. Raises
    CorruptPayload.
    """
    for name in (
        "namespace_id",
        "segment",
        "kind",
        "ranks",
        "codec",
        "depth",
        "cost_us",
        "salt",
        "writer",
    ):
        if getattr(one.meta, name) != getattr(other.meta, name):
            raise CorruptPayload(f"ranks {one.meta.rank} and {other.meta.rank} differ in {name}")
    if digests_of(one) != digests_of(other):
        raise CorruptPayload(f"ranks {one.meta.rank} and {other.meta.rank} hold different blocks")


def namespace_of(header: Header) -> Namespace:
    """Returns the namespace that a header holds, fit to be registered under the id that the header names.

    Raises CorruptPayload for a namespace that this version spells in another way, such as a newer version's.
    """
    text = header.meta.namespace
    try:
        namespace = Namespace.model_validate_json(text)
    except ValidationError as exc:
        raise CorruptPayload("its namespace has fields that this version doesn't know") from exc
    if canonical_json(namespace) != text or namespace.kind != header.meta.kind:
        raise CorruptPayload("its namespace is not one of this version's")
    return namespace
