"""Namespace: everything that changes the bytes of a payload (docs/format.md, "Namespace")."""

from __future__ import annotations

from math import prod
from typing import Literal, Self

from pydantic import Field, model_validator

from schemas.base import Closed
from schemas.records import Codec

#: Bytes per element of the safetensors dtypes that slots may have.
DTYPE_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E5M2": 1, "F8_E4M3": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8,
}  # fmt: skip

GroupKind = Literal["full", "mla", "sliding_window", "chunked_local", "mamba"]


class GroupSpec(Closed):
    """Layers whose KV lives and dies together: of one kind, one block size and one page shape.

    `shape` is [layers, heads, tokens, content], the canonical order of a slot, content in elements
    of `dtype`: the whole block, of all pipeline stages and of all tensor-parallel shards. A rank holds its
    stage's layers and its shard's heads; a state that can't be cut into heads counts its shards as heads.
    `window` is in tokens, for the kinds that need only the tail of a prefix.
    """

    kind: GroupKind
    block_tokens: int = Field(ge=1)
    dtype: str
    shape: tuple[int, int, int, int]
    #: Digest of the layers' names in slot order.
    layers: str = ""
    #: Into how many different parts tensor parallelism cuts a block; further ranks hold copies.
    shards: int = Field(default=1, ge=1)
    window: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {self.dtype!r}; allowed: {', '.join(sorted(DTYPE_BYTES))}")
        if min(self.shape) < 1:
            raise ValueError("every dimension of a slot's shape must be at least 1")
        if (self.window is None) != (self.kind in ("full", "mla", "mamba")):
            raise ValueError(
                "window goes with the kinds sliding_window and chunked_local, and only with them"
            )
        if self.shape[1] % self.shards:
            raise ValueError(f"{self.shape[1]} heads can't be cut into {self.shards} equal shards")
        return self

    @property
    def slot_bytes(self) -> int:
        """Bytes of one whole block, of all stages and shards."""
        return prod(self.shape) * DTYPE_BYTES[self.dtype]


class Parallel(Closed):
    """Sizes of the parallel layout; ranks are part of a payload's name, not of its namespace.

    `tp` = 0: engines of any tensor-parallel size share the namespace; how many shards a segment was cut into
    is its number of parts.
    """

    tp: int = Field(default=1, ge=0)
    pp: int = Field(default=1, ge=1)
    dcp: int = Field(default=1, ge=1)


class Namespace(Closed):
    """Canonical identity of a set of interchangeable payloads. Equal JSON, equal bytes."""

    format: Literal[1] = 1
    kind: Literal["kv", "ec"]
    tenant: str = "default"
    model: str
    revision: str = ""
    #: Digest of the weights' files, or the operator's label for them.
    weights: str
    #: Digest of the model's configuration, so that a rope or head override is another namespace.
    config: str = ""
    #: The dtype the model computes in, and the quantisation of its weights.
    dtype: str
    quantization: str = ""
    #: kv only: tokens per block hash, hash algorithm and the digest of the chain's root.
    block_tokens: int = Field(default=0, ge=0)
    hash_algo: str = ""
    hash_root: str = ""
    #: kv only: the KV cache's dtype as vLLM names it, and the order of a slot's dimensions.
    kv_dtype: str = ""
    page_order: str = ""
    #: kv only: what fills a page: device type, attention backends, and on the CPU the instruction set.
    page_format: str = ""
    groups: tuple[GroupSpec, ...] = ()
    parallel: Parallel = Parallel()
    codec: Codec = "none"
    epoch: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.kind == "kv":
            if not self.groups or not self.block_tokens or not self.hash_algo:
                raise ValueError("a kv namespace needs groups, block_tokens and hash_algo")
        elif self.groups or self.block_tokens:
            raise ValueError("groups and block_tokens belong to kv namespaces only")
        return self

    def parts(self, group: int = 0) -> int:
        """Into how many payloads this namespace's engines cut a segment of a group (kv), an item (ec): 1."""
        return self.groups[group].shards * self.parallel.pp if self.kind == "kv" else 1
