"""Helpers of the payload suite: good and bad names, and the storage behind a store."""

from __future__ import annotations

from abc import ABC, abstractmethod

from kvstore.keys import NamespaceId, SegmentId, new_segment_id, parse_payload_name, payload_name
from kvstore.payloads.port import PayloadStore

NAMESPACE = NamespaceId("0123456789abcdef")
OTHER_NAMESPACE = NamespaceId("fedcba9876543210")
NAMESPACES = (NAMESPACE, OTHER_NAMESPACE)

BAD_NAMES = (
    "",
    ".",
    "..",
    "/",
    "x",
    "../x",
    "/etc/hostname",
    "0123456789abcdef",
    "0123456789abcdef/ab",
    "0123456789abcdef/ab/",
    "0123456789abcdef/ab/..",
    "0123456789abcdef/ab/abcdefabcdefabcd",
    "0123456789abcdef/ab/abcdefabcdefabcd.",
    "0123456789abcdef/ab/abcdefabcdefabcd.-1",
    "0123456789abcdef/ab/abcdefabcdefabcd.00",
    "0123456789abcdef/ab/abcdefabcdefabcd.\u0660",
    "0123456789abcdef/ab/abcdefabcdefabcd.0\n",
    "0123456789abcdef/ab/abcdefabcdefabcd.0\x00",
    "0123456789abcdef/ab/abcdefabcdefabcd.0/x",
    "0123456789abcdef/cd/abcdefabcdefabcd.0",
    "0123456789ABCDEF/ab/abcdefabcdefabcd.0",
    "/0123456789abcdef/ab/abcdefabcdefabcd.0",
    "../0123456789abcdef/ab/abcdefabcdefabcd.0",
    "0123456789abcdef/../0123456789abcdef/ab/abcdefabcdefabcd.0",
    "0123456789abcdef//ab/abcdefabcdefabcd.0",
    "0123456789abcdef\\ab\\abcdefabcdefabcd.0",
)


class RawPayloads(ABC):
    """The storage behind a payload store, reached without it."""

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Stores an object under any name, also one that is no payload's."""

    @abstractmethod
    def get(self, name: str) -> bytes | None:
        """Returns the whole object, or None."""

    @abstractmethod
    def names(self) -> set[str]:
        """Returns the name of every object, temporary and strange ones included."""


def fresh_name(namespace: NamespaceId = NAMESPACE, rank: int = 0) -> str:
    """Returns a payload name that nothing uses."""
    return payload_name(namespace, new_segment_id(), rank)


def name_in(fan: str, namespace: NamespaceId = NAMESPACE, rank: int = 0) -> str:
    """Returns a fresh payload name whose segment id starts with the byte `fan`, in hex."""
    return payload_name(namespace, SegmentId(bytes.fromhex(fan) + new_segment_id()[1:]), rank)


def views(*parts: bytes) -> list[memoryview]:
    """Returns each part as a buffer."""
    return [memoryview(part) for part in parts]


def fetch(payloads: PayloadStore, name: str, limit: int = 1 << 20) -> bytes | None:
    """Reads a payload's first `limit` bytes through the store, in one read."""
    into = bytearray(limit)
    count = payloads.read(name, 0, [memoryview(into)])
    return None if count is None else bytes(into[:count])


def strangers_beside(name: str) -> list[str]:
    """Returns names beside a payload's under which other programs might leave something."""
    folder, _, leaf = name.rpartition("/")
    strangers = [
        "index.sqlite",
        "index.sqlite-wal",
        "README.txt",
        f"{NAMESPACE}/notes",
        f"{folder}/{leaf}.bak",
        f"{folder}/.{leaf}",
        f"{folder}/{leaf[:-1]}x",
        f"{NAMESPACE}/AB/{leaf}",
        f"{NAMESPACE}/cd/{leaf}",
        f"backup/{name}",
        f"0123/ab/{leaf}",
    ]
    assert not any(parse_payload_name(stranger) for stranger in strangers)
    return strangers
