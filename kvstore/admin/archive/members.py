"""The payloads of an archive, which are verified before they go anywhere.

What a member says of itself takes no memory before its bytes have come.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from kvstore.admin.archive.tar import BadArchive, Member
from kvstore.errors import CorruptPayload
from kvstore.format import segment as codec
from kvstore.format.keyring import Keyring
from kvstore.format.segment import Header
from kvstore.keys import NamespaceId, SegmentId, parse_payload_name
from kvstore.verify.payloads import check_name, check_slots

#: Settings allow segments of 1 GiB, and one block more.
_MAX_PAYLOAD = 4 << 30
#: Memory for a payload is taken in steps of so many bytes, as they arrive: a header may say any size.
_STEP = 32 << 20


@dataclass(frozen=True, slots=True)
class ArchivedPayload:
    """A member that is a payload, with what its name says."""

    namespace: NamespaceId
    segment: SegmentId
    rank: int
    member: Member

    @classmethod
    def of(cls, member: Member) -> Self:
        """Returns the payload that a member is, by its name and size. Raises BadArchive if it is none."""
        name = parse_payload_name(member.name)
        if name is None:
            raise BadArchive(f"member {member.name!r} is not a payload, and nothing else is in an export")
        if member.size > _MAX_PAYLOAD:
            raise BadArchive(f"member {member.name!r} is larger than any payload")
        return cls(*name, member)


class PayloadReader:
    """Reads payloads of an archive and verifies them, one at a time: the header first, then its slots."""

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self._buffer = bytearray()

    def header(self, payload: ArchivedPayload) -> tuple[Header, memoryview]:
        """Returns the payload's header and its bytes.

        Raises CorruptPayload unless it is that of this rank, segment and namespace, and describes all of the
        member; UnreadablePayload, and what the archive raises.
        """
        member = payload.member
        start = memoryview(bytearray(min(8, member.size)))
        member.read_into(start)
        length = codec.header_length(start)
        if length > member.size:
            raise CorruptPayload(f"a header of {length} bytes in a payload of {member.size}")
        head = memoryview(bytearray(length))
        head[:8] = start
        member.read_into(head[8:])
        header = codec.parse_header(head, namespace=payload.namespace, keyring=self._keyring)
        check_name(header, payload.namespace, payload.segment, payload.rank)
        if header.part.nbytes != member.size:
            raise CorruptPayload(f"{member.size} bytes, but {header.part.nbytes} by its header")
        return header, head

    def slots(self, payload: ArchivedPayload, header: Header) -> memoryview:
        """Returns what follows the header, until the next payload is read. Every slot has its checksum and
        decompresses. Raises CorruptPayload, and what the archive raises."""
        data = self._data(payload.member, sum(header.part.slot_sizes))
        check_slots(header, data, decompress=True)
        return data

    def _data(self, member: Member, nbytes: int) -> memoryview:
        # One buffer for all payloads: a fresh one would cost more in page faults than the read itself.
        for start in range(0, nbytes, _STEP):
            end = min(start + _STEP, nbytes)
            if len(self._buffer) < end:
                self._buffer.extend(bytes(end - len(self._buffer)))
            with memoryview(self._buffer) as whole, whole[start:end] as piece:
                member.read_into(piece)
        return memoryview(self._buffer)[:nbytes]
