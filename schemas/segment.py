"""Metadata of a segment: the JSON inside a safetensors header's `__metadata__`.

safetensors allows only strings there, so each field is a JSON text of its own.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import FailFast, Field, model_validator

from schemas.base import MAX_NUMBER, StrictModel
from schemas.records import Codec

#: Most slots of a segment; `segment.max_blocks` allows no more.
MAX_SLOTS = 1024

Count = Annotated[int, Field(ge=0, lt=MAX_NUMBER)]


class SlotMeta(StrictModel):
    """One slot of a segment, in the order of the file."""

    #: Content key in hex; also the tensor's name.
    key: str = Field(pattern=r"^([0-9a-f]{2}){18,66}$")
    #: Codec of this slot: one that the namespace's codec doesn't shrink stays `none`.
    codec: Codec
    #: dtype and shape before the codec (safetensors' names), and their size in bytes.
    dtype: str
    shape: Annotated[tuple[Count, ...], FailFast()] = Field(max_length=8)
    raw_bytes: Count
    #: xxh3-64 of the stored bytes, seeded with xxh3-64 of the slot's description, in hex.
    xxh3: str = Field(pattern=r"^[0-9a-f]{16}$")
    #: (Signed, not encrypted) BLAKE3 of the stored bytes, keyed with BLAKE3 of the description, in hex.
    blake3: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    #: (Encrypted) Tag of the slot's AES-256-GCM, in hex.
    tag: str | None = Field(default=None, pattern=r"^[0-9a-f]{32}$")


class SegmentMeta(StrictModel):
    """A segment's description of itself, enough to rebuild the index from payloads alone."""

    #: (Signed) MAC of the header, and the id of the key that it was made with. They stand first.
    mac: str | None = Field(default=None, pattern=r"^[0-9a-f]{64}$")
    key: str | None = None
    #: 2 if it is signed or salted.
    format: Literal[1, 2] = 1
    segment: str = Field(pattern=r"^[0-9a-f]{16}$")
    namespace_id: str = Field(pattern=r"^[0-9a-f]{16}$")
    #: The namespace's canonical JSON, so that a segment of an unknown namespace can be explained.
    namespace: str
    kind: Literal["kv", "ec"]
    rank: Count
    ranks: Count
    codec: Codec
    #: Place of slot 0 in its chain.
    depth: Count
    created_s: Count
    #: Time that an engine took to compute it, in microseconds; 0: unknown.
    cost_us: Count = 0
    #: Id of the salt that its requests came with, in hex (kvstore.keys.salt_id); absent without one.
    salt: str | None = Field(default=None, pattern=r"^[0-9a-f]{32}$")
    #: (Encrypted) The payload's data key, wrapped, in hex.
    data_key: str | None = Field(default=None, pattern=r"^[0-9a-f]{80}$")
    #: Its writer: product version, host, and the start of the engine. Its id is in the index
    #: (kvstore.keys.writer_id).
    writer: str
    slots: Annotated[tuple[SlotMeta, ...], FailFast()] = Field(min_length=1, max_length=MAX_SLOTS)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rank >= self.ranks:
            raise ValueError(f"got rank {self.rank}, expected less than {self.ranks}")
        signed, encrypted = self.key is not None, self.data_key is not None
        if (self.mac is not None) != signed or (encrypted and not signed):
            raise ValueError("a signature without its key, or a key without its signature")
        if (self.format == 2) != (signed or self.salt is not None):
            raise ValueError("format and contents disagree")
        if any(
            (slot.blake3 is not None) != (signed and not encrypted) or (slot.tag is not None) != encrypted
            for slot in self.slots
        ):
            raise ValueError("a slot and its segment differ in signature or encryption")
        return self
