"""Metadata of a segment: the JSON inside a safetensors header's `__metadata__`.

safetensors allows only strings there, so each field is a JSON text of its own.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from schemas.base import Closed
from schemas.records import Codec


class SlotMeta(Closed):
    """One slot of a segment, in the order of the file."""

    #: Content key in hex; also the tensor's name.
    key: str = Field(pattern=r"^([0-9a-f]{2}){18,66}$")
    #: How this slot is stored: a slot that the namespace's codec doesn't shrink stays `none`.
    codec: Codec
    #: dtype and shape before the codec (safetensors' names), and their size in bytes.
    dtype: str
    shape: tuple[Annotated[int, Field(ge=0)], ...]
    raw_bytes: int = Field(ge=0)
    #: xxh3-64 of the stored bytes, seeded with xxh3-64 of the slot's description, in hex.
    xxh3: str = Field(pattern=r"^[0-9a-f]{16}$")


class SegmentMeta(Closed):
    """What a segment says of itself; enough to rebuild the index from payloads alone."""

    format: Literal[1] = 1
    segment: str = Field(pattern=r"^[0-9a-f]{16}$")
    namespace_id: str = Field(pattern=r"^[0-9a-f]{16}$")
    #: The namespace's canonical JSON, so that a stranger's segment can be explained.
    namespace: str
    kind: Literal["kv", "ec"]
    rank: int = Field(ge=0)
    ranks: int = Field(ge=1)
    codec: Codec
    #: Index in its chain of slot 0.
    depth: int = Field(ge=0)
    created_s: int = Field(ge=0)
    #: What an engine says it took to compute, in microseconds; 0: unknown.
    cost_us: int = Field(default=0, ge=0)
    #: Who wrote it: product version and host, for a person who asks.
    writer: str
    slots: tuple[SlotMeta, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.rank >= self.ranks:
            raise ValueError(f"rank {self.rank} of {self.ranks}")
        return self
