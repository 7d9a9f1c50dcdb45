"""The archive that `cache-admin export` writes and `cache-admin import` reads.

    kvstore-export.json     the manifest below, the first member
    <payload name>          each payload as it is stored, a safetensors file; the parts of one segment
                            (its ranks) stand next to each other, rank 0 first
    ...
    the two zero blocks that end every tar: without them the archive is truncated

It is a plain tar of regular files and nothing else. The manifest's counts were planned, for a progress bar; a
payload that turned out damaged is not in the archive.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from schemas.base import StrictModel
from schemas.pack import Pack

#: Name of the first member.
MANIFEST = "kvstore-export.json"


class Manifest(StrictModel):
    """The description of an archive, inside it."""

    format: Literal[1] = 1
    #: Version of the product that wrote it.
    version: str
    created_s: int = Field(ge=0)
    #: Namespace id -> canonical JSON of the namespace, as a string because the id is its hash.
    namespaces: dict[str, str]
    segments: int = Field(ge=0)
    payloads: int = Field(ge=0)
    payload_bytes: int = Field(ge=0)
    #: The prompts that the archive holds, if it is a pack.
    pack: Pack | None = None
